"""How commands talk to the router of a running cluster: its URL from the cluster's record, and the
operator's token from a file that only the owner of the cluster can read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import click

from splitserve.orchestrator.agent.auth import agent_token
from splitserve.orchestrator.cli.errors import EXIT_FAILED, EXIT_NOT_RUNNING
from splitserve.orchestrator.launch.files import write_private

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.launch.files import ClusterFiles

ANSWER_LIMIT_S = 10.0


class RouterCallError(click.ClickException):
    """The router cannot be asked, or refuses; the message says which."""

    exit_code = EXIT_FAILED


def token_path(files: ClusterFiles) -> Path:
    """Where `up` leaves the operator's token, mode 0600."""
    return files.run_dir / "operator.token"


def write_token(files: ClusterFiles, secret: bytes) -> None:
    """Commands of this user may speak to the router from now on."""
    write_private(token_path(files), agent_token(secret).encode())


class RouterClient:
    """Calls of one cluster's router. Every call raises ``RouterCallError`` when it has no answer
    within ``ANSWER_LIMIT_S``, or one with an error status.
    """

    def __init__(self, files: ClusterFiles) -> None:
        """Exits with ``EXIT_NOT_RUNNING`` when the cluster does not run."""
        record = files.record()
        if record is None or not files.is_running():
            click.echo(f"no cluster named {files.name!r} is running", err=True)
            raise click.exceptions.Exit(EXIT_NOT_RUNNING)
        self._url = record.url
        self._token_path = token_path(files)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that the router answers."""
        return asyncio.run(self._call("GET", path))

    async def _call(self, method: str, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token_path.read_text()}"}
        timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, self._url + path) as response,
            ):
                if response.status != 200:
                    text = await response.text()
                    raise RouterCallError(
                        f"the router answers {method} {path} with {response.status}: {text}"
                    )
                answer: dict[str, Any] = await response.json()
                return answer
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise RouterCallError(
                f"the router at {self._url} does not answer: {error!r}; see its log"
            ) from error

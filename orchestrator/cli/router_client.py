"""The router's routes for operators, as the command line asks them."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from splitserve.orchestrator.cli.errors import EXIT_FAILED, RefusedError
from splitserve.orchestrator.cli.router_tls import connection_to, router_tls
from splitserve.orchestrator.config.tls import tls_reason

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

_TIMEOUT_S = 10.0


class RouterSilentError(click.ClickException):
    """The router does not answer, or not as this version does; the message says what happened."""

    exit_code = EXIT_FAILED


class RouterClient:
    """Asks a router of a running cluster with the token that its ``up`` has left: the first one
    that takes the connection. Orders thus come from one router as long as it lives.
    """

    def __init__(
        self, files: ClusterFiles, record: ClusterRecord, *, keep_alive: bool = False
    ) -> None:
        """``keep_alive``: one connection serves all questions until ``close``."""
        self._files = files
        self._urls = (record.url, *record.more_urls)
        self._url = record.url
        """Of the router that has answered last."""
        self._tls = router_tls(record)
        self._keep_alive = keep_alive
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """No connection is open."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def nodes(self, timeout_s: float = _TIMEOUT_S) -> dict[str, dict[str, Any]]:
        """What the router knows of each node that takes part, by name."""
        nodes: dict[str, dict[str, Any]] = self.status(timeout_s)["nodes"]
        return nodes

    def status(self, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        """What the router says of itself and of its nodes."""
        status, answer = self._ask("GET", "/internal/status", None, timeout_s)
        if status != 200:
            raise RouterSilentError(f"the router answers {status} to a question for its status")
        return answer

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """What happened to the latest request with that id; None when the router does not keep
        it.
        """
        if not request_id.isascii() or not request_id.isprintable() or set(" ?") & set(request_id):
            return None  # It knows no such ids
        status, answer = self._ask("GET", f"/internal/timeline/{request_id}", None)
        if status == 404:
            return None
        if status != 200:
            raise RouterSilentError(f"the router answers {status} to a question for a timeline")
        return answer

    def drain(
        self, node: str, *, restart: bool, force: bool, timeout_s: float | None
    ) -> tuple[str, str]:
        """(verdict, message): ``draining``, ``unknown_node`` or ``last_decode_node``."""
        body = {"restart": restart, "force": force, "timeout_s": timeout_s}
        path = f"/internal/nodes/{quote(node, safe='')}/drain"
        status, answer = self._ask("POST", path, json.dumps(body))
        if "verdict" not in answer:
            raise RouterSilentError(f"the router answers {status}: {answer}")
        return answer["verdict"], answer["message"]

    def flip(self, node: str, role: str, *, force: bool = False) -> tuple[str, str]:
        """(verdict, message): ``flipped``, ``same_role`` (nothing to do), or what refuses it:
        ``unknown_node``, ``leaving``, ``last_decode_node``, ``last_prefill_node`` (unless
        ``force``), ``not_flippable``.
        """
        path = f"/internal/nodes/{quote(node, safe='')}/flip"
        body = json.dumps({"role": role, "force": force})
        status, answer = self._ask("POST", path, body)
        if "verdict" not in answer:
            raise RouterSilentError(f"the router answers {status}: {answer}")
        return answer["verdict"], answer["message"]

    def forget(self, node: str) -> bool:
        """No router remembers anything of the node; False while it takes part at one. Of several
        one that does not answer is left out: when it starts again it knows nothing of the node.
        """
        path = f"/internal/nodes/{quote(node, safe='')}/forget"
        verdicts, silent = [], RouterSilentError("there is no router")
        for url in self._urls:
            self._url = url
            try:
                connection = connection_to(url, self._tls, _TIMEOUT_S)
                status, answer = self._exchange(connection, "POST", path, None)
            except RouterSilentError as error:
                silent = error
                continue
            if "verdict" not in answer:
                raise RouterSilentError(f"the router answers {status}: {answer}")
            verdicts.append(answer["verdict"])
        if not verdicts:
            raise silent
        return all(verdict == "forgotten" for verdict in verdicts)

    def audit(self) -> dict[str, Any]:
        """What engines hold and the router does not know of, or the other way round."""
        status, answer = self._ask("GET", "/internal/audit", None)
        if status != 200:
            raise RouterSilentError(
                f"the router answers {status} to a question for its audit: {answer}"
            )
        return answer

    def cache(self, verb: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The answer to a wish about the cache; an empty verb asks for its state. Raises
        ``RefusedError`` for what cannot be done.
        """
        path = f"/internal/cache/{verb}" if verb else "/internal/cache"
        text = None if body is None else json.dumps(body)
        patience_s = _TIMEOUT_S + (body or {}).get("timeout_s", 0.0) * 2
        status, answer = self._ask("GET" if body is None else "POST", path, text, patience_s)
        if status == 200:
            return answer
        message = str(answer.get("error", {}).get("message", answer))
        if status >= 500 or status == 429:
            raise RouterSilentError(f"the router answers {status}: {message}")
        raise RefusedError(message)

    def _ask(
        self, method: str, path: str, body: str | None, timeout_s: float = _TIMEOUT_S
    ) -> tuple[int, dict[str, Any]]:
        kept, self._connection = self._connection, None
        if kept is not None and method == "GET":
            try:
                return self._exchange(kept, method, path, body)
            except RouterSilentError:
                pass  # The router may have closed it since; a new connection will tell
        connection = self._connect(timeout_s)
        return self._exchange(connection, method, path, body)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """To the first router that is there; to the first of all when none is."""
        for url in self._urls if len(self._urls) > 1 else ():
            connection = connection_to(url, self._tls, timeout_s)
            try:
                connection.connect()
            except (OSError, http.client.HTTPException):
                connection.close()
                continue
            self._url = url
            return connection
        self._url = self._urls[0]
        return connection_to(self._url, self._tls, timeout_s)

    def _token(self) -> str:
        try:
            return self._files.token_path.read_text()
        except FileNotFoundError:
            raise RouterSilentError(f"{self._files.name} has been stopped meanwhile") from None

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
    ) -> tuple[int, dict[str, Any]]:
        headers = {
            "Authorization": f"Bearer {self._token()}",
            "Content-Type": "application/json",
        }
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            if self._keep_alive:
                self._connection = connection
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RouterSilentError(
                f"the router on {self._url} does not answer: {tls_reason(error)}"
            ) from error
        finally:
            if self._connection is not connection:
                connection.close()
        if not isinstance(answer, dict):
            raise RouterSilentError(f"the router answers {answer!r}")
        return response.status, answer

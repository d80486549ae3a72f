"""One vLLM server without splitserve, started as a node of a cluster is, but for the connector."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import load, node
from splitserve.orchestrator.engines.command import API_KEY_ENV, engine_command
from support.up_process import MARK, wait_for

if TYPE_CHECKING:
    from pathlib import Path


class PlainEngine:
    """The process and where it listens. It carries the mark of a cluster's processes, and is ended
    with them when a test fails.
    """

    def __init__(self, cluster: Path, like: str, model: Path, mark: str, **other: object) -> None:
        """``cluster`` is the YAML of a cluster whose node ``like`` is copied, with ``other`` engine
        arguments; ``mark`` the cluster's.
        """
        config = load(str(cluster))
        command = engine_command(config, node(config, like), str(model), "plain")
        argv = list(command.argv)
        at = argv.index("--kv-transfer-config")
        del argv[at : at + 2]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        argv[argv.index("--port") + 1] = str(port)
        for flag, value in other.items():
            values = value if isinstance(value, list) else [value]
            argv += [f"--{flag.replace('_', '-')}", *map(str, values)]
        self.url = f"http://127.0.0.1:{port}"
        self.key = secrets.token_hex(16)
        self._log = cluster.parent / "plain.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env, API_KEY_ENV: self.key, MARK: mark},
                start_new_session=True,
            )

    @property
    def headers(self) -> dict[str, str]:
        """What a request to it carries."""
        return {"Authorization": f"Bearer {self.key}"}

    def wait_until_ready(self, limit_s: float) -> None:
        """It answers."""

        def is_ready() -> bool:
            assert self._process.poll() is None, self.story()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    return bool(answer.status == 200)
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                return False

        wait_for(is_ready, limit_s, "the plain engine", self.story)

    def story(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """It has ended, and what it started too."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

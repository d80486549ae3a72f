"""Real servers that tiers are tested with: Redis and S3 (moto), each a process on loopback."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

from support.standing_still import stand_still

if TYPE_CHECKING:
    from pathlib import Path

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0
POLL_S = 0.01


class StoreServer:
    """A server process that can be stopped, killed and started again, empty, on the same port."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.port = port
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """It listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end = time.monotonic() + START_DEADLINE_S
        while not self.is_listening():
            alive = self._process.poll() is None and time.monotonic() < end
            assert alive, f"{self._command[0]} does not start:\n{self._log.read_text()[-2000:]}"
            time.sleep(POLL_S)

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(STOP_DEADLINE_S)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stand_still(self) -> None:
        """It accepts connections (the kernel does) and never answers, until ``go_on``."""
        assert self._process is not None
        stand_still(self._process.pid)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone, with everything that it held."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_DEADLINE_S)
            self._process = None


def redis_server(port: int, folder: Path, *options: str) -> StoreServer:
    """``redis-server`` that keeps nothing on disk."""
    command = ["redis-server", "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    if "--port" not in options:
        command += ["--port", str(port)]
    return StoreServer([*command, *options], port, folder / f"redis-{port}.log")


class S3Server(StoreServer):
    """moto's server, where every credential is right until ``refuse_credentials``."""

    def __init__(self, port: int, folder: Path) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        super().__init__(command, port, folder / f"s3-{port}.log")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_bucket(self, name: str) -> None:
        self._request("PUT", name)

    def refuse_credentials(self, refuse: bool) -> None:
        """None that a client could give is right."""
        self._request("POST", "moto-api/reset-auth", b"0" if refuse else b"inf")

    def reset(self) -> None:
        """No bucket is left."""
        self._request("POST", "moto-api/reset")

    def _request(self, method: str, path: str, body: bytes | None = None) -> None:
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.endpoint}/{path}", body, headers, method=method)
        with urllib.request.urlopen(request, timeout=STOP_DEADLINE_S) as answer:
            assert answer.status == 200

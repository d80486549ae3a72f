"""Store servers on loopback for a benchmark: started, waited for, ended."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

START_DEADLINE_S = 30.0
POLL_S = 0.02


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    """The port of a ``redis-server`` that keeps nothing on disk."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    with _running(command, port):
        yield port


@contextlib.contextmanager
def redis_behind(wrap: Callable[[Sequence[str]], list[str]], address: str) -> Iterator[int]:
    """As ``redis_server``, in another network namespace: ``wrap`` runs a command there, and
    ``address`` is the server's own.
    """
    port = 6379
    command = ["redis-server", "--bind", address, "--port", str(port), "--save", ""]
    process = subprocess.Popen(
        wrap([*command, "--protected-mode", "no"]),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ping = wrap(["redis-cli", "-h", address, "-p", str(port), "ping"])
    try:
        end = time.monotonic() + START_DEADLINE_S
        while subprocess.run(ping, capture_output=True, timeout=START_DEADLINE_S).returncode:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("redis-server does not start behind the link")
            time.sleep(POLL_S)
        yield port
    finally:
        process.terminate()
        process.wait(START_DEADLINE_S)


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """The endpoint of moto's S3 server, which has that bucket and takes every credential."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, port):
        endpoint = f"http://127.0.0.1:{port}"
        request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=START_DEADLINE_S).close()
        yield endpoint


@contextlib.contextmanager
def mooncake_store(program: Callable[[str], str], megabytes: int) -> Iterator[tuple[int, int]]:
    """The ports of a Mooncake master, for clients and for its metrics; one owner gives the store so
    much memory. ``program`` says where Mooncake's programs are.
    """
    port, admin_port, owner_port = free_port(), free_port(), free_port()
    master = [
        program("mooncake_master"),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={admin_port}",
    ]
    owner = [
        program("mooncake_client"),
        "--host=127.0.0.1",
        f"--port={owner_port}",
        f"--master_server_address=127.0.0.1:{port}",
        "--metadata_server=P2PHANDSHAKE",
        f"--global_segment_size={megabytes} MB",
    ]
    with _running(master, port), _running(owner, owner_port):
        yield port, admin_port


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_DEADLINE_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} does not start")
            time.sleep(POLL_S)
        yield
    finally:
        process.kill()
        process.wait(10)

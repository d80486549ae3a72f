"""The network between a cluster's processes: TCP relays that can be cut and healed.

Nodes listen on 127.0.0.1 and advertise 127.0.0.2 (``advertise_host``); the relay listens there on
the same ports. It runs as a process of its own (``python -m chaos.relay NAME=PORT ...``), so that
the load that asks and the bytes that travel do not wait for each other. It takes one JSON order per
line on standard input and answers each with a line.

Two ways to cut a link: ``freeze`` (what is sent waits, as on a link that drops everything: nobody
is told, and what waited arrives when the link is healed) and ``reset`` (connections end, new ones
are refused at once).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import uvloop

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LISTEN_HOST = "127.0.0.2"
TARGET_HOST = "127.0.0.1"
CHUNK_BYTES = 256 * 1024
START_LIMIT_S = 10.0

Mode = Literal["freeze", "reset"]


class RelayProcess:
    """The relay's process, as its user sees it: cut and heal links by name."""

    def __init__(self, ports: Mapping[str, int], env: Mapping[str, str]) -> None:
        tests = Path(__file__).resolve().parents[1]
        named = [f"{name}={port}" for name, port in ports.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chaos.relay", *named],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**env, "PYTHONPATH": str(tests)},
            bufsize=0,
        )
        self._answer()

    def cut(self, names: Iterable[str], mode: Mode) -> None:
        """Nothing passes these links any more."""
        self._order({"cut": sorted(names), "mode": mode})

    def heal(self, names: Iterable[str]) -> None:
        """They work again."""
        self._order({"heal": sorted(names)})

    def close(self) -> None:
        """The process has ended."""
        self.process.kill()
        self.process.wait(START_LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _order(self, order: dict[str, object]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self._answer()

    def _answer(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == b"ok\n", f"the relay says {line!r}"


class Link:
    """One listening port and the connections through it."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port
        self._passes = asyncio.Event()
        self._passes.set()
        self._refuses = False
        self._pipes: set[asyncio.StreamWriter] = set()

    async def open(self) -> asyncio.Server:
        """Connections are taken."""
        return await asyncio.start_server(
            self._connected, LISTEN_HOST, self.port, limit=CHUNK_BYTES
        )

    def cut(self, mode: Mode) -> None:
        """See the module."""
        self._passes.clear()
        self._refuses = mode == "reset"
        if self._refuses:
            for pipe in self._pipes:
                pipe.transport.abort()

    def heal(self) -> None:
        """See the module."""
        self._refuses = False
        self._passes.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self._pipes.add(writer)
        try:
            if self._refuses:
                return
            await self._passes.wait()
            there, back = await asyncio.open_connection(TARGET_HOST, self.port, limit=CHUNK_BYTES)
            ends.append(back)
            self._pipes.add(back)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except OSError:
            return  # One of the two ends is gone; so is the other one now.
        finally:
            for end in ends:
                self._pipes.discard(end)
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._passes.wait()
            if writer.is_closing():
                return
            writer.write(data)
            await writer.drain()
        await self._passes.wait()
        if not writer.is_closing():
            writer.write_eof()


async def serve(links: Mapping[str, Link]) -> None:
    """Relay until standard input ends."""
    servers = [await link.open() for link in links.values()]
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    _say_ok()
    while line := await orders.readline():
        order = json.loads(line)
        for name in order.get("cut", ()):
            links[name].cut(order["mode"])
        for name in order.get("heal", ()):
            links[name].heal()
        _say_ok()
    for server in servers:
        server.close()


def _say_ok() -> None:
    os.write(sys.stdout.fileno(), b"ok\n")


def main(arguments: list[str]) -> None:
    """``NAME=PORT`` for each link."""
    named = (argument.split("=") for argument in arguments)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve({name: Link(name, int(port)) for name, port in named}))


if __name__ == "__main__":
    main(sys.argv[1:])

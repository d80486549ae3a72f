"""A collector that takes every batch of traces and throws it away.

python fake_collector.py PORT
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

TAKEN = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"


class Collector(asyncio.Protocol):
    """One connection; counts bodies by their length and looks at nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._head = b""
        self._missing = 0

    def data_received(self, data: bytes) -> None:
        while data:
            if self._missing:
                taken = min(self._missing, len(data))
                self._missing -= taken
                data = data[taken:]
                if not self._missing:
                    self._transport.write(TAKEN)
                continue
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            self._head = b""
            at = head.find(b"content-length:")
            self._missing = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if not self._missing:
                self._transport.write(TAKEN)


async def serve(port: int) -> None:
    """Until killed."""
    server = await asyncio.get_running_loop().create_server(Collector, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))

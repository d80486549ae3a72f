"""A cache server that was started again is found by the first look-up after that."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

import msgspec

from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.lookup_client import LookupClient
from splitserve.kv_transfer.cache.messages import FromClient, Hello, Lookup

if TYPE_CHECKING:
    import socket
    from pathlib import Path

GEOMETRY = ChunkGeometry(
    layers=1,
    chunk_tokens=64,
    block_tokens=32,
    heads=1,
    key_bytes=8,
    value_bytes=8,
    item_bytes=1,
    order="rows",
)
KEYS = [bytes(32)]
WAIT_S = 20.0


def _first_messages(listener: socket.socket) -> tuple[socket.socket, list[object]]:
    """A client's connection and the first two things that it has said."""
    connection, _ = listener.accept()
    connection.setblocking(False)
    receiver = packets.Receiver(connection, msgspec.msgpack.Decoder(FromClient))
    heard: list[object] = []
    while len(heard) < 2:
        assert select.select([connection], [], [], WAIT_S)[0], heard
        heard += receiver.messages(2 - len(heard))
    return connection, heard


def test_the_first_question_after_a_new_start(tmp_path: Path) -> None:
    """It goes to the new server, behind a hello; questions in between have nobody to go to."""
    path = str(tmp_path / "s")
    client = LookupClient(path, "engine", 1, bytes(32), GEOMETRY, limit_s=1.0)
    listener = packets.listen(path)
    assert client.ask(KEYS) is not None
    connection, heard = _first_messages(listener)
    assert isinstance(heard[0], Hello)
    connection.close()
    listener.close()
    listener = packets.listen(path)
    assert client.ask(KEYS) is not None
    connection, heard = _first_messages(listener)
    assert isinstance(heard[0], Hello)
    assert isinstance(heard[1], Lookup)
    connection.close()
    listener.close()
    assert client.ask(KEYS) is None
    client.close()

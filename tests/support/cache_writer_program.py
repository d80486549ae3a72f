"""A process that reserves slots of the arena and writes to them when it is told to:
``python cache_writer_program.py SOCKET CHUNKS``.
"""

from __future__ import annotations

import select
import sys

import msgspec

from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.arena import Mapping
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    Arena,
    FromServer,
    Hello,
    Reserve,
    Reserved,
)
from splitserve.orchestrator.engines.mock.model import chunk_geometry
from support.cache_rig import CHUNK_BYTES, CHUNK_TOKENS, SHAPE


def main() -> None:
    """Says ``reserved``, then for each line of its input ``written``."""
    decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
    connection = packets.connect(sys.argv[1])
    hello = Hello(
        version=PROTOCOL_VERSION, engine="writer", rank=0, ranks=1, model=bytes(32),
        geometry=chunk_geometry(CHUNK_TOKENS, SHAPE),
    )  # fmt: skip
    packets.send(connection, hello)
    select.select([connection], [], [], 20)
    found = packets.receive_with_descriptor(connection)
    assert found is not None
    greeting, descriptor = decoder.decode(found[0]), found[1]
    assert isinstance(greeting, Arena)
    assert descriptor is not None
    arena = Mapping(descriptor, greeting.size_bytes)
    keys = b"".join(n.to_bytes(32) for n in range(int(sys.argv[2])))
    packets.send(connection, Reserve(save_id=1, parent=b"", keys=keys))
    select.select([connection], [], [], 20)
    answer = decoder.decode(connection.recv(packets.BUFFER_BYTES))
    assert isinstance(answer, Reserved)
    assert min(answer.offsets) >= 0
    print("reserved", flush=True)
    for _ in sys.stdin:
        for offset in answer.offsets:
            arena.view[offset : offset + CHUNK_BYTES] = b"\xee" * CHUNK_BYTES
        print("written", flush=True)


if __name__ == "__main__":
    main()

"""What the cache server of a host and its clients say to each other.

One message per packet of a ``SOCK_SEQPACKET`` Unix socket, msgpack-encoded frozen structs; one
union per direction. Clients are the scheduler of each engine (looks up), the workers (load and
save, copying pages from and to the arena by themselves) and the router (manages, and watches what
comes and goes). KV itself never crosses the socket.

Keys travel concatenated, ``KEY_BYTES`` each. Tiers are named by their place in the configured list;
``0`` is the arena.
"""

from __future__ import annotations

import msgspec

from splitserve.kv_transfer.cache.codecs.names import RAW, CodecName
from splitserve.kv_transfer.cache.geometry import ChunkGeometry

PROTOCOL_VERSION = 2
MESSAGE_LIMIT_BYTES = 160 * 1024
KEYS_LIMIT = 4_096
"""Keys of one message; longer prompts are looked up as far as that."""
CHUNKS_LIMIT_BYTES = 96 * 1024
"""What is said of chunks in one message: longer lists are cut into several messages."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First packet of an engine's scheduler (``rank`` -1) or worker."""

    version: int
    engine: str
    """Incarnation."""
    rank: int
    ranks: int
    model: bytes
    """``model_digest`` of the engine."""
    geometry: ChunkGeometry
    """Of the chunks that the engine writes."""


class Lookup(msgspec.Struct, frozen=True, kw_only=True, tag="lookup"):
    """How many of these chunks, from the first one on, does the host have, and where?"""

    lookup_id: int
    keys: bytes
    limit_s: float
    """Answer with what is known by then."""


class OpenChunks(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Bring these chunks into the arena and hold them until they are closed."""

    load_id: int
    keys: bytes
    limit_s: float
    """What is not there by then is given up."""


class CloseChunks(msgspec.Struct, frozen=True, kw_only=True, tag="close"):
    """Chunks of a load that are not read any more."""

    load_id: int
    indices: tuple[int, ...] = ()
    """Empty: the whole load."""
    broken: tuple[int, ...] = ()
    """Those whose checksums did not fit; they are removed."""


class Mark(msgspec.Struct, frozen=True):
    """A place in the bytes of a prompt, for the router's prefix index."""

    digest: bytes
    tokens: int


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Give room in the arena for these chunks, which follow ``parent``; each rank of an engine asks
    for the same ones and gets the same room.
    """

    save_id: int
    parent: bytes
    """Key of the chunk before the first one; empty at a prompt's beginning."""
    keys: bytes
    marks: tuple[tuple[int, Mark], ...] = ()
    """(index of a chunk, a mark that ends in it)."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """This rank has written its heads of some reserved chunks."""

    save_id: int
    written: tuple[tuple[int, bytes], ...]
    """(index, xxh3-64 of each layer's slices of this rank, eight bytes each, little-endian)."""
    abandoned: tuple[int, ...] = ()
    """Chunks that will not be written; this rank has stopped writing to them."""


class Manage(msgspec.Struct, frozen=True, kw_only=True, tag="manage"):
    """An operator's wish; ``control_messages.py`` says what there is."""

    request_id: int
    verb: str
    arguments: bytes
    """msgpack of the verb's structure."""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Tell which marks come and go, beginning with those that are there."""


FromClient = Hello | Lookup | OpenChunks | CloseChunks | Reserve | Commit | Manage | Watch


class Arena(msgspec.Struct, frozen=True, kw_only=True, tag="arena"):
    """Answer to a hello. A worker's carries the arena's descriptor as ancillary data."""

    server: str
    """New for each life of the server."""
    size_bytes: int
    tiers: tuple[str, ...]
    is_coded: bool = False
    """Whether chunks may come coded from some tier."""
    refusal: str = ""
    """Why this engine cannot use the cache; empty when it can."""


class TierSpeed(msgspec.Struct, frozen=True):
    """What loading from a tier into the arena is measured to take."""

    latency_s: float
    bytes_per_s: float
    """Counted as KV lies in pages, decoding included."""


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    """Answer to a look-up: one byte per chunk that is there, the number of its tier."""

    lookup_id: int
    tiers: bytes
    speeds: tuple[TierSpeed, ...]
    """By tier number; that of the arena is unused."""


class ReadyChunk(msgspec.Struct, frozen=True):
    """A chunk in the arena, to be read until it is closed."""

    index: int
    offset: int
    """In the arena, in bytes."""
    geometry: ChunkGeometry
    pieces: int
    """Tensor-parallel ranks that wrote it: as many equal runs of heads."""
    checksums: bytes
    """xxh3-64 per layer and piece: ``[layers, pieces]``, eight bytes each, little-endian; of a
    coded chunk one per frame.
    """
    codec: CodecName = RAW
    frames: bytes = b""
    """Of a coded chunk: the length of each layer's frame, uint32, little-endian."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Chunks of a load that are in the arena, and those that will not come."""

    load_id: int
    chunks: tuple[ReadyChunk, ...] = ()
    missing: tuple[int, ...] = ()


class Reserved(msgspec.Struct, frozen=True, kw_only=True, tag="reserved"):
    """Answer to a reserve: an offset in the arena for each chunk, -1 for one that is there already
    or being written, -2 for one for which there is no room now.
    """

    save_id: int
    offsets: tuple[int, ...]


class Managed(msgspec.Struct, frozen=True, kw_only=True, tag="managed"):
    """Answer to an operator's wish."""

    request_id: int
    result: bytes
    """msgpack of one of ``control_messages.Result``."""


class Marks(msgspec.Struct, frozen=True, kw_only=True, tag="marks"):
    """What a watcher is told."""

    is_first: bool = False
    """Everything before is void: a full list begins."""
    added: tuple[Mark, ...] = ()
    removed: tuple[bytes, ...] = ()


FromServer = Arena | Found | Ready | Reserved | Managed | Marks

"""What the cache server's books order: messages to clients, and work for tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from splitserve.kv_transfer.cache.codecs.names import RAW

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.chunk import Chunk
    from splitserve.kv_transfer.cache.codecs.names import CodecName
    from splitserve.kv_transfer.cache.messages import FromServer


class Send(NamedTuple):
    """A message to a client."""

    client: int
    message: FromServer


class AskTier(NamedTuple):
    """Which of these keys does a lower tier have? Answered with ``CacheBook.asked``."""

    tier: int
    ask_id: int
    keys: list[bytes]


class ReadChunk(NamedTuple):
    """Read a chunk from a lower tier into a slot. Answered with ``CacheBook.was_read``."""

    tier: int
    key: bytes
    offset: int


class WriteChunk(NamedTuple):
    """Write a chunk from its slot to a lower tier. Answered with ``CacheBook.was_written``."""

    tier: int
    key: bytes
    parent: bytes
    chunk: Chunk
    codec: CodecName = RAW
    """How a chunk that is not coded yet is to be stored."""
    trials: tuple[CodecName, ...] = ()
    """Codecs that are to be measured on it."""


class RemoveChunks(NamedTuple):
    """These are not wanted in a lower tier any more. Answered with ``Control.cleared`` when there
    is a ``clear_id``.
    """

    tier: int
    keys: list[bytes]
    clear_id: int = 0


class ProbeTier(NamedTuple):
    """Try whether a lower tier answers again. Answered with ``CacheBook.probed``."""

    tier: int


class ListTier(NamedTuple):
    """Remove everything whose key begins so from a lower tier that others write to as well.
    Answered with ``Control.cleared``.
    """

    tier: int
    clear_id: int
    prefix: bytes


Effect = Send | AskTier | ReadChunk | WriteChunk | RemoveChunks | ProbeTier | ListTier

"""zstd in the one way that codecs use it: level 1, one block of bytes, its size known beforehand.

Level 1 gets nearly all that entropy coding has to give here; higher ones look for repetitions,
which KV has none of.
"""

from __future__ import annotations

import threading

import zstandard

from splitserve.kv_transfer.cache.codecs.base import FrameError

LEVEL = 1


class _Contexts(threading.local):
    """A compressor and a decompressor may be used by one thread at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(data: bytes) -> bytes:
    """Its compressed form."""
    return _contexts.compressor.compress(data)


def decompress(packed: memoryview, size: int) -> bytes:
    """The ``size`` bytes that were compressed. Raises ``FrameError`` for anything else; no more
    memory than that is taken, whatever the bytes say.
    """
    try:
        if zstandard.frame_content_size(packed) != size:
            raise FrameError(f"it does not hold {size} compressed bytes")
        return _contexts.decompressor.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"it cannot be decompressed: {error}") from error

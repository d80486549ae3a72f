"""Keys of many chunks of plain tokens at once, where numba is; ``keys.py`` says what a key is.

The tokens come as MessagePack, the quickest way out of a list of Python's integers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.kernels.compiled_blake3 import (
    HASH_WORDS,
    OUTPUT_WORDS,
    TEXT_WORDS,
    compiled_blake3,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.kernels.compiled_blake3 import Blake3

CHUNK_TOKENS_LIMIT = TEXT_WORDS * TEXT_WORDS // HASH_WORDS
"""Of a larger chunk's pieces, the hashes are more than one text."""


class CompiledKeys:
    """Compiled functions; made by ``compiled_keys``."""

    def __init__(self, blake3: Blake3, unpack: Callable[..., int]) -> None:
        self._blake3 = blake3
        self._unpack = unpack

    def can_hash(self, chunk_tokens: int) -> bool:
        """Whether chunks are short enough."""
        return chunk_tokens <= CHUNK_TOKENS_LIMIT

    def hashes(
        self, state: bytes, encoded: bytes, count: int, chunk_tokens: int
    ) -> tuple[bytes, bytes]:
        """64 bytes for each of ``count`` chunks of at most ``CHUNK_TOKENS_LIMIT`` tokens, and the
        state after the last one. ``encoded`` are at least as many tokens.

        Raises ``ValueError`` for a token that is no unsigned number of 32 bits.
        """
        tokens = np.empty((count, chunk_tokens), np.uint32)
        wrong = self._unpack(np.frombuffer(encoded, np.uint8), tokens.reshape(-1))
        if wrong >= 0:
            raise ValueError(f"token {wrong} of a prompt is no number from 0 to 4294967295")
        pieces = -(-chunk_tokens // TEXT_WORDS)
        leaves = np.empty((count, pieces * HASH_WORDS), np.uint32)
        self._blake3.hash_pieces(tokens, leaves)
        key = np.frombuffer(state, np.uint32).copy()
        out = np.empty((count, OUTPUT_WORDS), np.uint32)
        self._blake3.chain(key, leaves, out)
        return out.tobytes(), key.tobytes()


@lru_cache(maxsize=1)
def compiled_keys() -> CompiledKeys | None:
    """None without numba. The first call takes some three seconds."""
    blake3 = compiled_blake3()
    if blake3 is None:
        return None
    import numba

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def unpack(encoded: Any, tokens: Any) -> int:
        """The index of the first token that does not fit, -1 when all do."""
        at = np.uint64(1 if encoded[0] < 0xDC else 3 if encoded[0] == 0xDC else 5)
        one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
        for index in range(len(tokens)):
            tag = encoded[at]
            if tag == 0xCD:  # Most tokens
                tokens[index] = (encoded[at + one] << 8) | encoded[at + two]
                at += three
            elif tag < 0x80:
                tokens[index] = tag
                at += one
            elif tag == 0xCC:
                tokens[index] = encoded[at + one]
                at += two
            elif tag == 0xCE:
                upper = (encoded[at + one] << 24) | (encoded[at + two] << 16)
                tokens[index] = upper | (encoded[at + three] << 8) | encoded[at + four]
                at += one + four
            else:
                return index
        return -1

    found = CompiledKeys(blake3, unpack)
    found.hashes(bytes(4 * HASH_WORDS), b"\x91\x00", 1, 1)
    return found

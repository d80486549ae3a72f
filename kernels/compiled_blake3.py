"""BLAKE3 of many short texts at once, compiled by numba where it is there.

The library hashes one short text after the other, each in one lane of the processor. Here a lane
belongs to a text, and sixteen go through the rounds together. Only what keys of a cache need is
here: texts of at most 1,024 bytes (one chunk of the tree, so no tree), whole 32-bit words, and a
chain in which each hash is the key of the next one. The hashes are those of the library, to the
bit, and tests compare them; a process without numba takes the library.

https://github.com/BLAKE3-team/BLAKE3-specs describes compression, rounds and flags.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Words = npt.NDArray[np.uint32]

TEXT_WORDS = 256
"""The longest text, in words of four bytes, little-endian."""
HASH_WORDS, OUTPUT_WORDS = 8, 16
_BLOCK_WORDS = 16
_LANES = 16
_STATE = HASH_WORDS * _LANES
_IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
_START, _END, _ROOT, _KEYED = 1, 2, 8, 16


class Blake3(NamedTuple):
    """The compiled functions. They release the interpreter."""

    hash_pieces: Any
    """``(texts uint32 [rows, words], out uint32 [rows, pieces * 8])``: the hash of every piece of
    ``TEXT_WORDS`` of every row, the last one of what is left.
    """
    chain: Any
    """``(key uint32 [8], texts uint32 [rows, words], out uint32 [rows, 16])``: 64 bytes of the
    keyed hash of every row, whose key is the first half of the row before. ``key`` is that of the
    first row, and of the next one afterwards. Rows have at most ``TEXT_WORDS``.
    """


@lru_cache(maxsize=1)
def compiled_blake3() -> Blake3 | None:
    """The functions, None without numba. The first call takes a few seconds."""
    try:
        import numba
    except ImportError:
        return None
    compiled: Any = numba.njit(nogil=True, forceinline=True)
    word = np.uint32

    @compiled
    def mixed(a, b, c, d, x, y):  # type: ignore[no-untyped-def]
        a = word(word(a + b) + x)
        d = word(d ^ a)
        d = word((d >> word(16)) | (d << word(16)))
        c = word(c + d)
        b = word(b ^ c)
        b = word((b >> word(12)) | (b << word(20)))
        a = word(word(a + b) + y)
        d = word(d ^ a)
        d = word((d >> word(8)) | (d << word(24)))
        c = word(c + d)
        b = word(b ^ c)
        b = word((b >> word(7)) | (b << word(25)))
        return a, b, c, d

    @compiled
    def after_round(v, m):  # type: ignore[no-untyped-def]
        a0, b0, c0, d0 = mixed(v[0], v[4], v[8], v[12], m[0], m[1])
        a1, b1, c1, d1 = mixed(v[1], v[5], v[9], v[13], m[2], m[3])
        a2, b2, c2, d2 = mixed(v[2], v[6], v[10], v[14], m[4], m[5])
        a3, b3, c3, d3 = mixed(v[3], v[7], v[11], v[15], m[6], m[7])
        a0, b1, c2, d3 = mixed(a0, b1, c2, d3, m[8], m[9])
        a1, b2, c3, d0 = mixed(a1, b2, c3, d0, m[10], m[11])
        a2, b3, c0, d1 = mixed(a2, b3, c0, d1, m[12], m[13])
        a3, b0, c1, d2 = mixed(a3, b0, c1, d2, m[14], m[15])
        return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3

    @compiled
    def permuted(m):  # type: ignore[no-untyped-def]
        return (
            m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13],
            m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8],
        )  # fmt: skip

    @compiled
    def compressed(h, m, length, flags):  # type: ignore[no-untyped-def]
        """The sixteen words after seven rounds, not yet folded."""
        v = (
            h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7],
            word(_IV[0]), word(_IV[1]), word(_IV[2]), word(_IV[3]),
            word(0), word(0), length, flags,
        )  # fmt: skip
        v, m = after_round(v, m), permuted(m)
        v, m = after_round(v, m), permuted(m)
        v, m = after_round(v, m), permuted(m)
        v, m = after_round(v, m), permuted(m)
        v, m = after_round(v, m), permuted(m)
        v, m = after_round(v, m), permuted(m)
        return after_round(v, m)

    @compiled
    def of_lane(w, lane):  # type: ignore[no-untyped-def]
        """Eight words of that lane from here on."""
        return (
            w[lane], w[lane + 16], w[lane + 32], w[lane + 48],
            w[lane + 64], w[lane + 80], w[lane + 96], w[lane + 112],
        )  # fmt: skip

    @numba.njit(nogil=True)
    def compress_lanes(w, length, flags):  # type: ignore[no-untyped-def]
        """``w`` is one array of hashes [8, lanes] and blocks [16, lanes], at offsets that the
        compiler knows: else it does not see that lanes are independent.
        """
        for lane in range(_LANES):
            h = of_lane(w, lane)
            v = compressed(
                h, of_lane(w, lane + _STATE) + of_lane(w, lane + 2 * _STATE), length, flags
            )
            w[lane] = v[0] ^ v[8]
            w[lane + 16] = v[1] ^ v[9]
            w[lane + 32] = v[2] ^ v[10]
            w[lane + 48] = v[3] ^ v[11]
            w[lane + 64] = v[4] ^ v[12]
            w[lane + 80] = v[5] ^ v[13]
            w[lane + 96] = v[6] ^ v[14]
            w[lane + 112] = v[7] ^ v[15]

    @numba.njit(nogil=True)
    def hash_pieces(texts, out):  # type: ignore[no-untyped-def]
        rows, words = texts.shape
        w = np.empty(3 * _STATE, np.uint32)
        for start in range(0, words, TEXT_WORDS):
            end = min(start + TEXT_WORDS, words)
            place = start // TEXT_WORDS * HASH_WORDS
            for first in range(0, rows, _LANES):
                for item in range(HASH_WORDS):
                    for lane in range(_LANES):
                        w[item * _LANES + lane] = word(_IV[item])
                for at in range(start, end, _BLOCK_WORDS):
                    size = min(_BLOCK_WORDS, end - at)
                    for lane in range(_LANES):
                        row = min(first + lane, rows - 1)
                        for item in range(_BLOCK_WORDS):
                            found = texts[row, at + item] if item < size else word(0)
                            w[_STATE + item * _LANES + lane] = found
                    flags = word(0)
                    if at == start:
                        flags |= word(_START)
                    if at + size == end:
                        flags |= word(_END | _ROOT)
                    compress_lanes(w, word(4 * size), word(flags))
                for lane in range(min(_LANES, rows - first)):
                    for item in range(HASH_WORDS):
                        out[first + lane, place + item] = w[item * _LANES + lane]

    @numba.njit(nogil=True)
    def chain(key, texts, out):  # type: ignore[no-untyped-def]
        rows, words = texts.shape
        m = np.zeros(_BLOCK_WORDS, np.uint32)
        h = key.copy()
        for row in range(rows):
            for at in range(0, words, _BLOCK_WORDS):
                size = min(_BLOCK_WORDS, words - at)
                for item in range(_BLOCK_WORDS):
                    m[item] = texts[row, at + item] if item < size else word(0)
                flags = word(_KEYED)
                if at == 0:
                    flags |= word(_START)
                is_last = at + size == words
                if is_last:
                    flags |= word(_END | _ROOT)
                v = compressed(
                    (h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]),
                    (m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7],
                     m[8], m[9], m[10], m[11], m[12], m[13], m[14], m[15]),
                    word(4 * size), word(flags),
                )  # fmt: skip
                for item in range(HASH_WORDS):
                    if is_last:
                        out[row, HASH_WORDS + item] = v[HASH_WORDS + item] ^ h[item]
                    h[item] = v[item] ^ v[HASH_WORDS + item]
            for item in range(HASH_WORDS):
                out[row, item] = h[item]
        key[:] = h

    found = Blake3(hash_pieces, chain)
    texts, key = np.zeros((1, 1), np.uint32), np.zeros(HASH_WORDS, np.uint32)
    found.hash_pieces(texts, np.zeros((1, HASH_WORDS), np.uint32))
    found.chain(key, texts, np.zeros((1, OUTPUT_WORDS), np.uint32))
    return found

"""Many hashes at once are the library's."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3

from splitserve.kernels.compiled_blake3 import (
    HASH_WORDS,
    OUTPUT_WORDS,
    TEXT_WORDS,
    Blake3,
    compiled_blake3,
)

ROWS = (1, 5, 15, 16, 17, 33)
"""Less than the lanes, as many, and more."""
WORDS = (1, 15, 16, 17, 32, 100, 255, 256)


@pytest.fixture(scope="module")
def compiled() -> Blake3:
    """Compiled once: it takes seconds."""
    found = compiled_blake3()
    assert found is not None
    return found


def texts_of(rows: int, words: int) -> np.ndarray:
    """Rows that differ in every word."""
    return np.random.default_rng(rows * words).integers(0, 1 << 32, (rows, words), dtype=np.uint32)


@pytest.mark.parametrize("words", [*WORDS, 257, 512, 600])
def test_pieces_are_hashed(compiled: Blake3, words: int) -> None:
    """Each by itself, the last one shorter, for rows of all lanes and of some."""
    for rows in ROWS:
        texts = texts_of(rows, words)
        out = np.zeros((rows, -(-words // TEXT_WORDS) * HASH_WORDS), np.uint32)
        compiled.hash_pieces(texts, out)
        starts = range(0, words, TEXT_WORDS)
        for text, found in zip(texts, out, strict=True):
            parts = [text[start : start + TEXT_WORDS].tobytes() for start in starts]
            assert found.tobytes() == b"".join(blake3(part).digest() for part in parts)


@pytest.mark.parametrize("words", WORDS)
def test_each_hash_of_a_chain_keys_the_next_one(compiled: Blake3, words: int) -> None:
    """All 64 bytes are the library's, and the key that is left goes on with the chain."""
    for rows in ROWS:
        texts = texts_of(rows, words)
        state = np.arange(HASH_WORDS, dtype=np.uint32)
        key = state.tobytes()
        out = np.zeros((rows, OUTPUT_WORDS), np.uint32)
        compiled.chain(state, texts, out)
        for text, found in zip(texts, out, strict=True):
            expected = blake3(text.tobytes(), key=key).digest(4 * OUTPUT_WORDS)
            assert found.tobytes() == expected
            key = expected[: 4 * HASH_WORDS]
        assert state.tobytes() == key

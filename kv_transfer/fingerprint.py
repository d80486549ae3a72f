"""Everything that must be equal for KV to be usable, as named text values.

Two engines whose fingerprints differ refuse to pair, naming the key and both values. What belongs
in is decided by the engine adapter; what must not is decided here: tensor-parallel size, addresses
and node names may differ.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROMPT_HASH_BYTES = 16


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """One sentence per key whose values differ, empty when the fingerprints are equal."""
    absent = "(absent)"
    return [
        f"{key}: {ours.get(key, absent)} here, {theirs.get(key, absent)} at the peer"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def prompt_hash(token_ids: Sequence[int], extras: str = "") -> bytes:
    """128-bit hash of what a prompt's KV depends on besides the model.

    ``extras`` is the canonical text of adapter, salt and multimodal hashes. The two nodes of a
    transfer tokenise for themselves and compare this before the first page is written.
    """
    digest = blake2b(np.asarray(token_ids, dtype="<u4").tobytes(), digest_size=PROMPT_HASH_BYTES)
    digest.update(extras.encode())
    return digest.digest()

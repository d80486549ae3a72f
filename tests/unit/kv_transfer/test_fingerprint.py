"""Differences of fingerprints, and the hash of a prompt."""

from __future__ import annotations

from splitserve.kv_transfer.fingerprint import PROMPT_HASH_BYTES, differences, prompt_hash


def test_equal_fingerprints_have_no_differences() -> None:
    """The order of the keys does not matter."""
    assert differences({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == []


def test_differences_name_both_values() -> None:
    """One sentence per key, absent ones too, in the order of the keys."""
    assert differences({"b": "2", "a": "1"}, {"a": "3", "c": "4"}) == [
        "a: 1 here, 3 at the peer",
        "b: 2 here, (absent) at the peer",
        "c: (absent) here, 4 at the peer",
    ]


def test_a_prompt_hash_depends_on_tokens_their_order_and_extras() -> None:
    """Equal only for the same prompt under the same adapter, salt and media."""
    hashes = {
        prompt_hash([1, 2]),
        prompt_hash([2, 1]),
        prompt_hash([1, 2, 0]),
        prompt_hash([513]),
        prompt_hash([1, 2], "salt=x"),
        prompt_hash([1, 2], "salt=y"),
    }
    assert len(hashes) == 6
    assert prompt_hash((1, 2)) == prompt_hash([1, 2])
    assert len(prompt_hash([])) == PROMPT_HASH_BYTES

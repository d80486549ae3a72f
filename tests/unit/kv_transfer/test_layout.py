"""Page addresses, and how the pages of ranks of different tensor-parallel sizes correspond."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kv_transfer.layout import (
    LayoutMismatchError,
    PageLayout,
    check_compatible,
    pair,
    ranks_sharing_heads,
    shares_heads,
)


def layout(**changes: Any) -> PageLayout:
    """Two layers of four blocks, two of four heads."""
    fields: dict[str, Any] = {
        "layer_bases": (1000, 5000),
        "block_stride": 128,
        "page_bytes": 100,
        "num_blocks": 4,
        "block_tokens": 16,
        "heads": 2,
        "first_head": 2,
        "total_heads": 4,
    }
    return PageLayout(**{**fields, **changes})


def rank_of(tensor_parallel: int, rank: int, *, base: int, blocks: int) -> PageLayout:
    """A rank of a model with four heads of 50 bytes, three layers."""
    heads = 4 // tensor_parallel
    size = blocks * heads * 50
    return layout(
        layer_bases=tuple(base + layer * size for layer in range(3)),
        block_stride=heads * 50,
        page_bytes=heads * 50,
        num_blocks=blocks,
        heads=heads,
        first_head=rank * heads,
    )


def test_addresses_are_layer_major() -> None:
    """Index ``layer * num_blocks + block`` finds the page of that layer and block."""
    one = layout()
    addresses = one.page_addresses()
    assert addresses.tolist() == [1000, 1128, 1256, 1384, 5000, 5128, 5256, 5384]
    indices = one.page_indices([1, 0], [3, 2])
    assert indices.tolist() == [7, 6, 3, 2]
    assert addresses[indices].tolist() == [5384, 5256, 1384, 1256]
    assert (one.layers, one.head_bytes, sorted(one.head_numbers)) == (2, 50, [2, 3])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    """The last block may be partly used."""
    assert layout().blocks_for(tokens) == blocks


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(1, 5))
def test_every_head_is_copied_once(
    ours: int, theirs: int, our_blocks: int, their_blocks: int
) -> None:
    """Over all pairs of ranks, each head of a remote rank's page gets the same head's bytes."""
    senders = [rank_of(ours, r, base=10_000 * (r + 1), blocks=our_blocks) for r in range(ours)]
    for rank in range(theirs):
        target = rank_of(theirs, rank, base=200_000 * (rank + 1), blocks=their_blocks)
        found: dict[int, int] = {}
        pairs = [s for s in senders if shares_heads(s, target)]
        assert all(
            ranks_sharing_heads(rank_of(theirs, 0, base=1, blocks=1), theirs, s) >= 1
            for s in senders
        )
        for source in pairs:
            pairing = pair(source, target)
            assert pairing.page_bytes % 50 == 0
            assert pairing.local_addresses.size == 3 * our_blocks
            assert pairing.remote_addresses.size == 3 * their_blocks
            for head in range(pairing.page_bytes // 50):
                local, remote = pairing.local_addresses[0], pairing.remote_addresses[0]
                source_head = (local - source.layer_bases[0]) // 50 + source.first_head + head
                target_head = (remote - target.layer_bases[0]) // 50 + target.first_head + head
                assert source_head == target_head
                found[target_head] = found.get(target_head, 0) + 1
        assert found == dict.fromkeys(target.head_numbers, 1)


def test_ranks_that_grant_to_one_prefill_rank() -> None:
    """One of four decode ranks shares heads with a rank of four, two with a rank of two."""
    own = rank_of(4, 2, base=1, blocks=1)
    assert ranks_sharing_heads(own, 4, rank_of(4, 1, base=1, blocks=1)) == 1
    assert ranks_sharing_heads(own, 4, rank_of(2, 1, base=1, blocks=1)) == 2
    assert ranks_sharing_heads(own, 4, rank_of(1, 0, base=1, blocks=1)) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_bases": (1000,)}, "layers: 2 here, 1 at the peer"),
        ({"block_tokens": 32}, "tokens per block: 16 here, 32 at the peer"),
        ({"total_heads": 8}, "KV heads of the model: 4 here, 8 at the peer"),
        ({"page_bytes": 120}, "head's slice of a page: 50 here, 60 at the peer"),
    ],
)
def test_layouts_that_differ_name_both_values(changes: dict[str, Any], words: str) -> None:
    """A mismatch is refused and says what to make equal."""
    with pytest.raises(LayoutMismatchError, match=words):
        check_compatible(layout(), layout(**changes))


def test_ranks_without_a_common_head_are_not_paired() -> None:
    """The message names the heads of both."""
    with pytest.raises(LayoutMismatchError, match=r"2\.\.3 here, 0\.\.1 at the peer"):
        pair(layout(), layout(first_head=0))


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 0},
        {"num_blocks": 0},
        {"num_blocks": 1 << 28},
        {"page_bytes": 101},
        {"page_bytes": 130},
        {"block_tokens": 0},
        {"layer_bases": ()},
        {"layer_bases": (0, 1)},
        {"layer_bases": (1, (1 << 63) - 100)},
        {"first_head": 3},
        {"first_head": -1},
    ],
)
def test_what_cannot_be_memory_is_no_layout(changes: dict[str, Any]) -> None:
    """A layout is checked when it is made, also from a peer's bytes."""
    with pytest.raises(ValueError, match=r"layout|page|rank"):
        layout(**changes)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(layout()))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**plain, **changes}), type=PageLayout)


def test_a_layout_survives_the_wire() -> None:
    """Encoded and decoded it is the same, and its addresses are 64-bit."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(layout()), type=PageLayout)
    assert again == layout()
    assert again.page_addresses().dtype == np.int64

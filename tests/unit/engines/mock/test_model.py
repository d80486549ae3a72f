"""The mock model: what its answers depend on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from splitserve.kv_transfer.layout import pair
from splitserve.orchestrator.engines.mock.model import (
    KvMemory,
    KvShape,
    MockModel,
    reference_answer,
)

SHAPE = KvShape(layers=3, heads=4, block_tokens=8, head_bytes=16)
PROMPT = tuple(range(40, 60))  # 2.5 blocks
TABLE = (5, 2, 7)


@dataclass
class Computed:
    """A prompt's KV in memory."""

    model: MockModel
    memories: list[KvMemory]

    def next_token(self) -> int:
        return self.model.next_token(self.memories, TABLE, len(PROMPT))


def computed(ranks: int = 1, seed: int = 0, prompt: tuple[int, ...] = PROMPT) -> Computed:
    """``prompt`` in the blocks of ``TABLE``."""
    model = MockModel(SHAPE, seed)
    memories = [
        KvMemory(SHAPE, rank=rank, tensor_parallel=ranks, blocks=9) for rank in range(ranks)
    ]
    states = model.states(prompt)
    for memory in memories:
        for layer in range(SHAPE.layers):
            model.write(memory, layer, states, 0, TABLE)
    return Computed(model, memories)


def test_the_answer_does_not_depend_on_chunks_blocks_or_ranks() -> None:
    """Any way to compute the same prompt gives the same next token as the reference."""
    expected = reference_answer(MockModel(SHAPE), PROMPT, 1)[0]
    assert computed(ranks=1).next_token() == expected
    assert computed(ranks=2).next_token() == expected
    assert computed(ranks=4).next_token() == expected
    model = MockModel(SHAPE)
    memory = KvMemory(SHAPE, rank=0, tensor_parallel=1, blocks=9)
    known = model.states(())
    for first, end in ((0, 3), (3, 16), (16, 20)):
        known = model.states(PROMPT[:end], known)
        for layer in range(SHAPE.layers):
            model.write(memory, layer, known[first:], first, (1, 8, 4))
    assert model.next_token([memory], (1, 8, 4), len(PROMPT)) == expected


@pytest.mark.parametrize("layer", range(SHAPE.layers))
@pytest.mark.parametrize("block", TABLE)
def test_every_page_counts(layer: int, block: int) -> None:
    """A zeroed page, or one byte of it, gives another token."""
    for where in (np.s_[layer, block], np.s_[layer, block, 1, 2, 3]):
        found = computed()
        before = found.next_token()
        found.memories[0].bytes[where] ^= 1
        assert found.next_token() != before


def test_swapped_pages_and_wrong_layers_count() -> None:
    """Pages in each other's place, or in another layer, give another token."""
    before = computed().next_token()
    swapped = computed()
    pages = swapped.memories[0].bytes
    pages[1, [5, 2]] = pages[1, [2, 5]]
    assert swapped.next_token() != before
    moved = computed()
    pages = moved.memories[0].bytes
    pages[2, 5] = pages[1, 5]
    assert moved.next_token() != before


def test_only_valid_tokens_count() -> None:
    """What lies behind the last token, or in blocks of others, changes nothing."""
    found = computed()
    before = found.next_token()
    found.memories[0].bytes[:, 7, :, 4:] = 255
    found.memories[0].bytes[:, [0, 1, 3, 4, 6, 8]] = 255
    assert found.next_token() == before


def test_prompts_and_seeds_give_other_answers() -> None:
    """The answer follows from the whole prompt and the weights' stand-in."""
    answers = {
        tuple(reference_answer(MockModel(SHAPE, seed), prompt, 12))
        for seed in (0, 1)
        for prompt in (PROMPT, PROMPT[1:], (*PROMPT[:-1], 7), (7, *PROMPT[1:]))
    }
    assert len(answers) == 8


def test_ranks_of_other_sizes_hold_the_same_bytes() -> None:
    """The pages of one rank of two, copied as the product pairs layouts, are those of the only
    rank.
    """
    halves, whole = computed(ranks=2), computed(ranks=1)
    target = whole.memories[0]
    wanted = target.bytes.copy()
    target.bytes[:] = 0
    for memory in halves.memories:
        pairing = pair(memory.layout, target.layout)
        for index, address in enumerate(pairing.local_addresses):
            source = memory.bytes.reshape(-1)
            start = int(address) - memory.region.address
            to = int(pairing.remote_addresses[index]) - target.region.address
            size = pairing.page_bytes
            target.bytes.reshape(-1)[to : to + size] = source[start : start + size]
    assert (target.bytes == wanted).all()

"""What a prefill node tells its transfer threads, and which blocks are final when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kv_transfer.orders import CloseSend, OpenSend, SendProgress
from splitserve.kv_transfer.transfer_params import TransferParams
from splitserve.prefill_node.prefills import Prefills, final_blocks

BLOCK_TOKENS = 4


def params(transfer_id: str = "t") -> TransferParams:
    """A prefill leg's parameters."""
    return TransferParams(transfer_id=transfer_id, role="prefill", peer_incarnation="D")


def make_prefills() -> Prefills:
    """One prefill of ten tokens has arrived."""
    prefills = Prefills(BLOCK_TOKENS)
    assert prefills.arrived("r", params(), 10, b"h")
    return prefills


@pytest.mark.parametrize(
    ("computed", "prompt", "blocks"),
    [
        (0, 10, 0),
        (3, 10, 0),
        (4, 10, 1),
        (9, 10, 2),
        (10, 10, 3),
        (12, 10, 3),
        (7, 8, 1),
        (8, 8, 2),
        (1, 1, 1),
    ],
)
def test_final_blocks(computed: int, prompt: int, blocks: int) -> None:
    """Full blocks, and the last one once the prompt is computed."""
    assert final_blocks(computed, prompt, BLOCK_TOKENS) == blocks


@given(st.integers(1, 200), st.integers(0, 250), st.integers(1, 40))
def test_final_blocks_grow_to_the_whole_prompt(prompt: int, computed: int, size: int) -> None:
    """Never fewer with more computed, never beyond the prompt, all exactly at its end."""
    blocks = final_blocks(computed, prompt, size)
    assert blocks <= final_blocks(computed + 1, prompt, size) <= -(-prompt // size)
    assert (blocks == -(-prompt // size)) == (computed >= prompt or (blocks * size >= prompt))
    assert final_blocks(prompt, prompt, size) == -(-prompt // size)


def test_orders_of_a_chunked_prefill() -> None:
    """Opened once, then progress per step with the block table of that step, then closed."""
    prefills = make_prefills()
    assert prefills.is_prefill("r")
    assert prefills.has_orders
    prefills.scheduled("r", 0, 6, [7, 8])
    assert prefills.take_orders() == (
        (),
        (OpenSend("t", "r", 10, b"h", 3),),
        (SendProgress("t", (7, 8), 0, 1),),
        (),
    )
    assert not prefills.has_orders
    prefills.scheduled("r", 6, 4, [7, 8, 9])
    assert prefills.take_orders()[2] == (SendProgress("t", (7, 8, 9), 1, 3),)
    assert prefills.finished("r", aborted=False, blocks=3)
    assert prefills.has_orders
    assert prefills.take_orders() == ((), (), (), (CloseSend("r", False),))


def test_a_cached_prefix_is_final_before_the_step() -> None:
    """Blocks that the engine had already are announced with the first step."""
    prefills = make_prefills()
    prefills.scheduled("r", 8, 2, [1, 2, 3])
    assert prefills.take_orders()[2] == (SendProgress("t", (1, 2, 3), 2, 3),)


def test_blocks_beyond_the_prompt_are_not_part_of_it() -> None:
    """The block of the sampled token is left out."""
    prefills = make_prefills()
    prefills.scheduled("r", 0, 10, [1, 2, 3, 4])
    assert prefills.take_orders()[2][0].source_blocks == (1, 2, 3)


def test_a_transfer_is_computed_once_at_a_time() -> None:
    """A repeated leg is served without a transfer until the first one is released."""
    prefills = make_prefills()
    assert not prefills.arrived("again", params(), 10, b"h")
    assert not prefills.is_prefill("again")
    assert not prefills.finished("again", aborted=False, blocks=3)
    prefills.finished("r", aborted=True, blocks=3)
    assert not prefills.arrived("again", params(), 10, b"h")
    prefills.released({"r", "unknown"})
    assert prefills.arrived("again", params(), 10, b"h")


def test_leased_blocks_are_those_of_finished_prefills() -> None:
    """Counted from the end of the request until it is released."""
    prefills = make_prefills()
    prefills.arrived("s", params("u"), 4, b"h")
    assert prefills.leased_blocks == 0
    prefills.finished("r", aborted=False, blocks=3)
    prefills.finished("s", aborted=False, blocks=1)
    assert prefills.leased_blocks == 4
    prefills.released(["r"])
    prefills.released(["r"])
    assert prefills.leased_blocks == 1


def test_preemptions_of_prefills_only() -> None:
    """Other requests' preemptions do not concern the transfer threads."""
    prefills = make_prefills()
    prefills.take_orders()
    prefills.preempted("other")
    assert not prefills.has_orders
    prefills.preempted("r")
    assert prefills.take_orders()[0] == ("r",)


def test_a_request_finishes_once() -> None:
    """A second end is a mistake of the engine adapter."""
    prefills = make_prefills()
    prefills.finished("r", aborted=False, blocks=3)
    with pytest.raises(AssertionError, match="finished twice"):
        prefills.finished("r", aborted=False, blocks=3)


def test_a_prefix_that_another_request_fills_in_this_step_is_not_final_before_it() -> None:
    """The engine's prefix cache gives out blocks that are only about to be computed."""
    prefills = make_prefills()
    prefills.scheduled("r", 8, 2, [1, 2, 3])
    prefills.scheduled("other", 4, 6, [1, 2, 9])
    assert prefills.take_orders()[2] == (SendProgress("t", (1, 2, 3), 1, 3),)
    prefills.scheduled("r", 8, 2, [1, 2, 3])
    assert prefills.take_orders()[2] == (SendProgress("t", (1, 2, 3), 2, 3),)

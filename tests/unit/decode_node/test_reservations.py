"""What a decode node asks of its transfer threads: receives, cancels, declines."""

from __future__ import annotations

import pytest

from splitserve.decode_node.reservations import Reservations
from splitserve.kv_transfer.orders import BeginReceive, Decline, Retarget
from splitserve.kv_transfer.transfer_params import TransferParams

BLOCK_TOKENS = 4
ADDRESSES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
PARAMS = TransferParams(
    transfer_id="t", role="decode", attempt=2, peer_incarnation="P", peer_addresses=ADDRESSES
)


def make_reservations(prompt_tokens: int = 10) -> Reservations:
    """One decode leg has arrived."""
    reservations = Reservations(BLOCK_TOKENS)
    assert reservations.arrived("r", PARAMS, prompt_tokens, b"h")
    return reservations


def receive(first_block: int, block_ids: tuple[int, ...]) -> BeginReceive:
    """The order for the leg."""
    return BeginReceive("t", "r", 2, "P", ADDRESSES, first_block, block_ids, 10, b"h")


@pytest.mark.parametrize(
    ("prompt", "computed", "wanted"), [(10, 0, 10), (10, 8, 2), (9, 8, 0), (1, 0, 0), (8, 4, 4)]
)
def test_wanted_tokens(prompt: int, computed: int, wanted: int) -> None:
    """All that is missing, unless it is only the last token; asking has no effect."""
    reservations = make_reservations(prompt)
    for _ in range(2):
        assert reservations.wanted_tokens("r", computed) == wanted
    assert reservations.wanted_tokens("other", 0) == 0
    assert not reservations.has_orders


def test_reserved_blocks_are_asked_for_once() -> None:
    """Only the prompt's blocks, without the engine's own prefix; a second call changes nothing."""
    reservations = make_reservations()
    reservations.reserved("r", [3, 5, 7, 9], 6)
    assert reservations.waiting == 1
    assert reservations.has_orders
    assert reservations.wanted_tokens("r", 0) == 0
    reservations.reserved("r", [3, 5, 7, 9], 0)
    reservations.declined("r", "late")
    assert reservations.take_orders() == ((receive(1, (5, 7)),), (), (), (), ())
    assert not reservations.has_orders


def test_a_prompt_that_is_there_already_is_declined() -> None:
    """The prefill node is told, and the leg never asks again."""
    reservations = make_reservations()
    reservations.reserved("r", [3, 5, 7], 0)
    reason = "the decode node has this prompt already"
    assert reservations.take_orders() == ((), (), (), (), (Decline("t", 2, ADDRESSES, reason),))
    assert reservations.wanted_tokens("r", 0) == 0


def test_after_a_failed_load_it_is_computed_here() -> None:
    """A settled leg, with its pages or without, asks for nothing."""
    reservations = make_reservations()
    reservations.reserved("r", [3, 5, 7], 10)
    reservations.take_orders()
    reservations.settled(["r", "unknown"])
    assert reservations.waiting == 0
    assert reservations.wanted_tokens("r", 0) == 0
    reservations.reserved("r", [3, 5, 7], 0)
    assert reservations.take_orders() == ((), (), (), (), ())
    reservations.finished("r")
    assert reservations.take_orders() == ((), (), ("r",), (), ())
    assert not reservations.has_orders


def test_landed_pages_are_acknowledged_after_the_first_step_with_them() -> None:
    """Not when they land: until then the prefill node may have to send them again."""
    reservations = make_reservations()
    reservations.reserved("r", [3, 5, 7], 10)
    reservations.take_orders()
    reservations.settled(["r"])
    assert not reservations.has_orders
    reservations.reserved("r", [3, 5, 7], 0)
    assert reservations.take_orders()[2] == ()
    assert reservations.has_orders
    assert reservations.take_orders()[2] == ("r",)
    assert reservations.take_orders()[2] == ()


def test_an_abort_between_landing_and_the_first_step_is_told() -> None:
    """The prefill node may have to send the pages to another decode node."""
    reservations = make_reservations()
    reservations.reserved("r", [3, 5, 7], 10)
    reservations.take_orders()
    reservations.settled(["r"])
    reservations.finished("r")
    reason = "the request was aborted on the decode node"
    assert reservations.take_orders() == ((), (), (), (("r", reason),), ())


def test_an_abort_while_waiting_is_a_cancel() -> None:
    """The transfer thread takes the pages back; its later report finds nothing."""
    reservations = make_reservations()
    reservations.reserved("r", [3, 5, 7], 10)
    reservations.take_orders()
    reservations.finished("r")
    reason = "the request was aborted on the decode node"
    assert reservations.take_orders() == ((), (), (), (("r", reason),), ())
    reservations.settled(["r"])
    reservations.finished("r")
    assert not reservations.has_orders


def test_an_abort_before_any_blocks_is_a_decline() -> None:
    """The prefill node need not wait for a grant."""
    reservations = make_reservations()
    reservations.finished("r")
    (decline,) = reservations.take_orders()[4]
    assert (decline.transfer_id, decline.keeps) == ("t", True)


def test_a_transfer_is_waited_for_once_at_a_time() -> None:
    """A repeated leg is computed here; after the first one's end a new attempt may come."""
    reservations = make_reservations()
    assert not reservations.arrived("again", PARAMS, 10, b"h")
    assert reservations.wanted_tokens("again", 0) == 0
    reservations.finished("again")
    reservations.finished("r")
    assert reservations.arrived("again", PARAMS, 10, b"h")


def test_the_engines_promises_are_checked() -> None:
    """External tokens begin at a block, and there are blocks for the whole prompt."""
    with pytest.raises(AssertionError):
        make_reservations().reserved("r", [3, 5, 7], 9)
    with pytest.raises(AssertionError, match="2 blocks for 3"):
        make_reservations().reserved("r", [3, 5], 10)


RETARGET = Retarget("t", 3, "Q", ("tcp://127.0.0.1:9",), "P is gone")


def test_a_waiting_request_is_given_another_prefill_node() -> None:
    """The workers are told once; an older order changes nothing."""
    reservations = make_reservations()
    reservations.reserved("r", [3, 5, 7], 10)
    reservations.take_orders()
    for _ in range(2):
        reservations.retarget(RETARGET)
    assert reservations.has_orders
    assert reservations.take_orders() == ((), (RETARGET,), (), (), ())


@pytest.mark.parametrize("is_here", [True, False])
def test_a_request_without_pages_asks_the_other_prefill_node(is_here: bool) -> None:
    """Also when the news is here before the leg is."""
    reservations = Reservations(BLOCK_TOKENS)
    if is_here:
        assert reservations.arrived("r", PARAMS, 10, b"h")
    reservations.retarget(RETARGET)
    if not is_here:
        assert reservations.arrived("r", PARAMS, 10, b"h")
    reservations.reserved("r", [3, 5, 7], 10)
    (order,), *others = reservations.take_orders()
    assert (order.attempt, order.peer_incarnation, order.peer_addresses) == (
        RETARGET.attempt,
        RETARGET.peer_incarnation,
        RETARGET.peer_addresses,
    )
    assert others == [(), (), (), ()]


def test_a_prefill_node_that_comes_too_late_is_declined() -> None:
    """It need not keep what nobody fetches."""
    reservations = make_reservations()
    reservations.reserved("r", [3, 5, 7], 10)
    reservations.take_orders()
    reservations.settled(["r"])
    reservations.retarget(RETARGET)
    *nothing, (decline,) = reservations.take_orders()
    assert nothing == [(), (), (), ()]
    assert (decline.attempt, decline.peer_addresses) == (3, RETARGET.peer_addresses)

"""What a transfer thread refuses: peers that do not fit, prompts that differ, addresses and
transports that cannot work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.kv_rank import PROMPT, SOURCE, TARGET, KvRank, finish, opened, until

from splitserve.kv_transfer.transfer_thread import TransferThreadError

if TYPE_CHECKING:
    from collections.abc import Callable


def test_other_tokens_are_refused(pair: tuple[KvRank, KvRank]) -> None:
    """Prompts that were tokenised differently are never written, and the refusal is counted."""
    p, d = pair
    untouched = d.pages.copy()
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    request = d.receive("t", [*PROMPT[:-1], 999], TARGET, p)
    until(lambda: d.has_received(request), "refused")
    assert d.failed == {request}
    until(lambda: p.thread.counters()["refused_grants"] == 1, "counted")
    np.testing.assert_array_equal(untouched, d.pages)
    p.close("t")
    until(lambda: p.has_sent("p-t"), "released")


def test_pages_of_half_of_the_heads_are_no_success(make_rank: Callable[..., KvRank]) -> None:
    """When only one of two prefill ranks is named the receive fails, whatever was delivered."""
    p = make_rank("P", rank=0, tensor_parallel=2)
    d = make_rank("D")
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    request = d.receive("t", PROMPT, TARGET, p)
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}


def test_another_fingerprint_is_turned_away(
    make_rank: Callable[..., KvRank], caplog: pytest.LogCaptureFixture
) -> None:
    """Engines with other weights do not exchange pages; both values are named on D."""
    p = make_rank("P", fingerprint={"weights": "of Paul"})
    d = make_rank("D", fingerprint={"weights": "of Dora"})
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    request = d.receive("t", PROMPT, TARGET, p)
    until(lambda: d.has_received(request), "turned away")
    assert d.failed == {request}
    turned = [r.getMessage() for r in caplog.records if "turned us away" in r.getMessage()]
    assert "of Paul here, of Dora at the peer" in turned[0]
    again = d.receive("u", PROMPT, TARGET, p)
    until(lambda: d.has_received(again), "turned away again")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": 3}, "layers: 4 here, 3 at the peer"),
        ({"total_heads": 4}, "KV heads of the model: 2 here, 4 at the peer"),
        ({"transport": "local"}, "transport: tcp here, local at the peer"),
    ],
)
def test_another_layout_is_turned_away(
    make_rank: Callable[..., KvRank],
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    words: str,
) -> None:
    """Ranks whose pages do not fit each other do not exchange any; both values are named."""
    p, d = make_rank("P"), make_rank("D", **settings)
    request = d.receive("t", PROMPT, TARGET, p)
    until(lambda: d.has_received(request), "turned away")
    assert words in caplog.text


def test_a_wrong_secret_ends_with_the_deadline(make_rank: Callable[..., KvRank]) -> None:
    """A peer of another cluster is not answered; the request ends when its deadline does."""
    p = make_rank("P")
    d = make_rank("D", secret=b"another secret!!", deadline_s=0.5)
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    request = d.receive("t", PROMPT, TARGET, p)
    until(lambda: d.has_received(request), "expired")
    assert d.failed == {request}
    assert d.thread.counters()["expired_receives"] == 1


def test_nobody_there_ends_with_the_deadline(
    make_rank: Callable[..., KvRank], free_port: Callable[[], int]
) -> None:
    """A prefill node that cannot be reached costs the deadline, no more."""
    d = make_rank("D", deadline_s=0.3)
    absent = KvRank("P", free_port())
    request = d.receive("t", PROMPT, TARGET, absent)
    until(lambda: d.has_received(request), "expired")
    assert d.failed == {request}


@pytest.mark.parametrize("address", ["tcp://", "udp://127.0.0.1:1", "nonsense"])
def test_an_address_that_is_none_fails_at_once(
    make_rank: Callable[..., KvRank], address: str
) -> None:
    """A leg that names no address for its peer fails; the thread goes on."""
    p, d = make_rank("P"), make_rank("D")
    real, p.address = p.address, address
    request = d.receive("t", PROMPT, TARGET, p)
    until(lambda: d.has_received(request), "failed")
    p.address = real
    p.step("u", SOURCE, 0, 6, opens=(opened("u", PROMPT),))
    finish(p, d, "u", d.receive("u", PROMPT, TARGET, p))
    assert d.failed == {request}


def test_an_address_in_use_raises_at_start(make_rank: Callable[..., KvRank]) -> None:
    """A rank that peers could not reach does not start, and says which address is taken."""
    p = make_rank("P")
    second = KvRank("Q", int(p.address.rsplit(":", 1)[1]))
    with pytest.raises(TransferThreadError, match=r"cannot listen on tcp://127\.0\.0\.1"):
        second.thread.start()
    with pytest.raises(TransferThreadError):
        second.thread.take_results()
    second.thread.stop()


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "pigeon"},
        {"transport_settings": {"host": "192.0.2.1"}},
        {"transport_settings": {"no_such_key": 1}},
        {"warm_addresses": ("nonsense",)},
    ],
)
def test_a_transport_that_cannot_be_had_raises_at_start(
    free_port: Callable[[], int], settings: dict[str, Any]
) -> None:
    """What cannot work is an error at start, not at the first request."""
    rank = KvRank("P", free_port(), **settings)
    with pytest.raises(TransferThreadError):
        rank.thread.start()
    rank.thread.stop()

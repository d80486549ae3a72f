"""What the two sides know of an ended transfer: over real sockets, and how little of it is kept."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.kv_rank import PROMPT, SOURCE, TARGET, KvRank, finish, opened, until

from splitserve.kv_transfer.messages import Delivered, Fenced
from splitserve.kv_transfer.send_records import SendRecords
from splitserve.kv_transfer.transfer_facts import (
    WRITE_LIMIT_GROUPS,
    LayerWrite,
    ReceiveFacts,
    SendFacts,
    in_groups,
)
from splitserve.kv_transfer.transfer_log import TransferLog

if TYPE_CHECKING:
    from collections.abc import Callable


def facts_of(rank: KvRank, count: int = 1) -> list[SendFacts | ReceiveFacts]:
    """What that rank's thread has to tell: so many."""
    found: list[SendFacts | ReceiveFacts] = []

    def has_told() -> bool:
        found.extend(rank.thread.take_ended())
        return len(found) >= count

    until(has_told, "facts of an ended transfer")
    return found


def test_both_sides_tell_of_a_transfer_once(pair: tuple[KvRank, KvRank]) -> None:
    """Their moments are in order; the writes cover every layer, and pages and bytes agree."""
    p, d = pair
    began = monotonic()
    request = d.receive("t", PROMPT, TARGET, p)
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    finish(p, d, "t", request)
    (sent,), (received,) = facts_of(p), facts_of(d)
    assert isinstance(sent, SendFacts)
    assert isinstance(received, ReceiveFacts)
    assert (sent.transfer_id, sent.attempt, sent.outcome) == ("t", 1, "delivered")
    assert (received.transfer_id, received.attempt, received.outcome) == ("t", 1, "landed")
    assert sent.started is not None
    assert sent.computed is not None
    assert sent.first_write is not None
    assert began <= sent.started <= sent.computed <= sent.ended <= received.ended <= monotonic()
    assert sent.started <= sent.first_write <= sent.writes[0].at <= sent.writes[-1].at <= sent.ended
    assert received.reserved is not None
    assert received.granted is not None
    assert began <= received.reserved <= received.granted <= received.ended
    layers = {n for w in sent.writes for n in range(w.first_layer, w.last_layer + 1)}
    assert layers == set(range(p.layout.layers))
    pages = p.layout.layers * len(TARGET)
    assert sent.pages == received.pages == sum(w.pages for w in sent.writes) == pages
    size_bytes = pages * p.layout.page_bytes
    assert sent.bytes == received.bytes == sum(w.bytes for w in sent.writes) == size_bytes
    assert facts_of(p, 0) == facts_of(d, 0) == []


def test_a_transfer_that_fails_says_why(pair: tuple[KvRank, KvRank]) -> None:
    """Both sides tell what there was, without its end."""
    p, d = pair
    request = d.receive("t", PROMPT, TARGET, p)
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),), layers=2)
    until(lambda: np.array_equal(p.pages[0, SOURCE], d.pages[0, TARGET]), "a layer has arrived")
    p.close("t", aborted=True)
    until(lambda: d.has_received(request), "the receive has failed")
    (sent,), (received,) = facts_of(p), facts_of(d)
    assert sent.outcome == "the prefill request was aborted"
    assert received.outcome == sent.outcome
    assert isinstance(sent, SendFacts)
    assert sent.started is not None
    assert sent.computed is None


def test_a_fence_that_is_repeated_is_told_of_once() -> None:
    """A cancel after the delivery, or several before a grant, are answered and add nothing."""
    delivered = Delivered(transfer_id="t", attempt=1, pages=1, bytes=10)
    fenced = Fenced(transfer_id="t", attempt=1, reason="the client is gone")
    for first in (delivered, fenced):
        records = SendRecords(0, TransferLog(""))
        records.ended("D/0", fenced, None, 0.5)  # Of a request that is not here.
        records.opened("t", "", 1.0)
        for message in (first, fenced, fenced):
            records.ended("D/0", message, None, 2.0)
        assert len(records.facts) == 1
        assert records.facts[0].outcome in ("delivered", "the client is gone")


@pytest.mark.parametrize("at_once", [1, 3])
def test_every_rank_tells_its_part(make_rank: Callable[..., KvRank], at_once: int) -> None:
    """With two decode ranks each names both, and the prefill rank tells of each."""
    p = make_rank("P", total_heads=4, stream_min_bytes=at_once)
    ranks = [
        make_rank("D", rank=r, tensor_parallel=2, total_heads=4) for r in range(2)
    ]  # fmt: skip
    requests = [rank.receive("t", PROMPT, TARGET, p) for rank in ranks]
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    for rank, request in zip(ranks, requests, strict=True):
        until(lambda rank=rank, request=request: rank.has_received(request), "landed")  # type: ignore[misc]
    received = [facts for rank in ranks for facts in facts_of(rank)]
    assert [(f.rank, f.ranks) for f in received if isinstance(f, ReceiveFacts)] == [(0, 2), (1, 2)]
    sent = facts_of(p, 2)
    assert sum(f.pages for f in sent) == sum(f.pages for f in received)


def test_many_writes_are_told_in_groups() -> None:
    """A prompt of many steps: neighbours are put together, and nothing is lost."""
    records = SendRecords(0, TransferLog(""))
    records.opened("t", "", 0.0)
    records.posted("t", "D/0", 1, 1.0)
    for number in range(1_000):
        layer = number % 40
        records.written("t", "D/0", 1, LayerWrite(layer, layer, 1.0 + number, 3, 30))
    assert len(records._fillings["t", "D/0", 1].writes) <= 2 * WRITE_LIMIT_GROUPS
    delivered = Delivered(transfer_id="t", attempt=1, pages=3_000, bytes=30_000)
    records.ended("D/0", delivered, None, 2_000.0)
    (facts,) = records.facts
    assert 0 < len(facts.writes) <= WRITE_LIMIT_GROUPS
    assert sum(w.pages for w in facts.writes) == 3_000
    assert [w.at for w in facts.writes] == sorted(w.at for w in facts.writes)
    assert (facts.writes[0].first_layer, facts.writes[-1].at) == (0, 1_000.0)


def test_attempts_to_one_peer_are_kept_apart() -> None:
    """A fence of the first one, said again while the second is written to, takes nothing of it."""
    records = SendRecords(0, TransferLog(""))
    records.opened("t", "", 0.0)
    records.posted("t", "D/0", 1, 1.0)
    fenced = Fenced(transfer_id="t", attempt=1, reason="gone")
    records.ended("D/0", fenced, None, 2.0)
    records.posted("t", "D/0", 2, 3.0)
    records.written("t", "D/0", 2, LayerWrite(0, 3, 4.0, 1, 10))
    records.ended("D/0", fenced, None, 5.0)
    records.ended("D/0", Delivered(transfer_id="t", attempt=2, pages=1, bytes=10), None, 6.0)
    told = [(f.attempt, f.outcome, f.first_write, len(f.writes)) for f in records.facts]
    assert told == [(1, "gone", 1.0, 0), (2, "delivered", 3.0, 1)]
    records.released("t")
    assert not records._prompts
    assert not records._fillings


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 129, 500])
def test_groups_are_bounded(count: int) -> None:
    """Whatever there is: at most so many groups, with all pages."""
    writes = [LayerWrite(n, n, float(n), 1, 2) for n in range(count)]
    groups = in_groups(writes)
    assert len(groups) <= WRITE_LIMIT_GROUPS
    assert sum(g.pages for g in groups) == count
    assert len(groups) == count or len(groups) > WRITE_LIMIT_GROUPS // 2

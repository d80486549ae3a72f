"""What nodes tell of transfers, joined with the requests that they belong to."""

from __future__ import annotations

import json
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_stubs.cluster import StubCluster, completion, stub_cluster, until

from splitserve.kv_transfer.process_identity import boot_id
from splitserve.kv_transfer.transfer_facts import (
    LayerWrite,
    ReceiveFacts,
    SendFacts,
    TransferFacts,
)
from splitserve.orchestrator.agent.messages import FromAgent, NodeTransfers
from splitserve.orchestrator.router import request_log, transfer_facts
from splitserve.orchestrator.router.transfer_facts import (
    FACTS_LIMIT_PER_REQUEST,
    REQUEST_LIMIT,
    RequestFacts,
    TransferBook,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def sent(at: float, transfer_id: str = "r.1", **changes: Any) -> SendFacts:
    """A send that began then and took 10 s; 8 pages in two writes."""
    fields: dict[str, Any] = {
        "attempt": 1,
        "rank": 0,
        "outcome": "delivered",
        "started": at,
        "first_write": at + 2,
        "computed": at + 9,
        "ended": at + 10,
        "pages": 8,
        "bytes": 80,
        "writes": (LayerWrite(0, 1, at + 3, 4, 40), LayerWrite(2, 3, at + 10, 4, 40)),
    }
    return SendFacts(transfer_id=transfer_id, **(fields | changes))


def received(at: float, transfer_id: str = "r.1", **changes: Any) -> ReceiveFacts:
    """A receive that was reserved then and landed 11 s later."""
    fields: dict[str, Any] = {
        "attempt": 1,
        "rank": 0,
        "ranks": 1,
        "outcome": "landed",
        "reserved": at,
        "granted": at + 1,
        "ended": at + 11,
        "pages": 8,
        "bytes": 80,
    }
    return ReceiveFacts(transfer_id=transfer_id, **(fields | changes))


def known(*facts: TransferFacts) -> RequestFacts:
    """All of these have come."""
    found = RequestFacts()
    for each in facts:
        found.add(0.0, each)
    return found


def frame(clock: str, sent_at: float, *ended: TransferFacts) -> NodeTransfers:
    """A node's message."""
    return NodeTransfers(node="n", incarnation="n-1", clock=clock, sent=sent_at, ended=ended)


def test_the_sides_are_joined_in_any_order() -> None:
    """It is complete with both."""
    for facts in ((sent(100), received(100)), (received(100), sent(100))):
        assert not known(facts[0]).transfer(None).is_complete
        transfer = known(*facts).transfer(None)
        assert transfer.is_complete
        assert (transfer.prefill_started, transfer.prefill_ended) == (100, 109)
        assert (transfer.reserved, transfer.granted) == (100, 101)
        assert (transfer.delivered, transfer.landed) == (110, 111)
        assert (transfer.pages, transfer.bytes) == (8, 80)
        assert [w.at for w in transfer.writes] == [103, 110]


def test_with_several_ranks_the_last_one_counts() -> None:
    """Two decode ranks, each filled by two prefill ranks: sums of what was sent, and the last
    moments; nothing has landed before every rank says so.
    """
    receives = [received(100 + n, rank=n, ranks=2, pages=16, bytes=160) for n in range(2)]
    sends = [sent(100 + n, rank=n % 2) for n in range(4)]
    assert known(receives[0], *sends).transfer(None).landed is None
    assert not known(*receives, *sends[:3]).transfer(None).is_complete
    transfer = known(*receives, *sends).transfer(None)
    assert transfer.is_complete
    assert (transfer.landed, transfer.delivered, transfer.prefill_ended) == (112, 113, 112)
    assert (transfer.pages, transfer.bytes) == (32, 320)
    writes = [(w.first_layer, w.at, w.pages) for w in transfer.writes]
    assert writes == [(0, 106, 16), (2, 113, 16)]


@pytest.mark.parametrize(
    ("facts", "first_data", "landed", "started"),
    [
        # The first prefill node failed; the second one's pages landed.
        (
            (sent(100, outcome="gone"), sent(120, attempt=2), received(120, attempt=2)),
            140,
            131,
            120,
        ),
        # The decode node failed after its pages had landed; another one was sent them again.
        ((received(100), received(120, attempt=2), sent(120, attempt=2)), 140, 131, 120),
        # The stream went on elsewhere, long after its first data.
        ((received(100), sent(100), received(300, "r.2"), sent(300, "r.2")), 120, 111, 100),
        # What failed is no longer waited for: the decode node computed the prompt.
        ((received(100, outcome="late"), sent(100, outcome="fenced")), 140, None, 100),
        # The decode node wanted nothing.
        ((sent(100, outcome="the decode node has this prompt already"),), 140, None, 100),
        ((), 140, None, None),
    ],
)
def test_the_transfer_that_brought_the_first_data_counts(
    facts: Sequence[TransferFacts], first_data: float, landed: float | None, started: float | None
) -> None:
    """Whatever came before it, or after."""
    transfer = known(*facts).transfer(first_data)
    assert (transfer.landed, transfer.prefill_started) == (landed, started)


def test_times_of_the_routers_host_are_exact() -> None:
    """However long the message took."""
    book = TransferBook("here")
    book.take(frame("here", 200.0, received(100), sent(100)), now=900.0)
    assert book.of("r").transfer(None).landed == 111


@given(st.lists(st.floats(0.0001, 5), min_size=1, max_size=100), st.floats(-1e6, 1e6))
def test_times_of_another_host_are_late_by_the_quickest_message(
    delays: list[float], ahead: float
) -> None:
    """Its clock may be hours ahead or behind."""
    book = TransferBook("here")
    for number, delay in enumerate(delays):
        now = 1e7 + number
        book.take(frame("there", now - delay + ahead, received(ahead, f"r{number}.1")), now)
    latest = delays[-transfer_facts.CLOCK_SAMPLES :]
    landed = book.of(f"r{len(delays) - 1}").transfer(None).landed
    assert landed == pytest.approx(11 + min(latest), abs=1e-6)


@pytest.mark.parametrize("at", ["1e300", "-5.0", "null", "[]"])
def test_what_is_no_time_is_no_message(at: str) -> None:
    """An engine cannot make the router's sums overflow."""
    good = msgspec.json.encode(frame("here", 1.0, received(1)))
    assert msgspec.json.decode(good, type=FromAgent) == frame("here", 1.0, received(1))
    bad = good.replace(b'"ended":12,', b'"ended":%b,' % at.encode())
    assert bad != good
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(bad, type=FromAgent)


def test_what_is_kept_is_bounded() -> None:
    """Requests, and facts of one request."""
    book = TransferBook("here")
    for number in range(REQUEST_LIMIT + 10):
        book.take(frame("here", 0.0, received(0, f"r{number}.1")), 0.0)
    for _ in range(FACTS_LIMIT_PER_REQUEST + 10):
        book.take(frame("here", 0.0, received(0, "x.1")), 0.0)
    assert len(book._by_request) == REQUEST_LIMIT
    assert len(book.of("x")._known) == FACTS_LIMIT_PER_REQUEST
    assert book.find("r0") is None


# In a router


async def told_of(cluster: StubCluster) -> tuple[str, float]:
    """One request has been answered: its own id, and when that was."""
    await (await cluster.post(headers={"X-Request-Id": "mine"})).read()
    await cluster.idle()
    record = await timeline(cluster)
    return record["id"], monotonic() - 0.001


async def timeline(cluster: StubCluster) -> Any:
    """The record of the request."""
    return await (await cluster.session.get(f"{cluster.url}/internal/timeline/mine")).json()


def lines(cluster: StubCluster) -> list[Any]:
    """The request log."""
    return [json.loads(line) for line in cluster.log.getvalue().splitlines()]


async def test_a_line_waits_for_what_the_nodes_know() -> None:
    """It is written when both sides have told, also after the answer; the timeline shows what is
    known by then, and the histograms count it.
    """
    async with stub_cluster() as cluster:
        for node in ("p0", "d0"):
            await cluster.add_node(node, reports_transfers=True)
        request_id, now = await told_of(cluster)
        assert lines(cluster) == []
        transfer_id = f"{request_id}.1"
        receive = ReceiveFacts(
            transfer_id=transfer_id, attempt=1, rank=0, ranks=1, outcome="landed",
            reserved=now - 0.002, granted=now - 0.001, ended=now, pages=2, bytes=64,
        )  # fmt: skip
        send = SendFacts(
            transfer_id=transfer_id, attempt=1, rank=0, outcome="delivered", ended=now,
            started=now - 0.002, computed=now - 0.0005, first_write=now - 0.001, pages=2, bytes=64,
            writes=(LayerWrite(0, 3, now, 2, 64),),
        )  # fmt: skip
        await cluster.agents["d0"].say(frame(boot_id(), now, receive))
        await until_known(cluster, "landed_ms")
        assert lines(cluster) == []
        await cluster.agents["p0"].say(frame(boot_id(), now, send))
        await until(lambda: lines(cluster) != [])
        (line,) = lines(cluster)
        assert line == await timeline(cluster)
        assert (line["transfer_pages"], line["transfer_bytes"]) == (2, 64)
        assert line["transfer_hidden_ms"] == pytest.approx(0.5, abs=0.01)
        assert line["transfer_exposed_ms"] == pytest.approx(0.5, abs=0.01)
        assert line["layer_writes"] == [
            {"layers": [0, 3], "ms": line["delivered_ms"], "pages": 2, "bytes": 64}
        ]
        metrics = await (await cluster.session.get(cluster.url + "/metrics")).text()
        assert 'splitserve_request_part_seconds_count{part="queue"} 1.0' in metrics
        assert "splitserve_transfer_exposed_seconds_count 1.0" in metrics
        assert "splitserve_transfer_bytes_sum 64.0" in metrics


async def until_known(cluster: StubCluster, key: str) -> None:
    """Until the request's timeline has that moment."""
    find = cluster.router.log.find
    await until(lambda: (find("mine", None) or {}).get(key) is not None)


async def test_a_line_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that lose their facts delay it by a bounded time, and it has its parts all the same;
    for nodes that tell nothing it does not wait.
    """
    monkeypatch.setattr(request_log, "FACTS_WAIT_S", 0.3)
    async with stub_cluster("p0") as cluster:
        await cluster.add_node("d0", reports_transfers=True)
        await told_of(cluster)
        await until(lambda: lines(cluster) != [])
        (line,) = lines(cluster)
        assert line["landed_ms"] is None
        assert list(line["parts"]) == ["queue", "prefill", "decode"]
        assert sum(line["parts"].values()) == pytest.approx(line["last_data_ms"], abs=0.01)


async def test_more_lines_than_may_wait_are_written() -> None:
    """The bound holds whatever they wait for."""
    async with stub_cluster("p0") as cluster:
        await cluster.add_node("d0", reports_transfers=True)
        request_id, _ = await told_of(cluster)
        log = cluster.router.log
        entry = log._unwritten[0]
        for _ in range(request_log.HELD_LIMIT_LINES):
            log.add(entry.timeline, entry.tally, cluster.router.agents.transfers.of(request_id))
        assert len(log._unwritten) < request_log.HELD_LIMIT_LINES
        assert len(lines(cluster)) >= request_log.HELD_LIMIT_LINES


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_server_timing_is_for_who_asks(is_streaming: bool) -> None:
    """The parts up to the first data, and their sum; no other client gets it, and the engines do
    not see the wish.
    """
    async with stub_cluster("p0", "d0") as cluster:
        body = completion(stream=is_streaming)
        plain = await cluster.post(json=body)
        assert "server-timing" not in plain.headers
        asked = await cluster.post(json=body, headers={"X-Splitserve-Timing": "1"})
        found = dict(item.split(";dur=") for item in asked.headers["server-timing"].split(", "))
        names = ["queue", "prefill", "ttft"] if is_streaming else ["queue", "answer", "total"]
        assert list(found) == names
        *parts, total = map(float, found.values())
        assert sum(parts) == pytest.approx(total, abs=0.01)
        assert all("x-splitserve-timing" not in a.headers for a in cluster.engines["d0"].asked)

"""Transfers between transfer threads over ``tcp``: real sockets and bytes, no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.kv_rank import PROMPT, SOURCE, TARGET, KvRank, finish, opened, until

from splitserve.kv_transfer import messages
from splitserve.kv_transfer.orders import CloseSend, Decline, Retarget, SendProgress, StepOrders
from splitserve.kv_transfer.sending_side import SendingSide
from splitserve.kv_transfer.transports.tcp import TcpTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.kv_transfer.transports.base import PageIndices, TransportEvent


def assert_landed(
    p: KvRank, d: KvRank, source: list[int] = SOURCE, target: list[int] = TARGET, first: int = 0
) -> None:
    """The prompt's pages from ``first`` are equal in both memories."""
    np.testing.assert_array_equal(p.pages[:, source[first:]], d.pages[:, target[first:]])


def test_layers_travel_while_the_step_runs(pair: tuple[KvRank, KvRank]) -> None:
    """The first layers' pages are in D's memory before P has left its last layer."""
    p, d = pair
    untouched = d.pages.copy()
    p.open("t", PROMPT)
    request = d.receive("t", PROMPT, TARGET, p)
    until(lambda: d.thread.counters()["open_receives"] == 1, "the receive is open")
    p.step("t", SOURCE, 0, 6, layers=2)
    until(
        lambda: np.array_equal(p.pages[:2, SOURCE], d.pages[:2, TARGET]), "two layers have arrived"
    )
    np.testing.assert_array_equal(d.pages[2:], untouched[2:])
    assert not d.has_received(request)
    for layer in (2, 3):
        p.thread.layer_done(layer)
    p.thread.end_step()
    finish(p, d, "t", request)
    assert_landed(p, d)
    others = [block for block in range(32) if block not in TARGET]
    np.testing.assert_array_equal(d.pages[:, others], untouched[:, others])
    assert p.sent == {"p-t"}
    assert not d.failed


@pytest.mark.parametrize(("transport", "told"), [("local", {"one"}), ("tcp", {"one", "two"})])
def test_a_peer_is_asked_for_help_only_where_it_is_needed(
    make_rank: Callable[..., KvRank],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    told: set[str],
) -> None:
    """Where a write is over at the first look the peer is told to poll for its first transfer only,
    before that is known; elsewhere, as over tcp when its peer has not read yet, for each.
    """
    written: list[TcpTransport] = []
    write, poll = TcpTransport.write, TcpTransport.poll

    def write_and_note(
        writer: TcpTransport, peer: str, tag: int, local: PageIndices, remote: PageIndices
    ) -> int:
        written.append(writer)
        return write(writer, peer, tag, local, remote)

    def poll_without_the_first(writer: TcpTransport) -> list[TransportEvent]:
        if writer in written:
            written.remove(writer)
            return []
        return poll(writer)

    monkeypatch.setattr(TcpTransport, "write", write_and_note)
    monkeypatch.setattr(TcpTransport, "poll", poll_without_the_first)
    asked: set[str] = set()
    send = SendingSide._send

    def note(side: SendingSide, identity: bytes, message: messages.FromPrefill) -> None:
        if isinstance(message, messages.Writing):
            asked.add(message.transfer_id)
        send(side, identity, message)

    monkeypatch.setattr(SendingSide, "_send", note)
    p = make_rank("P", seed=1, transport=transport)
    d = make_rank("D", seed=2, transport=transport)
    for transfer_id in ("one", "two"):
        request = d.receive(transfer_id, PROMPT, TARGET, p)
        p.step(transfer_id, SOURCE, 0, 6, opens=(opened(transfer_id, PROMPT),))
        finish(p, d, transfer_id, request)
    assert_landed(p, d)
    assert asked == told


def test_chunks_and_a_late_grant(pair: tuple[KvRank, KvRank]) -> None:
    """A grant that comes after the prefill has ended gets everything at once."""
    p, d = pair
    p.step("t", SOURCE[:3], 0, 2, opens=(opened("t", PROMPT),))
    p.step("t", SOURCE, 2, 6)
    p.close("t")
    request = d.receive("t", PROMPT, TARGET, p)
    finish(p, d, "t", request, is_closed=True)
    assert_landed(p, d)
    assert p.thread.counters()["sent_pages"] == 4 * 6


def test_a_step_without_the_request_does_not_hold_its_pages(
    make_rank: Callable[..., KvRank],
) -> None:
    """Small pieces wait for the end of a step that computes them, not of one that does not."""
    p, d = make_rank("P", seed=1, stream_min_bytes=1 << 30), make_rank("D", seed=2)
    p.step("t", SOURCE[:3], 0, 2, opens=(opened("t", PROMPT),))
    p.open("other", PROMPT)
    request = d.receive("t", PROMPT, TARGET, p)
    until(
        lambda: np.array_equal(p.pages[:, SOURCE[:2]], d.pages[:, TARGET[:2]]),
        "the first blocks have arrived",
    )
    p.step("t", SOURCE, 2, 6)
    until(lambda: d.has_received(request), "landed")
    assert_landed(p, d)


def test_an_early_grant_waits_for_its_request(pair: tuple[KvRank, KvRank]) -> None:
    """A grant may come before the prefill leg; D's own prefix is not sent."""
    p, d = pair
    request = d.receive("t", PROMPT, TARGET[2:], p, first_block=2)
    until(lambda: d.thread.counters()["open_receives"] == 1, "granted")
    before = d.pages.copy()
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    finish(p, d, "t", request)
    assert_landed(p, d, first=2)
    np.testing.assert_array_equal(d.pages[:, TARGET[:2]], before[:, TARGET[:2]])
    assert d.thread.counters()["received_pages"] == 4 * 4


def test_several_transfers_in_one_step(make_rank: Callable[..., KvRank]) -> None:
    """Requests that share a step all land, also those below ``stream_min_bytes``."""
    p, d = make_rank("P", seed=1), make_rank("D", seed=2)
    names = [f"t{number}" for number in range(5)]
    sources = [[20], [21, 22], [23, 24], [25, 26], [27, 28]]
    prompts = [PROMPT[: 4 + number] for number in range(5)]
    requests = [
        d.receive(name, prompt, [block - 10 for block in blocks], p)
        for name, prompt, blocks in zip(names, prompts, sources, strict=True)
    ]
    orders = StepOrders(
        opens=tuple(opened(name, prompt) for name, prompt in zip(names, prompts, strict=True)),
        progress=tuple(
            SendProgress(name, tuple(blocks), 0, len(blocks))
            for name, blocks in zip(names, sources, strict=True)
        ),
    )
    p.thread.begin_step(orders)
    for layer in (0, 1, 3):
        p.thread.layer_done(layer)
    p.thread.end_step()
    for request in requests:
        until(lambda request=request: d.has_received(request), request)  # type: ignore[misc]
    assert not d.failed
    np.testing.assert_array_equal(p.pages[:, 20:29], d.pages[:, 10:19])
    for name in names:
        p.close(name)
    d.thread.begin_step(StepOrders(acknowledged=tuple(requests)))
    until(lambda: p.thread.counters()["open_sends"] == 0, "released")


def test_a_cancel_half_way_gives_the_pages_back(pair: tuple[KvRank, KvRank]) -> None:
    """After D's cancel the request is reported as failed, and later layers are not written."""
    p, d = pair
    p.open("t", PROMPT)
    request = d.receive("t", PROMPT, TARGET, p)
    p.step("t", SOURCE, 0, 6, layers=1)
    until(lambda: np.array_equal(p.pages[0, SOURCE], d.pages[0, TARGET]), "a layer has arrived")
    d.thread.begin_step(StepOrders(cancels=((request, "the client is gone"),)))
    until(lambda: d.has_received(request), "settled")
    assert d.failed == {request}
    after = d.pages.copy()
    for layer in (1, 2, 3):
        p.thread.layer_done(layer)
    p.thread.end_step()
    p.close("t", aborted=True)
    until(lambda: p.has_sent("p-t"), "released")
    np.testing.assert_array_equal(after, d.pages)
    assert p.thread.counters()["open_sends"] == 0


def test_a_decline_releases_a_finished_prefill(make_rank: Callable[..., KvRank]) -> None:
    """P does not hold blocks for a D that computes the prompt itself, introduced or not."""
    p = make_rank("P", lease_s=1000.0)
    d = make_rank("D")
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    p.close("t")
    assert not p.has_sent("p-t")
    d.thread.begin_step(StepOrders(declines=(Decline("t", 1, (p.address,), "cached"),)))
    until(lambda: p.has_sent("p-t"), "released")


def test_a_cancel_before_the_introduction_releases_the_prefill(
    make_rank: Callable[..., KvRank],
) -> None:
    """A request that D gives up before it has met P does not cost P a lease."""
    p = make_rank("P", lease_s=1000.0)
    d = make_rank("D")
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    p.close("t")
    d.thread.begin_step(StepOrders(given_up=(("t", "no client"),)))
    request = d.receive("t", PROMPT, TARGET, p)
    until(lambda: d.has_received(request), "settled")
    until(lambda: p.has_sent("p-t"), "released")
    assert d.failed == {request}


def test_a_prefill_without_a_decode_node_ends_with_its_lease(
    make_rank: Callable[..., KvRank],
) -> None:
    """Blocks of a finished prefill that nobody asks for are released when the lease ends."""
    p = make_rank("P", lease_s=0.2)
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    p.close("t")
    until(lambda: p.has_sent("p-t"), "the lease has ended")
    assert p.thread.counters()["expired_leases"] == 1


def test_an_aborted_prefill_fails_the_receive(pair: tuple[KvRank, KvRank]) -> None:
    """D hears at once that the pages will not come."""
    p, d = pair
    p.open("t", PROMPT)
    request = d.receive("t", PROMPT, TARGET, p)
    p.step("t", SOURCE, 0, 3)
    p.close("t", aborted=True)
    until(lambda: d.has_received(request), "failed")
    until(lambda: p.has_sent("p-t"), "released")
    assert d.failed == {request}


def test_a_preempted_prefill_is_finished_from_other_blocks(pair: tuple[KvRank, KvRank]) -> None:
    """After a preemption every page is written once, from the blocks that hold it then."""
    p, d = pair
    p.open("t", PROMPT)
    request = d.receive("t", PROMPT, TARGET, p)
    p.step("t", SOURCE[:3], 0, 3)
    until(
        lambda: np.array_equal(p.pages[:, SOURCE[:3]], d.pages[:, TARGET[:3]]),
        "the first blocks have arrived",
    )
    expected = p.pages[:, SOURCE].copy()
    p.thread.begin_step(StepOrders(preempted=("p-t",)))
    again = [12, 13, 14, 15, 16, 18]
    p.pages[:, again] = expected
    p.pages[:, SOURCE] = 0
    p.step("t", again[:2], 0, 2)
    p.step("t", again, 2, 6)
    finish(p, d, "t", request)
    np.testing.assert_array_equal(expected, d.pages[:, TARGET])
    assert d.thread.counters()["received_pages"] == 4 * 6


def test_a_preemption_while_writing_returns_soon(make_rank: Callable[..., KvRank]) -> None:
    """The step that takes the source away waits for open writes, and no longer than allowed."""
    p = make_rank("P", seed=1, stream_min_bytes=1, preemption_fence_s=0.1)
    d = make_rank("D", seed=2)
    p.open("t", PROMPT)
    request = d.receive("t", PROMPT, TARGET, p)
    p.step("t", SOURCE, 0, 5)
    p.thread.begin_step(StepOrders(preempted=("p-t",)))
    p.pages[:, SOURCE] = 0
    p.close("t", aborted=True)
    until(lambda: d.has_received(request), "failed")
    until(lambda: p.has_sent("p-t"), "released")
    assert d.failed == {request}


@pytest.mark.parametrize(("senders", "receivers"), [(2, 1), (1, 2), (2, 2)])
def test_unequal_tensor_parallel_sizes(
    make_rank: Callable[..., KvRank], senders: int, receivers: int
) -> None:
    """Each rank writes the slices of the heads that both hold; all heads land on every rank."""
    ps = [
        make_rank("P", rank=r, tensor_parallel=senders, total_heads=4, seed=r)
        for r in range(senders)
    ]
    ds = [
        make_rank("D", rank=r, tensor_parallel=receivers, total_heads=4, seed=9)
        for r in range(receivers)
    ]
    requests = [d.receive("t", PROMPT, TARGET, *ps) for d in ds]
    for p in ps:
        p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    for d, request in zip(ds, requests, strict=True):
        until(lambda d=d, request=request: d.has_received(request), "landed")  # type: ignore[misc]
        assert not d.failed
        d.thread.begin_step(StepOrders(acknowledged=(request,)))
    for p in ps:
        p.close("t")
        until(lambda p=p: p.has_sent("p-t"), "released")  # type: ignore[misc]
    written = np.concatenate([p.pages[:, SOURCE] for p in ps], axis=2)
    landed = np.concatenate([d.pages[:, TARGET] for d in ds], axis=2)
    np.testing.assert_array_equal(written, landed)


def test_a_restarted_prefill_rank_is_a_new_peer(
    make_rank: Callable[..., KvRank], free_port: Callable[[], int]
) -> None:
    """Transfers of the old engine fail, those of the new one at the same address work."""
    port = free_port()
    old = make_rank("P1", port=port, stream_min_bytes=1)
    d = make_rank("D")
    old.open("t", PROMPT)
    lost = d.receive("t", PROMPT, TARGET, old)
    old.step("t", SOURCE, 0, 6, layers=1)
    until(lambda: np.array_equal(old.pages[0, SOURCE], d.pages[0, TARGET]), "a layer has arrived")
    old.thread.stop()
    until(lambda: d.has_received(lost), "the loss is noticed")
    new = make_rank("P2", port=port, seed=5)
    outdated = d.receive("o", PROMPT, [3], old)
    new.step("u", SOURCE, 0, 6, opens=(opened("u", PROMPT),))
    finish(new, d, "u", d.receive("u", PROMPT, TARGET, new))
    until(lambda: d.has_received(outdated), "the old engine's transfer fails")
    assert_landed(new, d)
    assert d.failed == {lost, outdated}


def test_another_prefill_rank_fills_the_same_pages(
    make_rank: Callable[..., KvRank],
) -> None:
    """The first one ends in the middle of its writes; the second writes everything again."""
    first = make_rank("P1", seed=1, stream_min_bytes=1)
    second = make_rank("P2", seed=1)
    d = make_rank("D", seed=2, retarget_wait_s=60.0)
    first.open("t", PROMPT)
    request = d.receive("t", PROMPT, TARGET, first)
    first.step("t", SOURCE, 0, 6, layers=2)
    until(lambda: np.array_equal(first.pages[0, SOURCE], d.pages[0, TARGET]), "a layer has arrived")
    first.thread.stop()
    d.pages[:, TARGET] = 0
    order = Retarget("t", 2, "P2", (second.address,), "P1 is gone")
    d.thread.begin_step(StepOrders(retargets=(order,)))
    second.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    finish(second, d, "t", request)
    assert_landed(second, d)
    assert not d.failed
    assert d.thread.counters()["retargeted_receives"] == 1


def test_a_new_attempt_on_the_same_node(pair: tuple[KvRank, KvRank]) -> None:
    """D may grant other pages to attempt 2 while attempt 1 is being cancelled."""
    p, d = pair
    p.open("t", PROMPT)
    first = d.receive("t", PROMPT, TARGET, p)
    p.step("t", SOURCE, 0, 6, layers=2)
    until(lambda: np.array_equal(p.pages[0, SOURCE], d.pages[0, TARGET]), "a layer has arrived")
    d.thread.begin_step(StepOrders(cancels=((first, "the client is gone"),)))
    other = [20, 6, 10, 29, 12, 18]
    second = d.receive("t", PROMPT, other, p, attempt=2)
    for layer in (2, 3):
        p.thread.layer_done(layer)
    p.thread.end_step()
    finish(p, d, "t", second)
    assert_landed(p, d, target=other)
    assert d.failed == {first}


def test_an_attempt_that_is_open_is_not_granted_again(pair: tuple[KvRank, KvRank]) -> None:
    """A second request for the same attempt fails at once; the first one is not disturbed."""
    p, d = pair
    request = d.receive("t", PROMPT, TARGET, p)
    second = d.receive("t", PROMPT, [10], p, request_id="second")
    until(lambda: d.has_received(second), "refused")
    p.step("t", SOURCE, 0, 6, opens=(opened("t", PROMPT),))
    finish(p, d, "t", request)
    assert_landed(p, d)
    assert d.failed == {second}


def test_stop_may_be_called_twice(make_rank: Callable[..., KvRank]) -> None:
    """The end of a rank is idempotent, and needs no start."""
    p = make_rank("P")
    p.thread.stop()
    p.thread.stop()


def test_warm_addresses_are_introduced_before_the_first_request(
    make_rank: Callable[..., KvRank], caplog: pytest.LogCaptureFixture
) -> None:
    """A decode rank meets its prefill ranks at start."""
    caplog.set_level("INFO")
    p = make_rank("P")
    make_rank("D", warm_addresses=(p.address,))
    until(lambda: "decode rank D/0 can be written to" in caplog.text, "introduced")


def test_abort_before_the_first_step(pair: tuple[KvRank, KvRank]) -> None:
    """A leg that is opened and closed in the same step is released at once."""
    p, _ = pair
    p.thread.begin_step(
        StepOrders(opens=(opened("t", PROMPT),), closes=(CloseSend("p-t", aborted=True),))
    )
    until(lambda: p.has_sent("p-t"), "released")

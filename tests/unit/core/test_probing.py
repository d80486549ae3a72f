"""Probes: where they go, when they are refused, and that nobody else pays for them."""

from __future__ import annotations

from typing import Any

import pytest
from router_stubs.core_story import Driver, ended, names

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import AnswerError, Effect, StartAlone, StartPair


def probe(driver: Driver, request_id: str, decode: str, prefill: str = "") -> list[Effect]:
    """An operator sends one."""
    pinned = ev.Pinned(decode, prefill)
    return driver.request(request_id, endpoint="probe", pinned=pinned)


def refusal(effects: list[Effect]) -> Any:
    """The only answer among those effects."""
    (answer,) = [effect for effect in effects if isinstance(effect, AnswerError)]
    return answer


def test_goes_where_it_is_sent() -> None:
    """To a node of either role, or to a pair; with the books of any request."""
    driver = Driver("p0", "p1", "d0", "d1")
    (alone,) = probe(driver, "a", "p1")
    assert isinstance(alone, StartAlone)
    assert alone.decode.node == "p1"
    assert (driver.node("p1").decode_legs, driver.node("p1").committed_blocks) == (1, 3)
    (pair,) = probe(driver, "b", "d1", "p0")
    assert isinstance(pair, StartPair)
    assert (pair.prefill.node, pair.decode.node) == ("p0", "d1")
    driver.do(ev.PrefillAnswered("b", 1, 200))
    for request_id in "ab":
        driver.do(ev.FirstDataArrived(request_id, 1))
        timeline = ended(driver.do(ev.DecodeEnded(request_id, 1)))
        assert (timeline.decision, timeline.outcome) == ("probe", "ok")
    assert driver.is_idle()


def test_several_at_a_time() -> None:
    """A batch of probes fits on one node: they do not stand in each other's way."""
    driver = Driver("d0")
    assert [names(probe(driver, f"r{n}", "d0")) for n in range(8)] == [["StartAlone"]] * 8


@pytest.mark.parametrize(("decode", "prefill"), [("d9", ""), ("d0", "p9"), ("d0", "d0")], ids=str)
def test_unknown_nodes(decode: str, prefill: str) -> None:
    """404, and who is known."""
    driver = Driver("p0", "d0")
    answer = refusal(probe(driver, "a", decode, prefill))
    assert answer.status == 404
    assert "d0, p0" in answer.message
    assert driver.is_idle()


def test_clients_come_first() -> None:
    """A probe is refused while a client's request is on its node, and when it is on the other of a
    pair; other nodes may be measured.
    """
    driver = Driver("p0", "d0", "d1")
    driver.request("live")
    assert driver.core.requests["live"].choice.decode.name == "d0"  # type: ignore[union-attr]
    answer = refusal(probe(driver, "a", "d0"))
    assert (answer.status, answer.message) == (429, "1 requests of clients are on d0")
    assert refusal(probe(driver, "b", "d1", "p0")).status == 429
    assert names(probe(driver, "c", "d1")) == ["StartAlone"]
    driver.do(ev.ClientGone("live"))
    assert names(probe(driver, "d", "d0")) == ["StartAlone"]


def test_nobody_waits_behind_a_probe() -> None:
    """While somebody waits none is placed, and a probe does not wait itself."""
    driver = Driver("p0", "d0", "d1", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    driver.request("r2")
    assert list(driver.core.queue) == ["r2"]
    assert "1 requests wait" in refusal(probe(driver, "a", "d1")).message
    assert list(driver.core.queue) == ["r2"]


def test_a_client_may_come_to_a_node_that_is_measured() -> None:
    """Probes close no node."""
    driver = Driver("d0")
    probe(driver, "a", "d0")
    assert names(driver.request("live")) == ["StartAlone"]


def test_nodes_that_cannot_take_it() -> None:
    """One that drains, and one whose blocks are taken."""
    driver = Driver("p0", "d0", "d1")
    driver.do(ev.DrainRequested(1, "d1", restarts=False))
    assert refusal(probe(driver, "a", "d1")).message == "d1 takes no work now"
    driver.report("d0", free_blocks=2, leased_blocks=98)
    assert refusal(probe(driver, "b", "d0")).message == "d0 has 2 free blocks"


def test_a_probe_is_not_moved() -> None:
    """Whatever fails, it fails there: before its first token, in its answer, and its node."""
    driver = Driver("p0", "p1", "d0", "d1")
    probe(driver, "a", "d0")
    failed = driver.do(ev.DecodeFailed("a", 1, "no connection"))
    assert refusal(failed).status == 502
    probe(driver, "b", "d0", "p0")
    failed = driver.do(ev.PrefillFailed("b", 1, "no connection"))
    assert refusal(failed).status == 502
    assert {"CancelLeg", "FailTransfer"} <= set(names(failed))
    probe(driver, "c", "d0")
    driver.do(ev.FirstDataArrived("c", 1))
    assert refusal(driver.do(ev.DecodeFailed("c", 1, "broken"))).status == 502
    probe(driver, "d", "d1", "p0")
    lost = driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    assert refusal(lost).status == 502
    assert driver.is_idle()


def test_a_silent_node_keeps_its_probe() -> None:
    """Until the probe's own deadline, as nobody else may answer it."""
    driver = Driver("p0", "p1", "d0", "d1")
    probe(driver, "a", "d0", "p0")
    effects = driver.keep_silent(driver.core.limits.node_silence_limit_s)
    assert not [name for name in names(effects) if name.startswith("Start")]
    effects = driver.pass_time(driver.core.limits.first_token_deadline_s)
    assert refusal(effects).status == 504
    assert driver.is_idle()

"""Requests that not every node can serve, and those that need no KV."""

from __future__ import annotations

from typing import Any

from router_stubs.core_story import Driver

from splitserve.orchestrator.agent.messages import AdapterDescription
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import (
    AnswerError,
    Effect,
    RetargetTransfer,
    StartAlone,
    StartDecode,
    StartPair,
    StartPrefill,
)


def join(driver: Driver, name: str, **contents: str) -> None:
    """A node with these adapters, by name, and what is in them."""
    adapters = {
        adapter: AdapterDescription(path=f"/{adapter}", content=content)
        for adapter, content in contents.items()
    }
    driver.join(name, adapters=adapters)
    driver.report(name)


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def drain(driver: Driver, node: str) -> None:
    driver.do(ev.DrainRequested(1, node, restarts=False, is_forced=True))


def forwarded(driver: Driver, request_id: str, **changes: Any) -> list[Effect]:
    """A request that needs no KV."""
    fields: dict[str, Any] = {"needs_kv": False, "prompt_tokens": 0, "output_tokens": 0}
    fields |= {"streaming": False, "alone_because": "tokenize"}
    return driver.request(request_id, **fields | changes)


def test_a_replaced_prefill_node_has_the_same_adapter() -> None:
    """One that has another, or none, is no replacement: the decode node computes the prompt."""
    driver = Driver()
    join(driver, "p0", a="w1")
    join(driver, "p1", a="w2")
    join(driver, "p2")
    join(driver, "d0", a="w1")
    (start,) = driver.request("r", adapter="a")
    assert isinstance(start, StartPair)
    assert start.prefill.node == "p0"
    effects = driver.do(ev.PrefillFailed("r", start.attempt, "broken"))
    assert "FailTransfer" in kinds(effects)
    assert not any(isinstance(e, StartPrefill | RetargetTransfer) for e in effects)
    join(driver, "p3", a="w1")
    (start,) = driver.request("s", adapter="a")
    assert isinstance(start, StartPair)
    effects = driver.do(ev.PrefillFailed("s", start.attempt, "broken"))
    (again,) = [e for e in effects if isinstance(e, StartPrefill)]
    assert {start.prefill.node, again.prefill.node} == {"p0", "p3"}


def test_a_replaced_decode_node_has_the_same_adapter() -> None:
    """Only one that can take the pages of what has been computed gets them."""
    driver = Driver()
    join(driver, "p0", a="w1")
    join(driver, "d0", a="w1")
    join(driver, "d1", a="w2")
    (start,) = driver.request("r", adapter="a")
    assert isinstance(start, StartPair)
    effects = driver.do(ev.DecodeFailed("r", start.attempt, "broken"))
    assert not any(isinstance(e, StartDecode) for e in effects)
    (alone,) = [e for e in effects if isinstance(e, StartAlone)]
    assert alone.decode.node == "d1"


def test_a_bound_request_goes_to_its_node_or_nowhere() -> None:
    """Whatever else is free; when the node is lost nobody takes its place."""
    driver = Driver("p0", "d0", "d1")
    for number in range(3):
        (start,) = driver.request(f"r{number}", bound_to="d1-1", alone_because="previous")
        assert isinstance(start, StartAlone)
        assert start.decode.node == "d1"
    effects = driver.do(ev.DecodeFailed("r0", 1, "broken"))
    assert kinds(effects)[-2:] == ["AnswerError", "EndRequest"]
    driver.do(ev.NodeDied("d1", "d1-1", "killed"))
    assert not driver.core.requests
    (error, _) = driver.request("late", bound_to="d1-1", alone_because="previous")
    assert isinstance(error, AnswerError)
    assert error.status == 503
    assert "earlier response" in error.message


def test_a_bound_request_that_waits_ends_with_its_node() -> None:
    """It does not wait for its time to be over."""
    driver = Driver("p0", "d0")
    driver.join("d1", total_blocks=4)
    driver.report("d1", free_blocks=4, total_blocks=4)
    big: dict[str, Any] = {"bound_to": "d1-1", "alone_because": "previous", "output_tokens": 32}
    driver.request("first", **big)
    assert driver.request("second", **big) == []
    effects = driver.do(ev.NodeDied("d1", "d1-1", "killed"))
    told = {e.request_id: e.status for e in effects if isinstance(e, AnswerError)}
    assert told == {"first": 502, "second": 503}


def test_what_a_draining_node_holds_can_be_asked_for() -> None:
    """But it gets no new work, bound or not."""
    driver = Driver("p0", "d0", "d1")
    drain(driver, "d1")
    (start,) = forwarded(driver, "r", bound_to="d1-1")
    assert isinstance(start, StartAlone)
    assert start.decode.node == "d1"
    (error, _) = driver.request("s", bound_to="d1-1", alone_because="previous")
    assert isinstance(error, AnswerError)
    assert error.status == 503
    (start,) = forwarded(driver, "t")
    assert isinstance(start, StartAlone)
    assert start.decode.node == "d0"


def test_what_needs_no_kv_takes_none() -> None:
    """It is counted as a leg, with no block, and given back."""
    driver = Driver("p0", "d0")
    node = driver.core.membership.nodes["d0"]
    (start,) = forwarded(driver, "r")
    assert isinstance(start, StartAlone)
    assert (node.decode_legs, node.placed_at_once, node.committed_blocks) == (1, 1, 0)
    driver.do(ev.FirstDataArrived("r", start.attempt))
    driver.do(ev.DecodeEnded("r", start.attempt))
    assert (node.decode_legs, node.placed_at_once) == (0, 0)
    driver.report("d0", free_blocks=0)
    assert kinds(forwarded(driver, "s")) == ["StartAlone"]

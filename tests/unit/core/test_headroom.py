"""How much of the prompts a decode node computes itself when prefill nodes are missing."""

from __future__ import annotations

from typing import Any

from router_stubs.core_story import Driver, names

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import AnswerError, StartAlone

LIMIT: dict[str, Any] = {"own_prompt_limit_tokens": 100}


def started(effects: list[Any]) -> list[str]:
    """Requests that a decode node serves alone from now on."""
    return [e.request_id for e in effects if isinstance(e, StartAlone)]


def test_prompts_wait_for_room_on_a_decode_node() -> None:
    """Without a prefill node as many run as fit; the next follows when one has its first data. A
    prompt over the limit runs when nothing else does.
    """
    driver = Driver("d0", placement=LIMIT)
    assert started(driver.request("r1", prompt_tokens=60)) == ["r1"]
    assert started(driver.request("r2", prompt_tokens=40)) == ["r2"]
    assert started(driver.request("r3", prompt_tokens=500)) == []
    assert driver.node("d0").own_prompt_tokens == 100
    assert started(driver.do(ev.FirstDataArrived("r1", 1))) == []
    assert started(driver.do(ev.FirstDataArrived("r2", 1))) == ["r3"]
    driver.do(ev.ClientGone("r3"))
    for request in ("r1", "r2"):
        driver.do(ev.DecodeEnded(request, 1))
    assert driver.is_idle()
    assert driver.node("d0").own_prompt_tokens == 0


def test_the_other_decode_node_may_have_room() -> None:
    """Also when it has more requests."""
    driver = Driver("p0", "d0", "d1", placement=LIMIT)
    driver.request("r1", prompt_tokens=90)
    busy = driver.core.requests["r1"].choice.decode.name  # type: ignore[union-attr]
    driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    (effect,) = driver.request("r2", prompt_tokens=90)
    assert isinstance(effect, StartAlone)
    assert effect.decode.node != busy


def test_requests_that_need_no_prefill_node_pass() -> None:
    """They compute their prompt on a decode node in any case."""
    driver = Driver("d0", placement=LIMIT)
    driver.request("r1", prompt_tokens=90)
    driver.request("r2", prompt_tokens=90)
    assert started(driver.request("r3", prompt_tokens=90, alone_because="n")) == ["r3"]


def test_a_failed_prefill_is_not_made_up_for_without_room() -> None:
    """The client gets 503 and when to come again; nothing of the request is left."""
    driver = Driver("p0", "d0", placement=LIMIT)
    driver.request("r1", prompt_tokens=90)
    driver.request("r2", prompt_tokens=90)
    assert "FailTransfer" in names(driver.do(ev.PrefillFailed("r1", 1, "reset")))
    effects = driver.do(ev.PrefillFailed("r2", 1, "reset"))
    (answer,) = [e for e in effects if isinstance(e, AnswerError)]
    assert (answer.status, answer.retry_after_s) == (503, 1)
    assert "policy.own_prompt_limit_tokens" in answer.message
    driver.do(ev.FirstDataArrived("r1", 1))
    driver.do(ev.DecodeEnded("r1", 1))
    assert driver.is_idle()

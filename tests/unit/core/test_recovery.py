"""Silent nodes and broken streams, told as lists of effects."""

from __future__ import annotations

from router_stubs.core_story import Driver, description, ended, names

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import DoubtLeg, FailTransfer, StartAlone, StartPair

SILENCE_S = 5.0


def fall_silent(driver: Driver, *names_: str) -> list[str]:
    """Every other node speaks on; the names of the orders that follow."""
    driver.now += SILENCE_S - 0.5
    for node in driver.core.membership.nodes:
        if node not in names_:
            driver.report(node)
    return names(driver.pass_time(0.5))


def streaming(driver: Driver, *, can_continue: bool = True, prompt_tokens: int = 32) -> None:
    """Request r1 streams from its decode node."""
    driver.request("r1", can_continue=can_continue, prompt_tokens=prompt_tokens)
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    driver.do(ev.FirstDataArrived("r1", 1))


def test_a_broken_stream_goes_on_elsewhere() -> None:
    """Both legs begin anew on a decode node that has not failed it; the first data's time and the
    client's status stay; the prefill node may let go of what it held.
    """
    driver = Driver("p0", "d0", "d1")
    streaming(driver)
    effects = driver.do(ev.DecodeFailed("r1", 1, "reset"))
    assert effects[0] == FailTransfer("p0", "r1.1", "reset")
    assert effects[-1] == StartPair("r1", 2, "r1.2", description("p0"), description("d1"))
    assert driver.node("d0").decode_legs == 0
    assert driver.do(ev.DecodeEnded("r1", 1)) == []
    driver.now += 1
    driver.do(ev.FirstDataArrived("r1", 2))
    driver.do(ev.DecodeEnded("r1", 2))
    timeline = ended(driver.do(ev.PrefillAnswered("r1", 2, 200)))
    assert (timeline.outcome, timeline.status, timeline.continuations) == ("ok", 200, 1)
    assert timeline.first_data == 100
    assert driver.is_idle()


def test_a_stream_waits_for_room_elsewhere() -> None:
    """It enters the queue before all others, and its wait there has a deadline."""
    driver = Driver("p0", "d0", "d1", queue_timeout_s=10.0)
    streaming(driver, prompt_tokens=700)
    driver.request("r2", prompt_tokens=1000)
    driver.do(ev.FirstDataArrived("r2", 1))
    driver.do(ev.DecodeFailed("r1", 1, "reset"))
    assert list(driver.core.queue) == ["r1"]
    effects = driver.pass_time(10.0)
    assert names(effects)[-2:] == ["AnswerError", "EndRequest"]


def test_a_stream_that_cannot_be_continued_exactly_ends() -> None:
    """With an error, at once."""
    driver = Driver("p0", "d0", "d1")
    streaming(driver, can_continue=False)
    effects = driver.do(ev.NodeDied("d0", "d0-1", "killed"))
    assert names(effects)[-2:] == ["AnswerError", "EndRequest"]
    assert driver.is_idle()


def test_a_stream_ends_when_no_node_is_left_to_continue_it() -> None:
    """Also when as many have failed it as may."""
    driver = Driver("p0", "d0", "d1", "d2", max_attempts=2)
    streaming(driver)
    driver.do(ev.NodeDied("d0", "d0-1", "killed"))
    driver.do(ev.FirstDataArrived("r1", 2))
    effects = driver.do(ev.DecodeFailed("r1", 2, "reset"))
    assert names(effects)[-2:] == ["AnswerError", "EndRequest"]
    assert driver.is_idle()


def test_a_refused_continuation_is_an_error() -> None:
    """The client has a status line: the engine's own status cannot be passed on."""
    driver = Driver("p0", "d0", "d1")
    streaming(driver)
    driver.do(ev.DecodeFailed("r1", 1, "reset"))
    effects = driver.do(ev.DecodeRefused("r1", 2, 400))
    assert names(effects)[-2:] == ["AnswerError", "EndRequest"]
    assert driver.is_idle()


def test_a_request_leaves_a_silent_prefill_node() -> None:
    """Another pair, and fresh pages on the decode node: the silent node may still write into the
    ones it was granted.
    """
    driver = Driver("p0", "p1", "d0")
    driver.request("r1")
    silent = driver.core.requests["r1"].choice.prefill.name  # type: ignore[union-attr]
    (other,) = {"p0", "p1"} - {silent}
    found = fall_silent(driver, silent)
    assert found == ["CancelLeg", "FailTransfer", "CancelLeg", "StartPair"]
    choice = driver.core.requests["r1"].choice
    assert choice is not None
    assert choice.prefill is driver.node(other)
    assert driver.core.requests["r1"].transfer_id == "r1.2"


def test_without_another_one_the_decode_node_computes_itself() -> None:
    """As a new leg, with pages of its own."""
    driver = Driver("p0", "d0")
    driver.request("r1")
    driver.now += SILENCE_S - 0.5
    driver.report("d0")
    effects = driver.pass_time(0.5)
    assert effects[-1] == StartAlone("r1", 2, description("d0"))
    assert driver.node("p0").prefill_legs == 0


def test_a_request_leaves_a_silent_decode_node() -> None:
    """While there is another one; the prefill node keeps what it computed."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r1")
    assert fall_silent(driver, "d0") == ["CancelLeg", "StartDecode"]


def test_the_only_decode_node_may_be_silent() -> None:
    """Nothing is gained by leaving it: its requests wait for their deadlines."""
    driver = Driver("p0", "d0")
    driver.request("r1")
    assert fall_silent(driver, "d0") == []
    assert driver.node("d0").decode_legs == 1


def test_a_stream_of_a_silent_node_is_doubted() -> None:
    """Again and again while the silence lasts; a stream that flows is left alone by the shell."""
    driver = Driver("p0", "d0", "d1")
    streaming(driver)
    for _ in range(3):
        driver.now += SILENCE_S - 0.5
        driver.report("p0")
        driver.report("d1")
        assert driver.pass_time(0.5) == [DoubtLeg("r1", 1, SILENCE_S)]
    driver.report("d0")
    driver.report("p0")
    driver.report("d1")
    assert driver.pass_time(SILENCE_S - 0.1) == []


def test_a_node_whose_agent_is_gone_falls_silent_too() -> None:
    """Its engine may be cut off with it: requests that wait for it move on after the same time."""
    driver = Driver("p0", "p1", "d0")
    driver.request("r1")
    silent = driver.core.requests["r1"].choice.prefill.name  # type: ignore[union-attr]
    driver.do(ev.NodeDisconnected(silent, f"{silent}-1"))
    assert "StartPair" in fall_silent(driver, silent)


def test_nodes_that_come_and_go_do_not_keep_a_request_moving() -> None:
    """After twice ``max_attempts`` placements it stays where it is."""
    driver = Driver("p0", "p1", "d0", max_attempts=2)
    driver.request("r1")
    moves = 0
    for _ in range(10):
        choice = driver.core.requests["r1"].choice
        if choice is None or choice.prefill is None:
            break
        silent = choice.prefill.name
        moves += "StartPair" in fall_silent(driver, silent)
        driver.report(silent)
    assert moves == 3

"""More load than there is room for, and nodes that fail: who is served, who is refused, and that it
is over when the load is.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
from router_stubs.core_story import Driver, names

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.breaker import BreakerLimits, BreakerState
from splitserve.orchestrator.core.effects import (
    AnswerError,
    Effect,
    ReportBreaker,
    StartAlone,
    StartPair,
)

ONE_AT_A_TIME = {"prefill_ahead_requests": 0}


def started(effects: list[Effect]) -> list[str]:
    """Requests whose legs were sent."""
    return [e.request_id for e in effects if isinstance(e, StartPair | StartAlone)]


def nodes_of(effects: list[Effect]) -> list[tuple[str, str]]:
    """(prefill, decode) of each request that was started; no prefill node for one that is alone."""
    return [
        (e.prefill.node if isinstance(e, StartPair) else "", e.decode.node)
        for e in effects
        if isinstance(e, StartPair | StartAlone)
    ]


def finish(driver: Driver, request_id: str, attempt: int = 1) -> list[Effect]:
    """Everything of that request goes well."""
    effects = driver.do(ev.PrefillAnswered(request_id, attempt, 200))
    effects += driver.do(ev.FirstDataArrived(request_id, attempt))
    return effects + driver.do(ev.DecodeEnded(request_id, attempt))


# Tenants


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    """Twenty of one tenant wait; the other's three are served in turn with them."""
    driver = Driver("p0", "d0", placement=ONE_AT_A_TIME)
    for number in range(20):
        driver.request(f"a{number}", tenant="a")
    for number in range(3):
        driver.request(f"b{number}", tenant="b")
    order = ["a0"]
    for _ in range(7):
        order += started(finish(driver, order[-1]))
    assert order == ["a0", "a1", "b0", "a2", "b1", "a3", "b2", "a4"]


def test_turns_are_weighted_by_tokens() -> None:
    """Requests of four times the tokens come a quarter as often; what no node can hold is not
    counted.
    """
    driver = Driver("p0", "d0", placement=ONE_AT_A_TIME)
    driver.request("first", tenant="c")
    for number in range(20):
        driver.request(f"a{number}", tenant="a", prompt_tokens=100, output_tokens=60)
        driver.request(f"b{number}", tenant="b", prompt_tokens=400, output_tokens=240)
    order = ["first"]
    for _ in range(20):
        order += started(finish(driver, order[-1]))
    assert Counter(name[0] for name in order[1:]) == {"a": 16, "b": 4}


def test_in_a_full_queue_the_tenant_with_most_is_refused() -> None:
    """Its latest request gets the 429 while the other tenant enters; the bound holds."""
    driver = Driver("p0", "d0", queue_limit_requests=4, placement=ONE_AT_A_TIME)
    for number in range(5):
        driver.request(f"a{number}", tenant="a")
    refused = []
    for name in ("b0", "b1", "b2", "a9"):
        effects = driver.request(name, tenant=name[0])
        assert names(effects) == ["AnswerError", "EndRequest"]
        assert isinstance(effects[0], AnswerError)
        assert effects[0].status == 429
        refused.append(effects[0].request_id)
        assert len(driver.core.queue) == 4
    assert refused == ["a4", "a3", "b2", "a9"]
    assert driver.core.queue.waiting() == {"a": 2, "b": 2}


def test_a_small_request_of_another_tenant_need_not_wait_for_a_report() -> None:
    """It is that tenant's turn while the head lacks blocks that the newcomer does not need."""
    driver = Driver("d0")
    alone = {"alone_because": "x", "output_tokens": 100}
    for name in ("a0", "a1", "a2"):
        driver.request(name, tenant="a", prompt_tokens=900, **alone)
    assert started(driver.do(ev.DecodeRefused("a0", 1, 400))) == ["a1"]
    assert started(driver.request("b0", tenant="b", prompt_tokens=20, **alone)) == ["b0"]


@pytest.mark.parametrize(("waited", "told"), [(0.0, 1), (7.2, 8), (500.0, 60)])
def test_retry_after_is_whole_seconds_within_bounds(waited: float, told: int) -> None:
    """At least one, at most ``queue_timeout_s``: a retried request may be older than that."""
    driver = Driver("p0", "d0", queue_limit_requests=1, placement=ONE_AT_A_TIME)
    driver.request("r1")
    driver.request("r2")
    driver.now += waited
    (answer, _) = driver.request("r3")
    assert isinstance(answer, AnswerError)
    assert (answer.status, answer.retry_after_s) == (429, told)


# The end of the load


def test_when_clients_give_up_the_next_request_starts_at_once() -> None:
    """Four times what is served at a time; everyone leaves, half of them while they wait."""
    driver = Driver("p0", "d0", placement=ONE_AT_A_TIME)
    for number in range(40):
        driver.request(f"r{number}")
    for number in range(39, -1, -1):
        driver.do(ev.ClientGone(f"r{number}"))
    assert driver.is_idle()
    assert started(driver.request("fresh")) == ["fresh"]


def test_who_stood_behind_one_that_left_is_looked_at_at_once() -> None:
    """The large one lacked blocks; the one behind it does not."""
    driver = Driver("d0")
    alone = {"alone_because": "x"}
    driver.request("r1", prompt_tokens=700, output_tokens=100, **alone)
    driver.request("large", prompt_tokens=900, output_tokens=100, **alone)
    driver.request("small", **alone)
    assert started(driver.do(ev.ClientGone("large"))) == ["small"]


def test_free_decode_blocks_help_those_that_pass_the_one_without_a_slot() -> None:
    """The head waits for a prefill slot, the one behind it for decode blocks."""
    driver = Driver("p0", "d0", placement=ONE_AT_A_TIME)
    driver.request("r1", prompt_tokens=900)
    driver.request("head")
    assert driver.request("passing", prompt_tokens=900, alone_because="x") == []
    driver.do(ev.FirstDataArrived("r1", 1))
    assert started(driver.do(ev.DecodeEnded("r1", 1))) == ["passing"]
    assert list(driver.core.queue) == ["head"]


def test_short_prompts_pass_too() -> None:
    """Below ``min_uncached_tokens`` no prefill slot is needed."""
    driver = Driver("p0", "d0", placement=ONE_AT_A_TIME | {"min_uncached_tokens": 20})
    driver.request("r1")
    driver.request("r2")
    assert started(driver.request("short", prompt_tokens=10)) == ["short"]


def test_a_third_node_gets_its_share_without_a_burst() -> None:
    """It joins while twelve requests run over two: it never has more legs than the others, and
    afterwards a third of the work.
    """
    driver = Driver("p0", "d0", "d1", placement={"prefill_ahead_requests": 99})
    running: deque[str] = deque()
    counts: Counter[str] = Counter()

    def ask(number: int) -> None:
        ((_, decode),) = nodes_of(driver.request(f"r{number}"))
        running.append(f"r{number}")
        counts[decode] += 1

    for number in range(12):
        ask(number)
    for number in range(12, 500):
        if number == 200:
            assert counts == {"d0": 100, "d1": 100}
            counts.clear()
            driver.join("d2")
            driver.report("d2")
        finish(driver, running.popleft())
        ask(number)
        legs = {name: driver.node(name).decode_legs for name in ("d0", "d1")}
        if number >= 200:
            assert driver.node("d2").decode_legs <= min(legs.values()) + 1
    assert all(90 <= count <= 110 for count in counts.values()), counts


# Breakers

BREAKER = BreakerLimits(failures=3, window_s=10.0, open_s=1.0, open_limit_s=8.0)


def driver_with_open(*nodes: str, opened: str = "d0", **settings: Any) -> Driver:
    """Three legs on that node have just failed."""
    driver = Driver(*nodes, breaker=BREAKER, **settings)
    effects: list[Effect] = []
    others = [name for name in nodes if name != opened and name[0] == opened[0]]
    for name in others:
        driver.report(name, phase="loading")
    for number in range(3):
        driver.request(f"bad{number}", alone_because="x" if opened.startswith("d") else "")
        kind = ev.DecodeFailed if opened.startswith("d") else ev.PrefillFailed
        effects += driver.do(kind(f"bad{number}", 1, "reset"))
        if number < 2:
            driver.now += 0.4
    leg = "decode" if opened.startswith("d") else "prefill"
    assert [e for e in effects if isinstance(e, ReportBreaker)] == [
        ReportBreaker(opened, leg, "open", "reset")  # type: ignore[arg-type]
    ]
    for name in others:
        driver.report(name)
    return driver


def test_an_open_node_gets_nothing_while_another_one_is_usable() -> None:
    """Not even when the other one is full: the request waits for it."""
    driver = driver_with_open("d0", "d1")
    large = {"alone_because": "x", "prompt_tokens": 900, "output_tokens": 100}
    assert nodes_of(driver.request("r1", **large)) == [("", "d1")]
    assert driver.request("r2", **large) == []
    driver.now += 0.9
    assert driver.report("d0") == []


def test_one_request_tries_it_after_the_delay_and_its_success_closes_it() -> None:
    """The next ones go elsewhere until then."""
    driver = driver_with_open("d0", "d1")
    driver.now += 1.0
    effects = driver.request("r1", alone_because="x")
    assert nodes_of(effects) == [("", "d0")]
    assert effects[-1] == ReportBreaker("d0", "decode", "half open", "reset")
    for name in ("r2", "r3"):
        assert nodes_of(driver.request(name, alone_because="x")) == [("", "d1")]
    effects = driver.do(ev.FirstDataArrived("r1", 1))
    assert effects == [ReportBreaker("d0", "decode", "closed", "")]
    assert nodes_of(driver.request("r4", alone_because="x")) == [("", "d0")]


def test_a_try_that_fails_goes_elsewhere_and_the_next_comes_later() -> None:
    """Nobody is answered with an error by it."""
    driver = driver_with_open("d0", "d1")
    driver.now += 1.0
    driver.request("r1", alone_because="x")
    effects = driver.do(ev.DecodeFailed("r1", 1, "again"))
    assert nodes_of(effects) == [("", "d1")]
    assert ReportBreaker("d0", "decode", "open", "again") in effects
    driver.now += 1.9
    assert nodes_of(driver.request("r2", alone_because="x")) == [("", "d1")]
    driver.now += 0.1
    assert nodes_of(driver.request("r3", alone_because="x")) == [("", "d0")]


@pytest.mark.parametrize("end", [ev.ClientGone("r1"), ev.DecodeRefused("r1", 1, 429)])
def test_a_try_that_says_nothing_is_made_again(end: ev.Event) -> None:
    """Its client left, or the engine refused the request: the next request tries at once."""
    driver = driver_with_open("d0", "d1")
    driver.now += 1.0
    driver.request("r1", alone_because="x")
    driver.do(end)
    assert nodes_of(driver.request("r2", alone_because="x")) == [("", "d0")]


def test_a_request_that_has_failed_once_is_not_used_to_try_a_node() -> None:
    """It goes to a node that is known to serve."""
    driver = driver_with_open("d0", "d1", "d2")
    driver.request("r1", alone_because="x")
    driver.now += 1.0
    effects = driver.do(ev.DecodeFailed("r1", 1, "reset"))
    assert nodes_of(effects) in ([("", "d1")], [("", "d2")])


def test_the_only_decode_node_is_tried_at_a_bounded_rate() -> None:
    """Requests wait instead of failing; each second one of them tries, and one success frees all
    that wait.
    """
    driver = driver_with_open("d0")
    for name in ("r1", "r2", "r3"):
        assert driver.request(name, alone_because="x") == []
    driver.now += 1.0
    assert started(driver.report("d0")) == ["r1"]
    assert started(driver.report("d0")) == []
    driver.now += 1.0
    assert started(driver.report("d0")) == ["r2"]
    assert started(driver.do(ev.FirstDataArrived("r1", 1))) == ["r3"]


def test_with_every_prefill_node_open_the_decode_nodes_compute() -> None:
    """Nobody waits for a prefill node; one request a second tries one."""
    driver = driver_with_open("p0", "d0", opened="p0")
    assert nodes_of(driver.request("r1")) == [("", "d0")]
    driver.now += 1.0
    assert nodes_of(driver.request("r2")) == [("p0", "d0")]
    assert nodes_of(driver.request("r3")) == [("", "d0")]
    effects = driver.do(ev.PrefillAnswered("r2", 1, 200))
    assert effects == [ReportBreaker("p0", "prefill", "closed", "")]
    assert nodes_of(driver.request("r4")) == [("p0", "d0")]


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 501])
def test_no_clients_mistake_changes_a_node(status: int) -> None:
    """Fifty refusals on each kind of leg: nodes are chosen as before."""
    driver = Driver("p0", "d0", "d1", breaker=BREAKER)
    for number in range(50):
        request = f"r{number}"
        driver.request(request)
        driver.do(ev.PrefillAnswered(request, 1, status))
        driver.do(ev.DecodeRefused(request, 1, status))
        if request in driver.core.requests:
            driver.do(ev.DecodeRefused(request, 2, status))
    assert driver.is_idle()
    for name in ("p0", "d0", "d1"):
        node = driver.node(name)
        assert node.prefill_breaker.is_clean
        assert node.decode_breaker.is_clean


def test_neither_clients_that_leave_nor_the_routers_own_faults_count() -> None:
    """And a cancelled leg is never heard of again."""
    driver = Driver("p0", "d0", breaker=BREAKER)
    for number in range(10):
        driver.request(f"r{number}")
        driver.do(ev.ClientGone(f"r{number}"))
        driver.do(ev.DecodeFailed(f"r{number}", 1, "reset"))
        driver.request(f"s{number}")
        driver.do(ev.PrefillFailed(f"s{number}", 1, "a bug", is_engine_fault=False))
        driver.do(ev.DecodeFailed(f"s{number}", 1, "a bug", is_engine_fault=False))
    assert driver.node("p0").prefill_breaker.is_clean
    assert driver.node("d0").decode_breaker.is_clean


def test_no_first_token_in_time_counts_against_who_was_waited_for() -> None:
    """The prefill node while its leg is out, else the decode node; a request that never left the
    queue against nobody.
    """
    driver = Driver(
        "p0", "d0", first_token_deadline_s=4.5, queue_timeout_s=4.5, placement=ONE_AT_A_TIME
    )
    driver.request("r1")
    driver.request("waits")
    driver.pass_time(4.5)
    assert not driver.node("p0").prefill_breaker.is_clean
    assert driver.node("d0").decode_breaker.is_clean
    driver.report("p0")
    driver.report("d0")
    driver.request("r2")
    driver.do(ev.PrefillAnswered("r2", 1, 200))
    driver.pass_time(4.5)
    assert "first_token_deadline_s" in driver.node("d0").decode_breaker.reason


def test_a_new_life_begins_with_a_closed_breaker() -> None:
    """What a dead engine did says nothing about the next one."""
    driver = driver_with_open("d0")
    driver.do(ev.NodeDied("d0", "d0-1", "killed"))
    driver.join("d0", incarnation="d0-2")
    driver.report("d0", incarnation="d0-2")
    assert driver.node("d0").decode_breaker.state is BreakerState.CLOSED
    assert started(driver.request("r1", alone_because="x")) == ["r1"]

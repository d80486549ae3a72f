"""What a request's timeline says of the ways to its legs."""

from __future__ import annotations

from router_stubs.core_story import Driver, ended

from splitserve.orchestrator.core import events as ev


def test_a_request_that_is_placed_at_once_was_not_queued() -> None:
    """Its legs leave when it comes, once."""
    driver = Driver("p0", "d0")
    driver.request("r")
    arrived = driver.now
    driver.pass_time(0.5)
    driver.do(ev.PrefillAnswered("r", 1, 200))
    driver.do(ev.FirstDataArrived("r", 1))
    timeline = ended(driver.do(ev.DecodeEnded("r", 1)))
    assert timeline.queued is None
    assert timeline.first_dispatched == timeline.dispatched == arrived
    assert timeline.redispatched is None


def test_a_request_that_waits_was_queued_when_it_came() -> None:
    """Its legs leave when there is room."""
    driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 0})
    driver.request("first")
    driver.now += 1
    driver.request("r")
    queued = driver.now
    driver.now += 1
    driver.do(ev.PrefillAnswered("first", 1, 200))
    timeline = driver.core.requests["r"].timeline
    assert timeline.queued == queued
    assert timeline.first_dispatched == driver.now


def test_a_prefill_leg_that_failed_is_told_from_the_one_that_did_not() -> None:
    """The first dispatch stays; the one that replaced it is noted too."""
    driver = Driver("p0", "p1", "d0")
    driver.request("r")
    first = driver.now
    driver.now += 1
    driver.do(ev.PrefillFailed("r", 1, "gone"))
    timeline = driver.core.requests["r"].timeline
    assert (timeline.first_dispatched, timeline.redispatched) == (first, driver.now)


def test_a_decode_leg_that_failed_is_told_from_the_one_that_did_not() -> None:
    """Also when both legs begin anew."""
    driver = Driver("p0", "d0", "d1")
    driver.request("r")
    first = driver.now
    driver.now += 1
    driver.do(ev.DecodeFailed("r", 1, "gone"))
    timeline = driver.core.requests["r"].timeline
    assert (timeline.first_dispatched, timeline.redispatched) == (first, driver.now)


def test_what_happens_after_the_first_data_is_no_part_of_the_time_to_it() -> None:
    """A stream that goes on elsewhere, and whose new prefill leg fails too, was dispatched once
    before its first data.
    """
    driver = Driver("p0", "p1", "d0", "d1")
    driver.request("r", can_continue=True)
    first = driver.now
    driver.do(ev.PrefillAnswered("r", 1, 200))
    driver.do(ev.FirstDataArrived("r", 1))
    driver.now += 1
    driver.do(ev.DecodeFailed("r", 1, "gone"))
    timeline = driver.core.requests["r"].timeline
    assert (timeline.continuations, timeline.attempts, timeline.dispatched) == (1, 2, driver.now)
    driver.now += 1
    driver.do(ev.PrefillFailed("r", 2, "gone"))
    assert timeline.attempts == 3
    assert (timeline.first_dispatched, timeline.redispatched) == (first, None)

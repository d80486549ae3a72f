"""What the core orders when a decode node waits too long for a fence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router_stubs.core_story import Driver, description

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import AnnounceDeath, EndEngine
from splitserve.orchestrator.core.fencing import REPEAT_S

if TYPE_CHECKING:
    from splitserve.orchestrator.core.effects import Effect

LIMIT_S = 10.0


def story() -> Driver:
    """Two nodes that are ready."""
    return Driver("p0", "d0", engine_end_limit_s=LIMIT_S)


def overdue(driver: Driver, *writers: str, at: float = 0.0) -> list[Effect]:
    """The decode node reports, so many seconds after the one before."""
    driver.now += at
    return driver.report("d0", quarantined_blocks=4, overdue_writers=writers or ("p0-1",))


def targets(effects: list[Effect]) -> list[tuple[str, str]]:
    """(node, incarnation) of the engines that are to end."""
    return [(e.node, e.incarnation) for e in effects if isinstance(e, EndEngine)]


def test_the_writers_agent_is_to_kill_its_engine() -> None:
    """At once; said again after a while, since an order may be lost with a connection, and counted
    once.
    """
    driver = story()
    reason = "it owes d0 a fence for some of its 4 quarantined blocks"
    assert overdue(driver) == [EndEngine("p0", "p0-1", reason)]
    assert overdue(driver, at=0.5) == []
    assert targets(overdue(driver, at=REPEAT_S)) == [("p0", "p0-1")]
    assert dict(driver.core.fencing.ended) == {"writer": 1, "decode_node": 0}
    effects = driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    assert AnnounceDeath("p0-1") in effects


def test_a_writer_that_fences_meanwhile_starts_anew() -> None:
    """What it owed before does not shorten the next wait."""
    driver = story()
    overdue(driver)
    driver.report("d0")
    assert targets(overdue(driver, at=LIMIT_S)) == [("p0", "p0-1")]


def test_without_a_death_the_decode_node_is_restarted() -> None:
    """The agent of the writer does not report it in time."""
    driver = story()
    overdue(driver)
    (order,) = overdue(driver, at=LIMIT_S)
    assert isinstance(order, EndEngine)
    assert (order.node, order.incarnation) == ("d0", "d0-1")
    assert "its death was not reported within 10 s" in order.reason
    assert dict(driver.core.fencing.ended) == {"writer": 1, "decode_node": 1}


def test_without_the_writers_agent_too() -> None:
    """Nobody can be told, known or not; the agent gets the time to come back."""
    for writer in ("p0-1", "p0-0"):
        driver = story()
        driver.do(ev.NodeDisconnected("p0", "p0-1"))
        assert overdue(driver, writer) == []
        assert overdue(driver, writer, at=LIMIT_S - 1) == []
        assert targets(overdue(driver, writer, at=1)) == [("d0", "d0-1")]


def test_an_agent_that_comes_back_is_told() -> None:
    """Within the time."""
    driver = story()
    driver.do(ev.NodeDisconnected("p0", "p0-1"))
    overdue(driver)
    driver.do(ev.NodeJoined(description("p0"), "prefill"))
    assert targets(overdue(driver, at=1)) == [("p0", "p0-1")]


def test_a_death_that_the_decode_node_has_missed_is_told_again() -> None:
    """Instead of killing anything."""
    driver = story()
    driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    assert overdue(driver) == [AnnounceDeath("p0-1", "d0")]
    assert overdue(driver, at=0.5) == []
    assert overdue(driver, at=REPEAT_S) == [AnnounceDeath("p0-1", "d0")]
    assert overdue(driver, at=2 * LIMIT_S) == [AnnounceDeath("p0-1", "d0")]

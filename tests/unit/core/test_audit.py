"""Differences between what engines report and what the core believes, and who owns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.core_story import Driver

from splitserve.kv_transfer.holdings import (
    LEASED,
    QUARANTINED,
    RECEIVES,
    SENDS,
    WAITS_FOR_PAGES,
    WRITING,
    Holding,
)
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.audit import GRACE_S, QUARANTINE_GRACE_S, REMEDIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.core.audit import Difference

LEASE_S = 30.0
BUSY: dict[str, Any] = {"running": 1, "free_blocks": 90}
IDLE: dict[str, Any] = {"free_blocks": 99}
"""Of 100 blocks one is the null block."""


def holding(side: str, state: str, transfer_id: str = "r1.1", blocks: int = 2) -> Holding:
    """An open transfer of a request ``r1``."""
    return Holding(transfer_id, f"cmpl-{side}", side, state, blocks, 0.0, "p0-1")


class Story:
    """A request on its way, and nodes that report twice a second."""

    def __init__(self) -> None:
        self.driver = Driver("p0", "d0", lease_s=LEASE_S)
        self.reports: dict[str, dict[str, Any]] = {"p0": IDLE, "d0": IDLE}

    def begin(self) -> None:
        """Both legs of ``r1`` are out, and both engines say so."""
        self.driver.request("r1")
        self.reports = {
            "p0": BUSY | {"holdings": (holding(SENDS, WRITING),)},
            "d0": BUSY | {"holdings": (holding(RECEIVES, WAITS_FOR_PAGES),)},
        }

    def finish(self) -> None:
        """It ends well."""
        self.driver.do(ev.PrefillAnswered("r1", 1, 200))
        self.driver.do(ev.FirstDataArrived("r1", 1))
        self.driver.do(ev.DecodeEnded("r1", 1))

    def wait(self, seconds: float) -> list[Difference]:
        """What differs after that time of reports."""
        end = self.driver.now + seconds
        while self.driver.now < end:
            self.driver.now += 0.5
            for node, fields in self.reports.items():
                self.driver.report(node, **fields)
        return self.driver.core.differences(self.driver.now)


def told(differences: list[Difference]) -> list[tuple[str, str, str, int]]:
    """(node, kind, owner, blocks)."""
    return [(d.node, d.kind, d.owner, d.blocks) for d in differences]


def test_nothing_differs_while_a_request_is_computed_and_afterwards() -> None:
    """However long it takes."""
    story = Story()
    assert story.wait(3 * GRACE_S) == []
    story.begin()
    assert story.wait(3 * GRACE_S) == []
    story.finish()
    story.reports = {"p0": IDLE, "d0": IDLE}
    assert story.wait(3 * GRACE_S) == []


def test_a_transfer_of_a_request_that_has_ended() -> None:
    """Its owner is named, and when and how it ended; only after the grace."""
    story = Story()
    story.begin()
    story.wait(1)
    story.finish()
    story.reports["p0"] = IDLE
    story.reports["d0"] = IDLE | {"holdings": (holding(RECEIVES, WAITS_FOR_PAGES),)}
    assert story.wait(GRACE_S) == []
    (found,) = story.wait(1.5)
    assert told([found]) == [("d0", "ended", "r1", 2)]
    assert "request r1 ended 12 s ago (ok)" in found.explanation
    assert GRACE_S < found.since_s < GRACE_S + 2
    story.reports["d0"] = IDLE
    assert story.wait(1) == []


def test_a_lease_is_legitimate_until_it_ends() -> None:
    """After that it is not."""
    story = Story()
    story.begin()
    story.wait(1)
    story.finish()
    story.reports["d0"] = IDLE
    leased = {"leased_blocks": 2, "holdings": (holding(SENDS, LEASED),), "free_blocks": 97}
    story.reports["p0"] = leased
    assert story.wait(LEASE_S + GRACE_S) == []
    assert told(story.wait(2)) == [("p0", "ended", "r1", 2)]


def test_a_transfer_that_its_request_has_left_behind() -> None:
    """The request is computed elsewhere, or has its pages."""
    story = Story()
    story.begin()
    story.driver.do(ev.PrefillAnswered("r1", 1, 200))
    story.driver.do(ev.FirstDataArrived("r1", 1))
    story.reports["d0"] = BUSY
    story.reports["p0"] = IDLE | {"holdings": (holding(SENDS, WRITING),)}
    assert told(story.wait(GRACE_S + 2)) == [("p0", "moved", "r1", 2)]


def test_a_transfer_that_nobody_knows() -> None:
    """As after the router was started again."""
    story = Story()
    stray = holding(SENDS, WRITING, "older-7.1")
    story.reports["p0"] = IDLE | {"holdings": (stray,)}
    assert told(story.wait(GRACE_S + 2)) == [("p0", "unknown", "older-7", 2)]


def test_quarantine_is_shown_soon_with_its_writer() -> None:
    """Whether its request has ended or not."""
    story = Story()
    story.begin()
    story.reports["d0"] = BUSY | {"holdings": (holding(RECEIVES, QUARANTINED),)}
    assert story.wait(QUARANTINE_GRACE_S) == []
    (found,) = story.wait(2)
    assert told([found]) == [("d0", "quarantined", "r1", 2)]
    assert "its writer p0-1 has not fenced transfer r1.1" in found.explanation
    story.driver.do(ev.ClientGone("r1"))
    story.reports["p0"] = IDLE
    story.reports["d0"] = IDLE | {"holdings": (holding(RECEIVES, QUARANTINED),)}
    (found,) = story.wait(1)
    assert told([found]) == [("d0", "quarantined", "r1", 2)]
    assert "(cancelled)" in found.explanation


def test_blocks_of_nobody() -> None:
    """On an engine that computes nothing: what neither leases nor transfers account for."""
    story = Story()
    held = (holding(RECEIVES, WAITS_FOR_PAGES), holding(SENDS, LEASED))
    story.reports["d0"] = {"free_blocks": 92, "leased_blocks": 2, "holdings": held}
    assert ("d0", "blocks", "d0", 3) in told(story.wait(GRACE_S + 2))
    story.reports["d0"] = {"free_blocks": 95, "leased_blocks": 2, "holdings": held}
    assert "blocks" not in [d.kind for d in story.wait(1)]


def test_a_leg_that_the_engine_does_not_know() -> None:
    """Before its first data; an answer that has begun may be complete in the engine."""
    story = Story()
    story.begin()
    story.reports["d0"] = IDLE
    assert told(story.wait(GRACE_S + 2)) == [("d0", "leg", "r1", 3)]
    story.driver.do(ev.PrefillAnswered("r1", 1, 200))
    story.driver.do(ev.FirstDataArrived("r1", 1))
    story.reports["p0"] = IDLE
    assert story.wait(GRACE_S + 2) == []


def test_requests_that_nobody_has_sent() -> None:
    """More than there are legs; a leg of several prompts or answers may be several."""
    story = Story()
    story.begin()
    story.reports["d0"] |= {"waiting": 1}
    assert told(story.wait(GRACE_S + 2)) == [("d0", "requests", "r1", 0)]
    story.driver.do(ev.ClientGone("r1"))
    story.reports = {"p0": IDLE, "d0": BUSY}
    assert told(story.wait(GRACE_S + 2)) == [("d0", "requests", "d0", 0)]
    story.driver.request("r2", alone_because="n is 3")
    story.reports["d0"] = BUSY | {"running": 3}
    assert story.wait(GRACE_S + 2) == []


@pytest.mark.parametrize(
    "silence",
    [
        lambda driver: driver.do(ev.NodeDisconnected("d0", "d0-1")),
        lambda driver: driver.pass_time(5.0),
    ],
    ids=["disconnected", "silent"],
)
def test_a_node_that_says_nothing(silence: Callable[[Driver], Any]) -> None:
    """What it holds is not known: nobody is told that all is well."""
    story = Story()
    story.wait(1)
    del story.reports["d0"]
    silence(story.driver)
    assert told(story.wait(GRACE_S + 2))[-1] == ("d0", "silent", "d0", 0)


def test_promises_that_no_request_has() -> None:
    """A slot that was not given back."""
    story = Story()
    story.driver.node("p0").prefill_legs += 1
    assert told(story.wait(GRACE_S + 2)) == [("p0", "promises", "p0", 0)]


def test_a_new_life_starts_anew() -> None:
    """What the engine before it held is gone with it."""
    story = Story()
    story.reports["p0"] = IDLE | {"holdings": (holding(SENDS, WRITING, "x.1"),)}
    assert len(story.wait(GRACE_S + 2)) == 1
    story.driver.do(ev.NodeDied("p0", "p0-1", "killed"))
    story.driver.join("p0", incarnation="p0-2")
    story.reports["p0"] |= {"incarnation": "p0-2"}
    assert story.wait(GRACE_S - 1) == []


def test_every_kind_says_what_to_do() -> None:
    """In a sentence."""
    assert all(len(remedy) > 10 for remedy in REMEDIES.values())

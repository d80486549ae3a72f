"""The table of a request's life is complete, and the diagram in the docs is the table's."""

from __future__ import annotations

from pathlib import Path

import pytest
from router_stubs.core_story import Driver

from splitserve.orchestrator.core.errors import IllegalTransitionError
from splitserve.orchestrator.core.lifecycle import (
    DEADLINES,
    TRANSITIONS,
    DeadlineKind,
    Phase,
    Trigger,
    render_diagram,
)
from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.router_core import RouterCore

WAITING = [phase for phase in Phase if phase is not Phase.ENDED]
MUST_HANDLE = (
    Trigger.DEADLINE,
    Trigger.CLIENT_GONE,
    Trigger.STOPPING,
    Trigger.PREFILL_NODE_LOST,
    Trigger.DECODE_NODE_LOST,
)


@pytest.mark.parametrize("phase", WAITING, ids=lambda phase: phase.value)
def test_every_waiting_phase_can_be_ended_from_outside(phase: Phase) -> None:
    """Each phase but the last has a deadline and rows for deadline, cancel, stop and the loss of
    either node.
    """
    assert DEADLINES[phase]
    for trigger in MUST_HANDLE:
        assert (phase, trigger) in TRANSITIONS, f"{phase} has no row for {trigger}"


def test_every_deadline_is_a_setting() -> None:
    """Each is armed in some phase, and its name is that of the limit that bounds it."""
    armed = {kind for kinds in DEADLINES.values() for kind in kinds}
    assert armed == set(DeadlineKind) == set(RouterCore(CoreLimits()).deadlines)
    assert all(hasattr(CoreLimits(), kind.value) for kind in DeadlineKind)


def test_the_last_phase_is_the_last() -> None:
    """Nothing leaves the phase ``ended``, and every phase is reachable and can end."""
    assert not [row for row in TRANSITIONS if row[0] is Phase.ENDED]
    reached = {Phase.QUEUED} | {phase for row in TRANSITIONS.values() for phase in row.to}
    assert reached == set(Phase)
    for phase in WAITING:
        assert any(
            Phase.ENDED in row.to for (source, _), row in TRANSITIONS.items() if source is phase
        )


def test_every_action_exists() -> None:
    """The table only names methods that the core has."""
    assert not [
        row for row in TRANSITIONS.values() if not callable(getattr(RouterCore, row.action, None))
    ]


def test_an_illegal_transition_tells_the_story() -> None:
    """What has no row raises an error with the request, its phase, the trigger and its story with
    times.
    """
    driver = Driver("p0", "d0")
    driver.request("r1")
    request = driver.core.requests["r1"]
    driver.now += 0.25
    with pytest.raises(IllegalTransitionError) as caught:
        driver.core._apply(request, Trigger.DECODE_ENDED, driver.now)
    text = str(caught.value)
    for part in (
        "r1",
        "prefilling",
        "decode ended",
        "arrived",
        "placed on a pair",
        "+      0.0 ms",
    ):
        assert part in text


def test_the_diagram_in_the_docs_is_the_table() -> None:
    """docs/request_lifecycle.md shows exactly the rendered table."""
    page = Path(__file__).parents[3] / "docs" / "request_lifecycle.md"
    assert f"```mermaid\n{render_diagram()}```\n" in page.read_text()

"""The tables of a transfer's life are complete, and the diagrams in the docs are the tables'."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from splitserve.kv_transfer import receive_book
from splitserve.kv_transfer.settings import TransferSettings
from splitserve.kv_transfer.transfer_lifecycle import (
    SEND,
    SINK,
    SOURCE,
    TABLES,
    SendState,
    SendTrigger,
    SinkState,
    SourceState,
    Table,
    render_diagram,
)
from splitserve.kv_transfer.transfer_story import STORY_LIMIT_MOVES, IllegalTransferError, Story
from splitserve.orchestrator.config.schema import RouterConfig

if TYPE_CHECKING:
    from enum import Enum

ROWS = [
    pytest.param(table, state, id=f"{table.name}-{state.value}")
    for table in TABLES
    for state in type(table.first)
    if state not in table.last
]
"""Every table with each of its waiting states."""


@pytest.mark.parametrize(("table", "state"), ROWS)
def test_every_waiting_state_can_be_ended_from_outside(table: Table[Any, Any], state: Enum) -> None:
    """It has a deadline with a row for its end, a row for each cancel and for each loss of the
    other side.
    """
    _, deadline = table.deadlines[state]
    for trigger in (deadline, *table.cancels, *table.losses):
        assert (state, trigger) in table.rows, f"{state} has no row for {trigger}"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_deadline_is_a_setting(table: Table[Any, Any]) -> None:
    """What bounds a wait has a name in the configuration or in the book."""
    fields = set(TransferSettings.__struct_fields__)
    known = {f"transfer.{name}" for name in fields}
    known |= {f"router.{name}" for name in RouterConfig.model_fields}
    for setting, _ in table.deadlines.values():
        assert setting in known or hasattr(receive_book, setting)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_what_peers_say_is_never_illegal(table: Table[Any, Any]) -> None:
    """However late or often a message comes, in every state there is a row for it."""
    for state in type(table.first):
        for trigger in table.hearsay:
            assert (state, trigger) in table.rows, f"{state} has no row for {trigger}"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_last_states_are_the_last(table: Table[Any, Any]) -> None:
    """Nothing leaves them, every state is reachable, and every waiting one can end."""
    reached = {table.first} | {to for allowed in table.rows.values() for to in allowed}
    assert reached == set(type(table.first))
    for (state, trigger), allowed in table.rows.items():
        if state in table.last:
            assert allowed == (state,), f"{trigger} leaves {state}"
    ends = set(table.last)
    for _ in type(table.first):
        ends |= {state for (state, _), allowed in table.rows.items() if ends & set(allowed)}
    assert ends == set(type(table.first))


def test_pages_that_may_be_written_are_given_back_only_by_the_writers_end() -> None:
    """A deadline, an abort or a lost connection never ends a source that was granted pages."""
    proofs = {"delivered", "other count delivered", "fenced", "refused", "revoked", "writer dead"}
    for state in (SourceState.GRANTED, SourceState.QUARANTINED):
        leading = {
            trigger.value
            for (source, trigger), allowed in SOURCE.rows.items()
            if source is state and set(allowed) & SOURCE.last
        }
        assert leading == proofs


def test_an_illegal_transfer_tells_the_story() -> None:
    """The error names transfer, attempt, rank, state and trigger, and each move with its time."""
    story = Story("t", 2)
    state = SINK.move(story, SinkState.OFFERED, SendTrigger.TAKEN_UP, SinkState.WRITING, who="d/0")
    story.moment.now = 1.5
    state = SINK.move(
        story, state, SendTrigger.PEER_LOST, SinkState.FENCING, who="d/0", reason="silent"
    )
    with pytest.raises(IllegalTransferError) as caught:
        SINK.move(story, state, SendTrigger.ALL_WRITTEN, SinkState.DELIVERED, who="d/0")
    assert str(caught.value) == (
        "transfer t, attempt 2 (d/0) in state 'fencing' cannot become 'delivered' by 'all written';"
        " its story:\n"
        "  +      0.0 ms  d/0: offered -> writing, taken up\n"
        "  +   1500.0 ms  d/0: writing -> fencing, peer lost (silent)"
    )


def test_a_row_names_where_its_trigger_may_lead() -> None:
    """Another state than the row's is as illegal as no row."""
    with pytest.raises(IllegalTransferError, match="nothing has happened to it yet"):
        SEND.move(Story("t"), SendState.OPEN, SendTrigger.COMPUTED, SendState.RELEASED)


def test_what_is_ignored_leaves_no_trace() -> None:
    """A late message changes neither the state nor the story."""
    story = Story("t")
    state = SINK.move(story, SinkState.ENDED, SendTrigger.CANCELLED, SinkState.FENCING)
    assert state is SinkState.ENDED
    assert not story.moves


def test_a_story_is_bounded() -> None:
    """The latest moves are kept."""
    story = Story("t")
    for number in range(STORY_LIMIT_MOVES + 3):
        SINK.move(
            story, SinkState.WRITING, SendTrigger.GIVEN_UP, SinkState.FENCING, reason=str(number)
        )
    assert len(story.moves) == STORY_LIMIT_MOVES
    assert story.moves[0].reason == "3"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_diagrams_in_the_docs_are_the_tables(table: Table[Any, Any]) -> None:
    """docs/transfer_lifecycle.md shows exactly the rendered tables."""
    page = Path(__file__).parents[3] / "docs" / "transfer_lifecycle.md"
    assert f"```mermaid\n{render_diagram(table)}```\n" in page.read_text()

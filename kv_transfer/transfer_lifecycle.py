"""The life of a transfer as tables: in which state what may happen, and where it can lead.

The receiving side has a *session* per attempt (the request whose pages are reserved) and in it a
*source* per prefill rank. The sending side has a *session* per transfer (the request whose prompt
is computed) and in it a *sink* per decode rank's grant. Four tables, and one door: ``Table.move``.

A row that leads nowhere else is *ignored*: what peers say may be late or repeated, and what the
engine and the router say may cross it. What has no row is a broken promise of our own, and raises
``IllegalTransferError`` with the transfer's story.

The tables know nothing about pages or time. Moves are per transfer and rank, never per page.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from splitserve.kv_transfer.transfer_story import IllegalTransferError, Move, Story

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

State = TypeVar("State", bound=Enum)
Trigger = TypeVar("Trigger", bound=Enum)


class SourceState(Enum):
    """Where one prefill rank of a receive stands."""

    UNKNOWN = "unknown"
    """Not introduced yet: nothing is granted, it can be forgotten at once."""
    ABSENT = "absent"
    """It holds no head of ours."""
    GRANTED = "granted"
    """It may write, and what it writes is wanted."""
    QUARANTINED = "quarantined"
    """It may still write; nobody wants it, and the pages wait for its end."""
    DELIVERED = "delivered"
    ENDED = "ended"
    """It will not write (fenced, dead, revoked), and not everything has arrived."""

    __hash__ = object.__hash__


class ReceiveState(Enum):
    """Where one attempt of a receive stands."""

    AWAITED = "awaited"
    FENCING = "fencing"
    """Not wanted any more; somebody may still write."""
    HELD = "held"
    """Nobody may write; the pages are kept for a writer that the router may yet name."""
    HANDED_ON = "handed on"
    """The same pages belong to the next attempt."""
    LANDED = "landed"
    FAILED = "failed"

    __hash__ = object.__hash__


class ReceiveTrigger(Enum):
    """What can happen to a receive."""

    GRANTED = "granted"
    NO_SHARED_HEAD = "no shared head"
    DELIVERED = "delivered"
    MISCOUNTED = "other count delivered"
    FENCED = "fenced"
    REFUSED = "refused"
    REVOKED = "revoked"
    WRITER_DEAD = "writer dead"
    WRITER_RESTARTED = "writer restarted"
    CONNECTION_LOST = "connection lost"
    TURNED_AWAY = "turned away"
    OTHER_RANK_ENDED = "other rank ended"
    CANCELLED = "engine abort"
    GIVEN_UP = "given up"
    RETARGETED = "retargeted"
    DEADLINE = "deadline"
    FENCE_ASKED = "fence asked again"
    SETTLED = "nobody may write"

    __hash__ = object.__hash__


class SinkState(Enum):
    """Where one decode rank's grant stands."""

    OFFERED = "offered"
    """It waits: for its request, or for the fence of the attempt before it."""
    WRITING = "writing"
    FENCING = "fencing"
    """Nothing more is written; open writes still have to end."""
    DELIVERED = "delivered"
    """Everything is written; the decode rank has not said that it landed."""
    ENDED = "ended"

    __hash__ = object.__hash__


class SendState(Enum):
    """Where one request that is prefilled for a peer stands."""

    OPEN = "open"
    """The engine computes it."""
    LEASED = "leased"
    """Computed; its blocks are held for who may still ask for them."""
    ABORTED = "aborted"
    """The engine gave it up; its blocks are held until no write reads them."""
    RELEASED = "released"

    __hash__ = object.__hash__


class SendTrigger(Enum):
    """What can happen to a send."""

    TAKEN_UP = "taken up"
    MISFIT = "does not fit"
    GRANTED_AGAIN = "granted again"
    SUPERSEDED = "newer attempt"
    ALL_WRITTEN = "all written"
    WRITE_FAILED = "write failed"
    WRITES_ENDED = "writes ended"
    LANDED = "landed"
    CANCELLED = "peer wants a fence"
    PEER_LOST = "peer lost"
    GIVEN_UP = "given up"
    COMPUTED = "computed"
    ABORTED = "engine abort"
    LEASE_OVER = "lease over"
    SETTLED = "nothing owed"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Table(Generic[State, Trigger]):
    """The rows of one kind of record. All its changes of state go through ``move``."""

    name: str
    first: State
    last: frozenset[State]
    """Nothing leaves these."""
    rows: Mapping[tuple[State, Trigger], tuple[State, ...]]
    """Where each trigger can lead; the state itself alone means that it is ignored."""
    deadlines: Mapping[State, tuple[str, Trigger]]
    """Per waiting state the setting that bounds the wait, and what its end is."""
    cancels: frozenset[Trigger]
    """What says that nobody wants it any more; each waiting state has a row for each."""
    losses: frozenset[Trigger]
    """What says that the other side is gone; each waiting state has a row for each."""
    hearsay: frozenset[Trigger]
    """What peers say, which may be late or repeated: every state has a row for each."""

    def move(
        self,
        story: Story,
        state: State,
        trigger: Trigger,
        to: State,
        *,
        who: str = "",
        reason: str = "",
    ) -> State:
        """The state after ``trigger``, which is ``to`` unless it is ignored in this state. Raises
        ``IllegalTransferError`` where the table does not allow it.
        """
        allowed = self.rows.get((state, trigger), ())
        if to in allowed:
            if to is not state:
                moved = Move(story.moment.now, who, trigger.value, state.value, to.value, reason)
                story.moves.append(moved)
            return to
        if allowed == (state,):
            return state
        raise IllegalTransferError(story, who, state, trigger, to)


def _rows(
    state: State, *moves: tuple[Trigger, State | tuple[State, ...]], ignored: Iterable[Trigger] = ()
) -> dict[tuple[State, Trigger], tuple[State, ...]]:
    """The rows of one state: where triggers lead, and those that are ignored."""
    rows: dict[tuple[State, Trigger], tuple[State, ...]] = {
        (state, trigger): (state,) for trigger in ignored
    }
    for trigger, to in moves:
        assert (state, trigger) not in rows, f"two rows for {trigger} in {state}"
        rows[state, trigger] = to if isinstance(to, tuple) else (to,)
    return rows


_S, _R, _T = SourceState, ReceiveState, ReceiveTrigger
_UNWANTED = (
    _T.CANCELLED,
    _T.GIVEN_UP,
    _T.RETARGETED,
    _T.DEADLINE,
    _T.CONNECTION_LOST,
    _T.TURNED_AWAY,
    _T.WRITER_RESTARTED,
    _T.OTHER_RANK_ENDED,
)
"""Ends the wait for the whole session; who was granted pages may still write."""
_WRITES_NO_MORE = (_T.FENCED, _T.REFUSED, _T.WRITER_DEAD)
_AFTERWARDS = (
    *_UNWANTED,
    *_WRITES_NO_MORE,
    _T.DELIVERED,
    _T.MISCOUNTED,
    _T.REVOKED,
    _T.FENCE_ASKED,
)

SOURCE: Final = Table(
    name="source",
    first=_S.UNKNOWN,
    last=frozenset({_S.ABSENT, _S.DELIVERED, _S.ENDED}),
    rows={
        **_rows(
            _S.UNKNOWN,
            (_T.GRANTED, _S.GRANTED),
            (_T.NO_SHARED_HEAD, _S.ABSENT),
            *((trigger, _S.ENDED) for trigger in (*_UNWANTED, *_WRITES_NO_MORE)),
            ignored=(_T.DELIVERED, _T.MISCOUNTED),
        ),
        **_rows(
            _S.GRANTED,
            (_T.DELIVERED, _S.DELIVERED),
            *((trigger, _S.ENDED) for trigger in (*_WRITES_NO_MORE, _T.MISCOUNTED, _T.REVOKED)),
            *((trigger, _S.QUARANTINED) for trigger in _UNWANTED),
        ),
        **_rows(
            _S.QUARANTINED,
            (_T.DELIVERED, _S.DELIVERED),
            *((trigger, _S.ENDED) for trigger in (*_WRITES_NO_MORE, _T.MISCOUNTED, _T.REVOKED)),
            ignored=(*_UNWANTED, _T.FENCE_ASKED),
        ),
        **_rows(_S.ABSENT, ignored=_AFTERWARDS),
        **_rows(_S.DELIVERED, ignored=_AFTERWARDS),
        **_rows(_S.ENDED, ignored=_AFTERWARDS),
    },
    deadlines={
        _S.UNKNOWN: ("transfer.deadline_s", _T.DEADLINE),
        _S.GRANTED: ("transfer.deadline_s", _T.DEADLINE),
        _S.QUARANTINED: ("FENCE_INTERVAL_S", _T.FENCE_ASKED),
    },
    cancels=frozenset({_T.CANCELLED, _T.GIVEN_UP, _T.RETARGETED}),
    losses=frozenset({_T.WRITER_DEAD, _T.CONNECTION_LOST, _T.WRITER_RESTARTED}),
    hearsay=frozenset({_T.DELIVERED, _T.MISCOUNTED, _T.FENCED, _T.REFUSED}),
)
"""One prefill rank of a receive. A quarantined source is asked for its fence again and again: only
its fence, its proven death or the transport's revocation gives the pages back.
"""

_OF_THE_SESSION = (*_UNWANTED, _T.WRITER_DEAD)

RECEIVE: Final = Table(
    name="receive",
    first=_R.AWAITED,
    last=frozenset({_R.HANDED_ON, _R.LANDED, _R.FAILED}),
    rows={
        **_rows(
            _R.AWAITED,
            *((trigger, _R.FENCING) for trigger in _OF_THE_SESSION),
            (_T.SETTLED, (_R.LANDED, _R.HELD, _R.FAILED)),
        ),
        **_rows(
            _R.FENCING,
            (_T.SETTLED, (_R.HELD, _R.HANDED_ON, _R.FAILED)),
            ignored=(*_OF_THE_SESSION, _T.FENCE_ASKED),
        ),
        **_rows(
            _R.HELD,
            (_T.SETTLED, (_R.HANDED_ON, _R.FAILED)),
            ignored=(*_OF_THE_SESSION, _T.FENCE_ASKED),
        ),
    },
    deadlines={
        _R.AWAITED: ("transfer.deadline_s", _T.DEADLINE),
        _R.FENCING: ("FENCE_INTERVAL_S", _T.FENCE_ASKED),
        _R.HELD: ("transfer.retarget_wait_s", _T.SETTLED),
    },
    cancels=frozenset({_T.CANCELLED, _T.GIVEN_UP, _T.RETARGETED}),
    losses=frozenset({_T.WRITER_DEAD, _T.CONNECTION_LOST, _T.WRITER_RESTARTED}),
    hearsay=frozenset(),
)
"""One attempt of a receive. What ends the wait for it is remembered; it leaves ``fencing`` only
when every source has settled, and ``held`` when a writer is named, nobody waits, or the time is up.
"""

_K, _Q, _U = SinkState, SendState, SendTrigger
_STOPS_WRITING = (
    _U.CANCELLED,
    _U.SUPERSEDED,
    _U.PEER_LOST,
    _U.GIVEN_UP,
    _U.ABORTED,
    _U.LEASE_OVER,
)
_LATE = (_U.GRANTED_AGAIN, _U.LANDED)

SINK: Final = Table(
    name="sink",
    first=_K.OFFERED,
    last=frozenset({_K.ENDED}),
    rows={
        **_rows(
            _K.OFFERED,
            (_U.TAKEN_UP, _K.WRITING),
            *((trigger, _K.ENDED) for trigger in (*_STOPS_WRITING, _U.MISFIT)),
            ignored=_LATE,
        ),
        **_rows(
            _K.WRITING,
            (_U.ALL_WRITTEN, _K.DELIVERED),
            *((trigger, _K.FENCING) for trigger in (*_STOPS_WRITING, _U.WRITE_FAILED)),
            ignored=_LATE,
        ),
        **_rows(
            _K.FENCING,
            (_U.WRITES_ENDED, _K.ENDED),
            ignored=(*_STOPS_WRITING, _U.WRITE_FAILED, *_LATE),
        ),
        **_rows(
            _K.DELIVERED,
            (_U.LANDED, _K.ENDED),
            (_U.CANCELLED, _K.ENDED),
            (_U.SUPERSEDED, _K.ENDED),
            (_U.PEER_LOST, _K.ENDED),
            (_U.LEASE_OVER, _K.ENDED),
            ignored=(_U.GIVEN_UP, _U.ABORTED, _U.GRANTED_AGAIN),
        ),
        **_rows(_K.ENDED, ignored=(*_STOPS_WRITING, *_LATE)),
    },
    deadlines={
        _K.OFFERED: ("transfer.lease_s", _U.LEASE_OVER),
        _K.WRITING: ("transfer.lease_s", _U.LEASE_OVER),
        _K.FENCING: ("transfer.peer_silence_s", _U.WRITES_ENDED),
        _K.DELIVERED: ("transfer.lease_s", _U.LEASE_OVER),
    },
    cancels=frozenset({_U.CANCELLED, _U.GIVEN_UP, _U.ABORTED}),
    losses=frozenset({_U.PEER_LOST}),
    hearsay=frozenset({_U.CANCELLED, _U.SUPERSEDED, _U.GRANTED_AGAIN, _U.LANDED}),
)
"""One decode rank's grant. The lease runs from the request's end; while the engine computes it, its
own deadline bounds the wait. A peer to which no write ends is given up, which ends its writes.
"""

SEND: Final = Table(
    name="send",
    first=_Q.OPEN,
    last=frozenset({_Q.RELEASED}),
    rows={
        **_rows(
            _Q.OPEN,
            (_U.COMPUTED, _Q.LEASED),
            (_U.ABORTED, _Q.ABORTED),
            ignored=(_U.GIVEN_UP, _U.PEER_LOST),
        ),
        **_rows(
            _Q.LEASED,
            (_U.SETTLED, _Q.RELEASED),
            ignored=(_U.GIVEN_UP, _U.ABORTED, _U.PEER_LOST, _U.LEASE_OVER),
        ),
        **_rows(
            _Q.ABORTED,
            (_U.SETTLED, _Q.RELEASED),
            ignored=(_U.GIVEN_UP, _U.ABORTED, _U.PEER_LOST, _U.LEASE_OVER),
        ),
    },
    deadlines={
        _Q.OPEN: ("router.request_deadline_s", _U.ABORTED),
        _Q.LEASED: ("transfer.lease_s", _U.LEASE_OVER),
        _Q.ABORTED: ("transfer.lease_s", _U.LEASE_OVER),
    },
    cancels=frozenset({_U.GIVEN_UP, _U.ABORTED}),
    losses=frozenset({_U.PEER_LOST}),
    hearsay=frozenset(),
)
"""One request that is prefilled for a peer. What is ignored here ends its sinks; the session
follows when nothing is owed to any of them.
"""


TABLES: Final = (RECEIVE, SOURCE, SEND, SINK)


def render_diagram(table: Table[State, Trigger]) -> str:
    """The table as a Mermaid state diagram, one arrow per pair of states."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, trigger), allowed in table.rows.items():
        for to in allowed:
            if to is not state:
                arrows.setdefault((state, to), []).append(trigger.value)
    states = {state for state, _ in table.rows} | table.last
    spaced = [s for s in type(table.first) if s in states and " " in s.value]
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{state.value}" as {_name(state)}' for state in spaced]
    lines.append(f"    [*] --> {_name(table.first)}")
    for (state, to), triggers in arrows.items():
        lines.append(f"    {_name(state)} --> {_name(to)}: {', '.join(triggers)}")
    lines += [f"    {_name(state)} --> [*]" for state in type(table.first) if state in table.last]
    return "\n".join(lines) + "\n"


def _name(state: Enum) -> str:
    return str(state.value).replace(" ", "_")

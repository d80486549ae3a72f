"""The life of a request as a table: in which phase what may happen, what is done, and where it can
lead.

A pair of legs is out from ``PREFILLING`` on. ``LANDING`` means that the prefill engine has answered
but the decode engine is still silent; ``ALONE`` that the decode engine computes the prompt itself,
from the start or because the prefill leg failed; ``TAIL`` that the client has its whole answer
while the prefill engine's own answer (its sampled token, which nobody needs) is still out and keeps
its slot.

A stream whose decode node fails goes through the first phases again, behind what the client has.

The table knows nothing about nodes or time; the actions it names are methods of ``RouterCore``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Phase(Enum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    LANDING = "landing"
    ALONE = "alone"
    STREAMING = "streaming"
    TAIL = "tail"
    ENDED = "ended"

    __hash__ = object.__hash__


class Trigger(Enum):
    """What can happen to a request."""

    PLACED_PAIR = "placed on a pair"
    PLACED_ALONE = "placed on a decode node"
    PREFILL_ANSWERED = "prefill answered"
    PREFILL_FAILED = "prefill failed"
    FIRST_DATA = "first data"
    DECODE_REFUSED = "decode refused"
    DECODE_FAILED = "decode failed"
    DECODE_ENDED = "decode ended"
    PREFILL_NODE_LOST = "prefill node lost"
    DECODE_NODE_LOST = "decode node lost"
    PREFILL_NODE_SILENT = "prefill node silent"
    DECODE_NODE_SILENT = "decode node silent"
    DISPLACED = "displaced"
    CLIENT_GONE = "client gone"
    DEADLINE = "deadline"
    STOPPING = "router stopping"

    __hash__ = object.__hash__


class DeadlineKind(Enum):
    """Which wait a deadline ends."""

    QUEUE = "queue_timeout_s"
    FIRST_TOKEN = "first_token_deadline_s"
    REQUEST = "request_deadline_s"

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Row:
    """What is done, and the phases in which that can end."""

    action: str
    to: tuple[Phase, ...]


_P, _T = Phase, Trigger
_RESTARTED = (_P.PREFILLING, _P.ALONE, _P.QUEUED)
_RETRIED = (*_RESTARTED, _P.LANDING, _P.ENDED)

DEADLINES: Final[dict[Phase, tuple[DeadlineKind, ...]]] = {
    _P.QUEUED: (DeadlineKind.QUEUE, DeadlineKind.REQUEST),
    _P.PREFILLING: (DeadlineKind.FIRST_TOKEN, DeadlineKind.REQUEST),
    _P.LANDING: (DeadlineKind.FIRST_TOKEN, DeadlineKind.REQUEST),
    _P.ALONE: (DeadlineKind.FIRST_TOKEN, DeadlineKind.REQUEST),
    _P.STREAMING: (DeadlineKind.REQUEST,),
    _P.TAIL: (DeadlineKind.REQUEST,),
}
"""The waits of each phase. The first token's deadline counts for streamed answers only."""


def _before_first_data(phase: Phase) -> dict[tuple[Phase, Trigger], Row]:
    """Rows that the three phases with a silent decode leg share."""
    return {
        (phase, _T.FIRST_DATA): Row("relay", (_P.STREAMING,)),
        (phase, _T.DECODE_REFUSED): Row("weigh_refusal", _RETRIED),
        (phase, _T.DECODE_FAILED): Row("retry_decode", _RETRIED),
        (phase, _T.DECODE_NODE_LOST): Row("retry_decode", _RETRIED),
        (phase, _T.DECODE_NODE_SILENT): Row("leave_silent_decode", (phase, *_RETRIED)),
        (phase, _T.CLIENT_GONE): Row("cancel", (_P.ENDED,)),
        (phase, _T.DEADLINE): Row("answer_too_late", (_P.ENDED,)),
        (phase, _T.STOPPING): Row("answer_stopping", (_P.ENDED,)),
    }


TRANSITIONS: Final[dict[tuple[Phase, Trigger], Row]] = {
    (_P.QUEUED, _T.PLACED_PAIR): Row("start_pair", (_P.PREFILLING,)),
    (_P.QUEUED, _T.PLACED_ALONE): Row("start_alone", (_P.ALONE,)),
    (_P.QUEUED, _T.PREFILL_NODE_LOST): Row("stay", (_P.QUEUED,)),
    (_P.QUEUED, _T.DECODE_NODE_LOST): Row("check_pool", (_P.QUEUED, _P.ENDED)),
    (_P.QUEUED, _T.PREFILL_NODE_SILENT): Row("stay", (_P.QUEUED,)),
    (_P.QUEUED, _T.DECODE_NODE_SILENT): Row("check_pool", (_P.QUEUED, _P.ENDED)),
    (_P.QUEUED, _T.DISPLACED): Row("answer_full", (_P.ENDED,)),
    (_P.QUEUED, _T.CLIENT_GONE): Row("cancel", (_P.ENDED,)),
    (_P.QUEUED, _T.DEADLINE): Row("answer_no_capacity", (_P.ENDED,)),
    (_P.QUEUED, _T.STOPPING): Row("answer_stopping", (_P.ENDED,)),
    **_before_first_data(_P.PREFILLING),
    (_P.PREFILLING, _T.PREFILL_ANSWERED): Row("release_prefill", (_P.LANDING,)),
    (_P.PREFILLING, _T.PREFILL_FAILED): Row("retry_prefill", (_P.PREFILLING, _P.ALONE)),
    (_P.PREFILLING, _T.PREFILL_NODE_LOST): Row("retry_prefill", (_P.PREFILLING, _P.ALONE)),
    (_P.PREFILLING, _T.PREFILL_NODE_SILENT): Row("leave_silent_prefill", _RESTARTED),
    **_before_first_data(_P.LANDING),
    (_P.LANDING, _T.PREFILL_NODE_LOST): Row("retry_prefill", (_P.PREFILLING, _P.ALONE)),
    (_P.LANDING, _T.PREFILL_NODE_SILENT): Row("leave_silent_prefill", (_P.LANDING, *_RESTARTED)),
    **_before_first_data(_P.ALONE),
    (_P.ALONE, _T.PREFILL_NODE_LOST): Row("stay", (_P.ALONE,)),
    (_P.ALONE, _T.PREFILL_NODE_SILENT): Row("stay", (_P.ALONE,)),
    (_P.STREAMING, _T.PREFILL_ANSWERED): Row("release_prefill", (_P.STREAMING,)),
    (_P.STREAMING, _T.PREFILL_FAILED): Row("release_prefill", (_P.STREAMING,)),
    (_P.STREAMING, _T.PREFILL_NODE_LOST): Row("release_prefill", (_P.STREAMING,)),
    (_P.STREAMING, _T.DECODE_ENDED): Row("finish", (_P.TAIL, _P.ENDED)),
    (_P.STREAMING, _T.DECODE_FAILED): Row("continue_stream", (*_RESTARTED, _P.ENDED)),
    (_P.STREAMING, _T.DECODE_NODE_LOST): Row("continue_stream", (*_RESTARTED, _P.ENDED)),
    (_P.STREAMING, _T.PREFILL_NODE_SILENT): Row("stay", (_P.STREAMING,)),
    (_P.STREAMING, _T.DECODE_NODE_SILENT): Row("doubt_stream", (_P.STREAMING,)),
    (_P.STREAMING, _T.CLIENT_GONE): Row("cancel", (_P.ENDED,)),
    (_P.STREAMING, _T.DEADLINE): Row("answer_too_late", (_P.ENDED,)),
    (_P.STREAMING, _T.STOPPING): Row("answer_stopping", (_P.ENDED,)),
    (_P.TAIL, _T.PREFILL_ANSWERED): Row("end_tail", (_P.ENDED,)),
    (_P.TAIL, _T.PREFILL_FAILED): Row("end_tail", (_P.ENDED,)),
    (_P.TAIL, _T.PREFILL_NODE_LOST): Row("end_tail", (_P.ENDED,)),
    (_P.TAIL, _T.DECODE_NODE_LOST): Row("stay", (_P.TAIL,)),
    (_P.TAIL, _T.PREFILL_NODE_SILENT): Row("stay", (_P.TAIL,)),
    (_P.TAIL, _T.DECODE_NODE_SILENT): Row("stay", (_P.TAIL,)),
    (_P.TAIL, _T.CLIENT_GONE): Row("stay", (_P.TAIL,)),
    (_P.TAIL, _T.DEADLINE): Row("end_tail", (_P.ENDED,)),
    (_P.TAIL, _T.STOPPING): Row("end_tail", (_P.ENDED,)),
}


def render_diagram() -> str:
    """The table as a Mermaid state diagram, one arrow per pair of phases."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, trigger), row in TRANSITIONS.items():
        for target in row.to:
            if target is not phase:
                arrows.setdefault((phase, target), []).append(trigger.value)
    lines = ["stateDiagram-v2", "    [*] --> queued"]
    for (source, target), triggers in arrows.items():
        lines.append(f"    {source.value} --> {target.value}: {', '.join(triggers)}")
    lines.append("    ended --> [*]")
    return "\n".join(lines) + "\n"

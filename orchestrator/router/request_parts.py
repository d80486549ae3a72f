"""Where a request's time went, as parts that follow each other and add up. Pure.

What engines say of a transfer may be missing, late, out of order or of a clock that runs a little
beside the router's: a moment never lies before the one that it follows, nor behind the first data
or the end. So parts are never negative, and always add up.
"""

from __future__ import annotations

from typing import NamedTuple

PARTS = (
    "queue",
    "retry",
    "reserve",
    "prefill",
    "transfer_exposed",
    "first_step",
    "answer",
    "decode",
)
"""In the order in which they happen; a request has some of them.

``queue``: until its legs first left. ``retry``: until those left that replaced failed ones.
``reserve``: until the prefill engine began with the prompt; meanwhile the decode node reserves
pages. ``prefill``: until the prompt's last layer was computed, or until the first data where
nothing was transferred. ``transfer_exposed``: until the pages had landed. ``first_step``: until the
first data. ``answer``: all of an unstreamed answer whose prompt no other node has computed.
``decode``: the rest of the answer, of an unstreamed one all of it.
"""


class Moments(NamedTuple):
    """Seconds of one clock; None for what did not happen or is not known."""

    received: float
    ended: float
    """When the client had its last byte, or its request was over otherwise."""
    is_streaming: bool
    dispatched: float | None = None
    redispatched: float | None = None
    prefill_started: float | None = None
    prefill_ended: float | None = None
    landed: float | None = None
    first_data: float | None = None


def parts_of(moments: Moments) -> dict[str, float]:
    """Milliseconds of each part, in their order. All of them add up to the whole time; of a
    streamed answer, those before ``decode`` add up to the time to the first data.
    """
    received = moments.received
    end_ms = max(0.0, after(moments.ended, received))
    limit_ms = end_ms
    if moments.is_streaming and moments.first_data is not None:
        limit_ms = min(end_ms, max(0.0, after(moments.first_data, received)))
    parts: dict[str, float] = {}
    at = 0.0
    for name, moment in _marks(moments):
        if moment is None:
            parts[name] = round(end_ms - at, 3)
            return parts
        until = min(max(after(moment, received), at), limit_ms)
        parts[name] = round(until - at, 3)
        at = until
    parts["decode"] = round(end_ms - at, 3)
    return parts


def _marks(moments: Moments) -> list[tuple[str, float | None]]:
    """(part, when it ended); None for the part in which the request ended."""
    marks = [("queue", moments.dispatched)]
    if moments.dispatched is None:
        return marks
    if moments.redispatched is not None:
        marks.append(("retry", moments.redispatched))
    if moments.landed is None:
        # Who computed the prompt is not known, and of an unstreamed answer not when.
        is_told = moments.is_streaming
        marks.append(("prefill", moments.first_data) if is_told else ("answer", None))
        return marks
    if moments.prefill_started is not None:
        marks.append(("reserve", moments.prefill_started))
    if moments.prefill_ended is not None:
        marks.append(("prefill", moments.prefill_ended))
        marks.append(("transfer_exposed", moments.landed))
    else:
        marks.append(("prefill", moments.landed))
    if moments.is_streaming:
        marks.append(("first_step", moments.first_data))
    return marks


def overlap_of(
    first_write: float | None, prefill_ended: float | None, landed: float | None
) -> tuple[float | None, float | None]:
    """(hidden, exposed) milliseconds of a transfer that has landed: how long pages travelled while
    the prompt was still being computed, and how long they were waited for after that.
    """
    if prefill_ended is None or landed is None:
        return None, None
    exposed_ms = max(0.0, after(landed, prefill_ended))
    if first_write is None:
        return 0.0, exposed_ms
    return max(0.0, after(min(prefill_ended, landed), first_write)), exposed_ms


def after(moment: float, start: float) -> float:
    """Milliseconds, to the microsecond."""
    return round((moment - start) * 1000, 3)

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
    (received, ended, is_streaming, dispatched, redispatched, started, computed, landed, first) = (
        moments
    )
    at, limit = received, max(ended, received)
    if is_streaming and first is not None:
        limit = min(limit, max(first, received))
    parts: dict[str, float] = {}
    so_far_us = 0

    def until(part: str, moment: float | None) -> bool:
        """The part ends then; with None it is the one in which the request ended."""
        nonlocal at, so_far_us
        if moment is None:
            at = max(ended, received)
        elif moment > at:
            at = min(moment, limit)
        until_us = round((at - received) * 1e6)
        parts[part] = (until_us - so_far_us) / 1000
        so_far_us = until_us
        return moment is not None

    if not until("queue", dispatched):
        return parts
    if redispatched is not None:
        until("retry", redispatched)
    if landed is not None:
        if started is not None:
            until("reserve", started)
        if computed is not None:
            until("prefill", computed)
            until("transfer_exposed", landed)
        else:
            until("prefill", landed)
        if is_streaming and not until("first_step", first):
            return parts
    elif not is_streaming:
        # Who computed the prompt is not known, nor when.
        until("answer", None)
        return parts
    elif not until("prefill", first):
        return parts
    until("decode", None)
    return parts


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
    return round((moment - start) * 1e6) / 1000

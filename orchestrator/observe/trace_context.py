"""Which trace a request belongs to: W3C Trace Context, as far as the request's own path pays for
it.

https://www.w3.org/TR/trace-context/. The spans that the router makes for one request have ids that
differ in the last two digits only, so they can be made when the request has ended, and both legs
carry the right ones before any span exists. Knows no OpenTelemetry and no clock.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from random import Random

TRACE_ID_BYTES = 16
STEM_BYTES = 7
"""Of a span's id, beside the last byte."""

SERVER: Final = "00"
"""Last two digits of the span of the whole request."""
QUEUE: Final = "01"
"""Of its wait in the router's queue."""
PREFILL_LEG: Final = "02"
DECODE_LEG: Final = "03"

_SAMPLED, _NOT_SAMPLED = "-01", "-00"
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class TraceContext(NamedTuple):
    """One request's place in its trace."""

    head: str
    """``00-``, the trace's id, ``-`` and the digits that the ids of the router's spans begin with.
    """
    parent: str
    """The caller's span; empty where the trace begins here."""
    tail: str
    """``-01`` when spans are to be made, else ``-00``."""

    @property
    def is_sampled(self) -> bool:
        """Whether spans are made of this request."""
        return self.tail == _SAMPLED

    def traceparent(self, span: str) -> str:
        """The header that makes the receiver's spans children of ``span``."""
        return self.head + span + self.tail


UNTRACED: Final = TraceContext(f"00-{'0' * 31}1-{'0' * 13}1", "", _NOT_SAMPLED)
"""Of every request that begins a trace of which no spans are made: the engines are told to make
none either, and ids of their own would be of no use to anybody.
"""


def traceparent_of(place: TraceContext | None, span: str) -> str:
    """For those who make spans below ``span``; empty when nobody wants any."""
    return place.traceparent(span) if place is not None and place.is_sampled else ""


class TraceIds:
    """Gives each request its place. ``sample_ratio`` is for those that bring none."""

    def __init__(self, sample_ratio: float, random: Random) -> None:
        self._bound = round(sample_ratio * 2**64)
        self._random = random

    def place_of(self, traceparent: bytes | None) -> TraceContext:
        """Where a request with that header belongs: below its caller's span, sampled as the caller
        says, or in a trace of its own. A header that is none counts as missing.
        """
        if traceparent is not None and (found := parse_traceparent(traceparent)) is not None:
            trace_id, parent, is_sampled = found
            head = f"00-{trace_id}-{self._random.randbytes(STEM_BYTES).hex()}"
            return TraceContext(head, parent, _SAMPLED if is_sampled else _NOT_SAMPLED)
        # As OpenTelemetry's own sampler decides, so that all who see the trace id agree
        low = self._random.getrandbits(64)
        if low >= self._bound:
            return UNTRACED
        digits = self._random.randbytes(TRACE_ID_BYTES - 8 + STEM_BYTES).hex()
        return TraceContext(f"00-{digits[:16]}{low:016x}-{digits[16:]}", "", _SAMPLED)


def parse_traceparent(header: bytes) -> tuple[str, str, bool] | None:
    """(trace id, span id, whether it is sampled); None for what is no ``traceparent``."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None or (found[5] is not None and found[1] == b"00"):
        return None
    return found[2].decode(), found[3].decode(), bool(int(found[4], 16) & 1)

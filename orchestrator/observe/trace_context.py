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

SERVER: Final = b"00"
"""Last two digits of the span of the whole request."""
QUEUE: Final = b"01"
"""Of its wait in the router's queue."""
PREFILL_LEG: Final = b"02"
DECODE_LEG: Final = b"03"

_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class TraceContext(NamedTuple):
    """One request's place in its trace. Hexadecimal digits."""

    trace_id: bytes
    stem: bytes
    """The first fourteen digits of the ids of the router's spans."""
    parent: bytes
    """The caller's span; empty where the trace begins here."""
    flags: bytes
    """``01`` when spans are to be made, else ``00``."""

    @property
    def is_sampled(self) -> bool:
        """Whether spans are made of this request."""
        return self.flags == b"01"

    def traceparent(self, span: bytes) -> bytes:
        """The header that makes the receiver's spans children of ``span``."""
        return b"00-%b-%b%b-%b" % (self.trace_id, self.stem, span, self.flags)


def traceparent_of(place: TraceContext | None, span: bytes) -> str:
    """For those who make spans below ``span``; empty when nobody wants any."""
    return place.traceparent(span).decode() if place is not None and place.is_sampled else ""


class TraceIds:
    """Gives each request its place. ``sample_ratio`` is for those that bring none."""

    def __init__(self, sample_ratio: float, random: Random) -> None:
        self._bound = round(sample_ratio * 2**64)
        self._random = random

    def place_of(self, traceparent: bytes | None) -> TraceContext:
        """Where a request with that header belongs: below its caller's span, sampled as the caller
        says, or in a trace of its own. A header that is none counts as missing.
        """
        stem = b"%014x" % (self._random.getrandbits(56) or 1)
        if traceparent is not None and (found := parse_traceparent(traceparent)) is not None:
            trace_id, parent, is_sampled = found
            return TraceContext(trace_id, stem, parent, b"01" if is_sampled else b"00")
        number = self._random.getrandbits(128) or 1
        # As OpenTelemetry's own sampler decides, so that all who see the trace id agree
        is_sampled = (number & 0xFFFFFFFFFFFFFFFF) < self._bound
        return TraceContext(b"%032x" % number, stem, b"", b"01" if is_sampled else b"00")


def parse_traceparent(header: bytes) -> tuple[bytes, bytes, bool] | None:
    """(trace id, span id, whether it is sampled); None for what is no ``traceparent``."""
    found = _TRACEPARENT.fullmatch(header)
    if found is None or (found[5] is not None and found[1] == b"00"):
        return None
    return found[2], found[3], bool(int(found[4], 16) & 1)

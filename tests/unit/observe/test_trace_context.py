"""Which trace a request belongs to."""

from __future__ import annotations

from random import Random

import pytest

from splitserve.orchestrator.observe.trace_context import (
    DECODE_LEG,
    PREFILL_LEG,
    SERVER,
    UNTRACED,
    TraceIds,
    parse_traceparent,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_callers_trace_goes_on(flags: str, is_sampled: bool) -> None:
    """Same trace, below the caller's span, sampled as the caller says whatever the ratio."""
    ids = TraceIds(0.0 if is_sampled else 1.0, Random(1))
    place = ids.place_of(f"00-{TRACE}-{SPAN}-{flags}".encode())
    assert (place.head[3:35], place.parent) == (TRACE, SPAN)
    assert place.is_sampled is is_sampled
    assert place.traceparent(SERVER)[-2:] == ("01" if is_sampled else "00")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-0",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}{SPAN}-01",
    ],
)
def test_what_is_no_traceparent(header: str) -> None:
    """A trace of its own begins."""
    assert parse_traceparent(header.encode()) is None
    place = TraceIds(1.0, Random(1)).place_of(header.encode())
    assert place.parent == ""
    assert place.is_sampled


def test_a_later_version_is_understood() -> None:
    """As far as its first four fields go."""
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-what-comes".encode()) is not None


def test_spans_of_a_request_have_ids_of_their_own() -> None:
    """All three are valid headers of one trace, and differ between requests."""
    ids = TraceIds(1.0, Random(2))
    one, other = ids.place_of(None), ids.place_of(None)
    headers = [place.traceparent(s) for place in (one, other) for s in (SERVER, PREFILL_LEG)]
    headers.append(one.traceparent(DECODE_LEG))
    parsed = [parse_traceparent(header.encode()) for header in headers]
    assert None not in parsed
    assert len({found[1] for found in parsed if found}) == 5
    assert len({found[0] for found in parsed if found}) == 2


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_the_ratio_is_kept(ratio: float) -> None:
    """Of 2,000 requests that bring no trace."""
    ids = TraceIds(ratio, Random(3))
    sampled = sum(ids.place_of(None).is_sampled for _ in range(2000))
    assert abs(sampled - 2000 * ratio) <= (60 if 0 < ratio < 1 else 0)


def test_requests_of_which_no_spans_are_made_share_a_header() -> None:
    """It is a valid one that says so; those of which some are made have ids that OpenTelemetry's
    sampler of that ratio takes, too.
    """
    assert TraceIds(0.0, Random(4)).place_of(None) is UNTRACED
    found = parse_traceparent(UNTRACED.traceparent(SERVER).encode())
    assert found is not None
    assert not found[2]
    ids = TraceIds(0.1, Random(5))
    sampled = [place for _ in range(500) if (place := ids.place_of(None)).is_sampled]
    assert sampled
    assert all(int(place.head[19:35], 16) < round(0.1 * 2**64) for place in sampled)

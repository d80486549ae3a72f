"""What is known of a request that has ended, and what its line in the log says of it.

Processes beside the router make the lines and the spans, since both take longer than telling what
they are made of: ``Ended`` goes to them in frames of many.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from splitserve.orchestrator.core.effects import Timeline  # noqa: TC001 (msgspec resolves it)
from splitserve.orchestrator.observe.trace_context import SERVER, UNTRACED
from splitserve.orchestrator.router.request_parts import Moments, overlap_of, parts_of
from splitserve.orchestrator.router.token_counts import Tally  # noqa: TC001 (also)
from splitserve.orchestrator.router.transfer_facts import NO_TRANSFER, Transfer, is_in_time

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    from splitserve.orchestrator.router.transfer_facts import RequestFacts

_LENGTH = struct.Struct("<I")


class Account(NamedTuple):
    """Where a request's time went."""

    parts: dict[str, float]
    """Milliseconds; see ``request_parts``."""
    transfer: Transfer
    hidden_ms: float | None
    exposed_ms: float | None


class Ended(NamedTuple):
    """One request that has ended, and where its time went."""

    timeline: Timeline
    tally: Tally
    account: Account


class _Frame(NamedTuple):
    wall_offset: float
    requests: list[Ended]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Frame).decode


def frame_of(requests: list[Ended], wall_offset: float) -> bytes:
    """Requests for another process of this host, which knows what it is handed by its length."""
    content = _encode(_Frame(wall_offset, requests))
    return _LENGTH.pack(len(content)) + content


def records_in(stream: IO[bytes]) -> Iterator[list[dict[str, Any]]]:
    """The records of what ``frame_of`` was given, frame by frame until the stream ends, in one or
    in its middle.
    """
    while len(length := stream.read(_LENGTH.size)) == _LENGTH.size:
        (size,) = _LENGTH.unpack(length)
        content = stream.read(size)
        if len(content) < size:
            return
        wall_offset, requests = _decode(content)
        yield [
            as_record(timeline, tally, wall_offset, account)
            for timeline, tally, account in requests
        ]


def account_of(timeline: Timeline, transfer: Transfer, now: float | None = None) -> Account:
    """Where the time went of a request that has ended; of one that has not, up to ``now``."""
    ended = timeline.last_data if now is None else now
    landed = transfer.landed
    if landed is not None and not is_in_time(landed, timeline.first_data):
        landed = None  # Another one brought the first data, or none.
    moments = Moments(
        timeline.received,
        timeline.received if ended is None else ended,
        timeline.streaming,
        timeline.first_dispatched,
        timeline.redispatched,
        transfer.prefill_started,
        transfer.prefill_ended,
        landed,
        timeline.first_data,
    )
    if transfer is NO_TRANSFER:
        return Account(parts_of(moments), transfer, None, None)
    overlap = overlap_of(transfer.first_write, transfer.prefill_ended, transfer.landed)
    return Account(parts_of(moments), transfer, *overlap)


def server_timing(timeline: Timeline, facts: RequestFacts | None, now: float) -> bytes:
    """The header of that name (W3C) for an answer that begins now: the parts before the first data,
    by what is known, and their sum.
    """
    transfer = NO_TRANSFER if facts is None else facts.transfer(timeline.first_data)
    until = now if timeline.first_data is None else timeline.first_data
    parts = account_of(timeline, transfer, until).parts
    if timeline.streaming:
        parts.pop("decode", None)
    total = "ttft" if timeline.streaming else "total"
    parts[total] = round((until - timeline.received) * 1000, 3)
    return ", ".join(f"{name};dur={ms}" for name, ms in parts.items()).encode()


def as_record(
    timeline: Timeline, tally: Tally, wall_offset: float, account: Account
) -> dict[str, Any]:
    """A timeline as the log shows it: the wall time of arrival, everything else in milliseconds
    after it. What did not happen, or is not known, is null.
    """
    received, transfer = timeline.received, account.transfer

    def after(moment: float) -> float:
        return round((moment - received) * 1e6) / 1000

    trace = None if tally.trace == UNTRACED else tally.trace
    return {
        "event": "request",
        "request_id": tally.client_request_id,
        "id": timeline.request_id,
        "received_unix_s": round(received + wall_offset, 6),
        "endpoint": timeline.endpoint,
        "tenant": timeline.tenant,
        "streaming": timeline.streaming,
        "prompt_tokens_estimate": timeline.prompt_tokens,
        "prompt_tokens": tally.prompt_tokens,
        "output_tokens": tally.output_tokens,
        "output_limit_tokens": tally.output_limit_tokens,
        "decision": timeline.decision,
        "prefill_node": timeline.prefill_node,
        "decode_node": timeline.decode_node,
        "expected_cached_tokens": timeline.expected_cached_tokens,
        "attempts": timeline.attempts,
        "continuations": timeline.continuations,
        "queued_ms": None if (at := timeline.queued) is None else after(at),
        "dispatched_ms": None if (at := timeline.first_dispatched) is None else after(at),
        "redispatched_ms": None if (at := timeline.redispatched) is None else after(at),
        "reserved_ms": None if (at := transfer.reserved) is None else after(at),
        "granted_ms": None if (at := transfer.granted) is None else after(at),
        "prefill_started_ms": None if (at := transfer.prefill_started) is None else after(at),
        "prefill_ended_ms": None if (at := transfer.prefill_ended) is None else after(at),
        "delivered_ms": None if (at := transfer.delivered) is None else after(at),
        "landed_ms": None if (at := transfer.landed) is None else after(at),
        "prefill_answered_ms": None if (at := timeline.prefill_answered) is None else after(at),
        "prefill_status": timeline.prefill_status,
        "first_data_ms": None if (at := timeline.first_data) is None else after(at),
        "last_data_ms": None if (at := timeline.last_data) is None else after(at),
        "layer_writes": []
        if not transfer.writes
        else [
            {
                "layers": (write.first_layer, write.last_layer),
                "ms": after(write.at),
                "pages": write.pages,
                "bytes": write.bytes,
            }
            for write in transfer.writes
        ],
        "transfer_pages": transfer.pages,
        "transfer_bytes": transfer.bytes,
        "transfer_hidden_ms": account.hidden_ms,
        "transfer_exposed_ms": account.exposed_ms,
        "parts": account.parts,
        "status": timeline.status,
        "outcome": timeline.outcome,
        "reason": timeline.reason,
        "traceparent": None if trace is None else trace.traceparent(SERVER),
        "parent_span_id": (trace.parent or None) if trace is not None else None,
    }

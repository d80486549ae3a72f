"""What each side of a transfer knows of it when it has ended: the facts of a request's timeline.

One struct per side, rank and attempt. Times are seconds of the monotonic clock of the side's host;
whoever joins the two sides knows how the clocks relate.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Of a monotonic clock. What is beyond is no time, and no message."""
UNTAKEN_LIMIT_TRANSFERS = 1_024
"""Ended transfers whose facts wait to be taken, at each station on their way; the oldest go
first.
"""
WRITE_LIMIT_GROUPS = 64
"""Groups of layers that the facts of one send tell apart."""
DELIVERED = "delivered"
LANDED = "landed"


class LayerWrite(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One write, or several that followed each other."""

    first_layer: int
    last_layer: int
    at: Seconds
    """When the last of them was complete."""
    pages: int
    bytes: int


class SendFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="send"):
    """What one prefill rank did for one decode rank."""

    transfer_id: str
    attempt: int
    rank: int
    outcome: str
    """``delivered``, or why not everything was."""
    ended: Seconds
    """When the last page was written, or the fence was given."""
    started: Seconds | None = None
    """When the first step of the prompt began."""
    computed: Seconds | None = None
    """When the prompt's last step left the last layer."""
    first_write: Seconds | None = None
    """When the first write was handed to the transport."""
    pages: int = 0
    bytes: int = 0
    writes: tuple[LayerWrite, ...] = ()
    traceparent: str = ""
    """W3C trace context of the leg; empty when the request is not traced."""


class ReceiveFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="receive"):
    """What one decode rank saw of one attempt."""

    transfer_id: str
    attempt: int
    rank: int
    ranks: int
    """Of its engine; each of them tells its own part."""
    outcome: str
    """``landed``, or why the pages are not all there."""
    ended: Seconds
    """When the request could be scheduled, with its pages or without."""
    reserved: Seconds | None = None
    """When the pages were allocated."""
    granted: Seconds | None = None
    """When the first grant left."""
    pages: int = 0
    bytes: int = 0
    traceparent: str = ""
    """W3C trace context of the leg; empty when the request is not traced."""


TransferFacts = SendFacts | ReceiveFacts


def in_groups(writes: list[LayerWrite]) -> list[LayerWrite]:
    """The same writes in at most ``WRITE_LIMIT_GROUPS`` groups: neighbours are put together."""
    while len(writes) > WRITE_LIMIT_GROUPS:
        pairs = [writes[n : n + 2] for n in range(0, len(writes), 2)]
        writes = [_together(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return writes


def _together(one: LayerWrite, other: LayerWrite) -> LayerWrite:
    return LayerWrite(
        min(one.first_layer, other.first_layer),
        max(one.last_layer, other.last_layer),
        max(one.at, other.at),
        one.pages + other.pages,
        one.bytes + other.bytes,
    )

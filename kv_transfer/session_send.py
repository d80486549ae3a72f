"""One send: a request that this engine prefills for somebody else, and the grants that it fills.

A *session* is the request; a *sink* is one decode rank that granted pages for it. Both are plain
records, changed by the ``SendBook`` that owns them; the orders that follow from a change are here
too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.kv_transfer.messages import FromPrefill, Grant

Spans = tuple[tuple[int, int, int], ...]
"""(layer, first prompt block, end) per layer."""


@dataclass(frozen=True)
class Write:
    """An order: copy these prompt blocks of these layers into the sink's pages."""

    transfer_id: str
    peer: str
    tag: int
    spans: Spans


@dataclass(frozen=True)
class Say:
    """An order: send a message to a peer."""

    peer: str
    message: FromPrefill


@dataclass(frozen=True)
class Release:
    """A fact for the engine: nothing reads this finished request's blocks any more."""

    request_id: str
    transfer_id: str
    outcome: str


SendEffect = Write | Say | Release


class SinkState(Enum):
    """Where one decode rank's grant stands."""

    WRITING = "writing"
    FENCING = "fencing"
    """Nothing more is written; open writes still have to end."""
    DELIVERED = "delivered"
    ENDED = "ended"


@dataclass
class Sink:
    """One grant being filled."""

    peer: str
    grant: Grant
    page_bytes: int
    posted: list[int]
    """Per layer, the first prompt block that no write covers yet."""
    state: SinkState = SinkState.WRITING
    open_writes: set[int] = field(default_factory=set)
    pages: int = 0
    fence_reason: str = ""
    is_dropped: bool = False
    """Its decode rank is gone or has no request for it any more; another one may take its place."""
    announced: bool = False
    announced_last: bool = False


@dataclass
class SendSession:
    """One request prefilled here for a peer. Changed only by its ``SendBook``."""

    transfer_id: str
    request_id: str
    prompt_tokens: int
    prompt_hash: bytes
    total_blocks: int
    source_blocks: list[int]
    final: list[int]
    """Per layer, the first prompt block that is not final yet."""
    sinks: dict[str, Sink] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)
    """Per peer, the newest attempt that it has cancelled."""
    sinks_expected: int | None = None
    closed: str | None = None
    """``complete`` or ``aborted`` once the engine is done with the request."""
    closed_at: float | None = None
    abandoned: bool = False
    """The decode side does not want it: nothing to wait for."""

    @property
    def is_final(self) -> bool:
        """Every block of every layer is final."""
        return min(self.final) >= self.total_blocks

    def refusal(self, grant: Grant) -> str | None:
        """Why a grant cannot be filled from this request, None when it can."""
        if grant.prompt_tokens != self.prompt_tokens:
            return (
                f"the prompts differ: {self.prompt_tokens} tokens on the prefill node, "
                f"{grant.prompt_tokens} on the decode node"
            )
        if grant.prompt_hash != self.prompt_hash:
            return (
                "the prompts differ (same length, other tokens): both nodes need the same "
                "tokenizer and chat template"
            )
        end = grant.first_block + len(grant.block_ids)
        if end != self.total_blocks or not grant.block_ids:
            return (
                f"the grant is for blocks {grant.first_block} to {end}, the prompt ends at block "
                f"{self.total_blocks}"
            )
        if self.abandoned:
            return "the transfer was given up"
        if self.closed == "aborted":
            return "the prefill request was aborted"
        return None

    def unposted(self, sink: Sink) -> Spans:
        """What is final and not covered by a write to ``sink`` yet."""
        return tuple(
            (layer, sink.posted[layer], final)
            for layer, final in enumerate(self.final)
            if final > sink.posted[layer]
        )


def split(spans: Spans, limit_pages: int) -> list[Spans]:
    """Cut spans into runs of at most ``limit_pages`` pages."""
    parts: list[Spans] = []
    part: list[tuple[int, int, int]] = []
    room = limit_pages
    for layer, first, end in spans:
        while first < end:
            take = min(room, end - first)
            part.append((layer, first, first + take))
            first += take
            room -= take
            if not room:
                parts.append(tuple(part))
                part, room = [], limit_pages
    if part:
        parts.append(tuple(part))
    return parts

"""One send: a request that this engine prefills for somebody else, and the grants that it fills.

A *session* is the request; a *sink* is one decode rank that granted pages for it. Both are plain
records, changed by the ``SendBook`` that owns them; what may happen in which state is in
``transfer_lifecycle``. The orders that follow from a change are here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.kv_transfer.transfer_lifecycle import (
    SEND,
    SINK,
    SendState,
    SendTrigger,
    SinkState,
)
from splitserve.kv_transfer.transfer_story import Moment, Story

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


@dataclass
class Offer:
    """A grant that waits: for its request, or for the fence of the attempt before it."""

    peer: str
    grant: Grant
    page_bytes: int
    until: float
    story: Story
    state: SinkState = SinkState.OFFERED

    def move(self, trigger: SendTrigger, to: SinkState, reason: str = "") -> None:
        """Something happens to it."""
        self.state = SINK.move(self.story, self.state, trigger, to, who=self.peer, reason=reason)


@dataclass
class Sink:
    """One grant being filled."""

    peer: str
    grant: Grant
    page_bytes: int
    posted: list[int]
    """Per layer, the first prompt block that no write covers yet."""
    story: Story
    """Of its session."""
    state: SinkState
    open_writes: set[int] = field(default_factory=set)
    pages: int = 0
    fence_reason: str = ""
    is_dropped: bool = False
    """Its decode rank is gone or has no request for it any more; another one may take its place."""
    announced: bool = False
    announced_last: bool = False

    def move(self, trigger: SendTrigger, to: SinkState, reason: str = "") -> bool:
        """Something happens to it. False when it is ignored."""
        before = self.state
        self.state = SINK.move(self.story, before, trigger, to, who=self.peer, reason=reason)
        return self.state is not before


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
    moment: Moment = field(default_factory=Moment)
    """Of the book that owns it."""
    state: SendState = SendState.OPEN
    closed_at: float | None = None
    """When the engine was done with the request."""
    abandoned: bool = False
    """The decode side does not want it: nothing to wait for."""

    def __post_init__(self) -> None:
        self.story = Story(self.transfer_id, None, self.moment)

    def move(self, trigger: SendTrigger, to: SendState, reason: str = "") -> None:
        """Something happens to the request as a whole."""
        self.state = SEND.move(self.story, self.state, trigger, to, reason=reason)

    def take_up(self, offer: Offer) -> None:
        """Its grant is filled from now on."""
        peer, grant = offer.peer, offer.grant
        offer.move(SendTrigger.TAKEN_UP, SinkState.WRITING)
        self.story.moves.extend(offer.story.moves)
        self.sinks_expected = grant.grants_expected
        self.sinks[peer] = Sink(
            peer=peer,
            grant=grant,
            page_bytes=offer.page_bytes,
            posted=[grant.first_block] * len(self.final),
            story=self.story,
            state=offer.state,
        )

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
        if self.state is SendState.ABORTED:
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

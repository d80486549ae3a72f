"""The receiving side of one transfer, pure: who was given pages, who has delivered, and when the
pages are ours again.

A *source* is one prefill rank that holds KV heads of ours. A session ends only when every source
has settled: it delivered, it fenced, it is proven dead, the transport ended it, or it never got a
grant. Until then the pages may still be written, and the engine must not get them back: a session
that was cancelled stays open for exactly that reason. What may happen in which state is in
``transfer_lifecycle``. The orders that follow from a change are here too; the ``ReceiveBook`` that
owns the sessions gives them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.kv_transfer.messages import Grant
from splitserve.kv_transfer.transfer_lifecycle import (
    RECEIVE,
    SOURCE,
    ReceiveState,
    ReceiveTrigger,
    SourceState,
)
from splitserve.kv_transfer.transfer_story import Moment, Story

if TYPE_CHECKING:
    from splitserve.kv_transfer.messages import Cancel, FromDecode
    from splitserve.kv_transfer.orders import BeginReceive, Retarget

SETTLED = SOURCE.last
MAY_WRITE = frozenset({SourceState.GRANTED, SourceState.QUARANTINED})


@dataclass
class Source:
    """One prefill rank's part of a transfer."""

    state: SourceState = SourceState.UNKNOWN
    tag: int = 0
    pages_expected: int = 0
    heads: frozenset[int] = frozenset()
    """Global numbers of the KV heads that it was granted pages for."""
    reason: str = ""


@dataclass
class ReceiveSession:
    """One request whose prompt's KV is computed elsewhere. Owned by one thread."""

    transfer_id: str
    request_id: str
    attempt: int
    peer_incarnation: str
    first_block: int
    block_ids: tuple[int, ...]
    prompt_tokens: int
    prompt_hash: bytes
    heads: frozenset[int]
    """Global numbers of the KV heads whose pages are awaited."""
    deadline: float
    """When to stop waiting, in the clock of the caller."""
    sources: dict[str, Source]
    """By control address."""
    moment: Moment = field(default_factory=Moment)
    """Of the book that owns it."""
    state: ReceiveState = ReceiveState.AWAITED
    cancel_reason: str | None = None
    keeps: bool = False
    """The engine has aborted the request; what the writers computed may be of use elsewhere."""
    is_retargetable: bool = False
    """Another prefill node may be given the pages if this one fails."""
    held_until: float | None = None
    """The writer is gone and another one may be named until then."""
    successor: Retarget | None = None
    """Who gets the pages next, once nobody may write to them."""
    is_last_posted: bool = False
    """A source has posted its last write."""
    fence_asked_at: float = 0.0
    quarantined_since: float | None = None
    """When a fence was first asked for."""
    pages: int = 0
    bytes: int = 0
    traceparent: str = ""
    times: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.story = Story(self.transfer_id, self.attempt, self.moment)

    @classmethod
    def reserved(
        cls,
        order: BeginReceive,
        *,
        heads: frozenset[int],
        deadline: float,
        is_retargetable: bool,
        moment: Moment,
    ) -> ReceiveSession:
        """The engine has reserved blocks."""
        return cls(
            transfer_id=order.transfer_id,
            request_id=order.request_id,
            attempt=order.attempt,
            peer_incarnation=order.peer_incarnation,
            first_block=order.first_block,
            block_ids=order.block_ids,
            prompt_tokens=order.prompt_tokens,
            prompt_hash=order.prompt_hash,
            heads=heads,
            deadline=deadline,
            sources={address: Source() for address in order.peer_addresses},
            times={"reserved": moment.now},
            is_retargetable=is_retargetable,
            traceparent=order.traceparent,
            moment=moment,
        )

    def handed_on(self, order: Retarget) -> ReceiveSession:
        """The next attempt, which has the same pages and another writer."""
        self.move(ReceiveTrigger.SETTLED, ReceiveState.HANDED_ON, order.reason)
        return ReceiveSession(
            transfer_id=self.transfer_id,
            request_id=self.request_id,
            attempt=order.attempt,
            peer_incarnation=order.peer_incarnation,
            first_block=self.first_block,
            block_ids=self.block_ids,
            prompt_tokens=self.prompt_tokens,
            prompt_hash=self.prompt_hash,
            heads=self.heads,
            deadline=self.deadline,
            sources={address: Source() for address in order.peer_addresses},
            times={"reserved": self.times["reserved"], "retargeted": self.moment.now},
            is_retargetable=True,
            traceparent=self.traceparent,
            moment=self.moment,
        )

    def move(self, trigger: ReceiveTrigger, to: ReceiveState, reason: str = "") -> None:
        """Something happens to the attempt as a whole."""
        self.state = RECEIVE.move(self.story, self.state, trigger, to, reason=reason)

    def _move_source(
        self, address: str, trigger: ReceiveTrigger, to: SourceState, reason: str = ""
    ) -> bool:
        """Something happens to a source. False when it is ignored."""
        source = self.sources.get(address)
        if source is None:
            return False
        before = source.state
        source.state = SOURCE.move(self.story, before, trigger, to, who=address, reason=reason)
        return source.state is not before

    def granted(self, address: str, tag: int, pages_expected: int, heads: frozenset[int]) -> None:
        """A grant leaves for this source: from now on it may write."""
        self._move_source(address, ReceiveTrigger.GRANTED, SourceState.GRANTED)
        source = self.sources[address]
        source.tag, source.pages_expected, source.heads = tag, pages_expected, heads

    def grant_for(self, address: str, grants_expected: int) -> Grant:
        """What is sent to a source that was granted pages."""
        return Grant(
            transfer_id=self.transfer_id,
            attempt=self.attempt,
            tag=self.sources[address].tag,
            first_block=self.first_block,
            block_ids=self.block_ids,
            prompt_tokens=self.prompt_tokens,
            prompt_hash=self.prompt_hash,
            grants_expected=grants_expected,
        )

    def absent(self, address: str) -> None:
        """This source holds nothing of ours."""
        self._move_source(address, ReceiveTrigger.NO_SHARED_HEAD, SourceState.ABSENT)

    def delivered(self, address: str, pages: int, size_bytes: int) -> None:
        """The source says that everything is written (a fence)."""
        source = self.sources.get(address)
        if source is None:
            return
        if pages != source.pages_expected:
            reason = f"{pages} pages were sent, {source.pages_expected} were expected"
            self.ended(address, reason, ReceiveTrigger.MISCOUNTED)
        elif self._move_source(address, ReceiveTrigger.DELIVERED, SourceState.DELIVERED):
            self.pages += pages
            self.bytes += size_bytes

    def ended(
        self, address: str, reason: str, trigger: ReceiveTrigger = ReceiveTrigger.FENCED
    ) -> None:
        """The source will not write any more and has not delivered.

        It fenced, is dead, was revoked, or never got a grant.
        """
        if self._move_source(address, trigger, SourceState.ENDED, reason):
            self.sources[address].reason = reason
            self.cancel(reason, ReceiveTrigger.OTHER_RANK_ENDED)

    def cancel(self, reason: str, trigger: ReceiveTrigger = ReceiveTrigger.CANCELLED) -> None:
        """Stop wanting the pages; sources without a grant settle at once."""
        if self.cancel_reason is None:
            self.cancel_reason = reason
        self.move(trigger, ReceiveState.FENCING, reason)
        for address, source in self.sources.items():
            may_write = source.state in MAY_WRITE
            to = SourceState.QUARANTINED if may_write else SourceState.ENDED
            if self._move_source(address, trigger, to, reason) and not may_write:
                source.reason = reason

    @property
    def unfenced(self) -> list[str]:
        """Addresses of the sources that may still write."""
        return [a for a, source in self.sources.items() if source.state in MAY_WRITE]

    @property
    def is_quarantined(self) -> bool:
        """Nobody wants the pages any more, and somebody may still write to them."""
        return any(s.state is SourceState.QUARANTINED for s in self.sources.values())

    @property
    def unasked(self) -> list[str]:
        """Addresses of the sources that have got no grant yet."""
        return [a for a, source in self.sources.items() if source.state is SourceState.UNKNOWN]

    @property
    def outcome(self) -> str | None:
        """``landed``, ``failed``, or None while somebody may still write or has not answered."""
        if any(source.state not in SETTLED for source in self.sources.values()):
            return None
        return "failed" if self.failure else "landed"

    @property
    def failure(self) -> str:
        """Why the pages are not (all) there, empty when they are or may still come."""
        if self.cancel_reason is not None:
            return self.cancel_reason
        covered: set[int] = set()
        for source in self.sources.values():
            if source.state is not SourceState.DELIVERED and source.state in SETTLED:
                continue
            covered |= source.heads or self.heads
        missing = sorted(self.heads - covered)
        return f"no prefill rank was named that holds KV heads {missing}" if missing else ""


@dataclass(frozen=True)
class Tell:
    """An order: send this to the prefill rank at that address."""

    address: str
    message: FromDecode


@dataclass(frozen=True)
class TellOnce:
    """An order: send this now, or once the rank is introduced; nobody waits for an answer."""

    address: str
    message: Cancel


@dataclass(frozen=True)
class Greet:
    """An order: say hello (again) to the rank at that address."""

    address: str


@dataclass(frozen=True)
class Expect:
    """An order: these blocks of every layer may be written under the tag from now on."""

    tag: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Revoke:
    """An order: nothing is expected under the tag any more.

    When the transport can promise that no byte lands from now on, ``revoked`` has to be told.
    """

    session: ReceiveSession
    address: str
    tag: int


@dataclass(frozen=True)
class Finish:
    """A fact for the engine: the session is over, nobody may write to its pages."""

    session: ReceiveSession
    landed: bool


ReceiveEffect = Tell | TellOnce | Greet | Expect | Revoke | Finish

"""The receiving side of one transfer, pure: who was given pages, who has delivered, and when the
pages are ours again.

A *source* is one prefill rank that holds KV heads of ours. A session ends only when every source
has settled: it delivered, it fenced, it is proven dead, the transport ended it, or it never got a
grant. Until then the pages may still be written, and the engine must not get them back: a session
that was cancelled stays open for exactly that reason. The orders that follow from a change are
here too; the ``ReceiveBook`` that owns the sessions gives them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.kv_transfer.messages import Cancel, FromDecode
    from splitserve.kv_transfer.orders import Retarget


class SourceState(Enum):
    """Where one prefill rank stands."""

    UNKNOWN = "unknown"
    """Not introduced yet: nothing is granted, it can be forgotten at once."""
    ABSENT = "absent"
    """It holds no head of ours."""
    GRANTED = "granted"
    DELIVERED = "delivered"
    ENDED = "ended"
    """It will not write (fenced, dead, revoked), and not everything has arrived."""


SETTLED = frozenset({SourceState.ABSENT, SourceState.DELIVERED, SourceState.ENDED})


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
    times: dict[str, float] = field(default_factory=dict)

    def granted(self, address: str, tag: int, pages_expected: int, heads: frozenset[int]) -> None:
        """A grant leaves for this source: from now on it may write."""
        source = self.sources[address]
        assert source.state is SourceState.UNKNOWN, f"{self.transfer_id}: granted {address} twice"
        assert self.cancel_reason is None, f"{self.transfer_id}: granted after cancel"
        source.state, source.tag = SourceState.GRANTED, tag
        source.pages_expected, source.heads = pages_expected, heads

    def absent(self, address: str) -> None:
        """This source holds nothing of ours."""
        source = self.sources[address]
        assert source.state is SourceState.UNKNOWN
        source.state = SourceState.ABSENT

    def delivered(self, address: str, pages: int, size_bytes: int) -> None:
        """The source says that everything is written (a fence)."""
        source = self.sources.get(address)
        if source is None or source.state is not SourceState.GRANTED:
            return
        if pages != source.pages_expected:
            self.ended(address, f"{pages} pages were sent, {source.pages_expected} were expected")
            return
        source.state = SourceState.DELIVERED
        self.pages += pages
        self.bytes += size_bytes

    def ended(self, address: str, reason: str) -> None:
        """The source will not write any more and has not delivered.

        It fenced, is dead, was revoked, or never got a grant.
        """
        source = self.sources.get(address)
        if source is not None and source.state not in SETTLED:
            source.state, source.reason = SourceState.ENDED, reason
            self.cancel(reason)

    def cancel(self, reason: str) -> None:
        """Stop wanting the pages; sources without a grant settle at once."""
        if self.cancel_reason is None:
            self.cancel_reason = reason
        for source in self.sources.values():
            if source.state is SourceState.UNKNOWN:
                source.state, source.reason = SourceState.ENDED, reason

    @property
    def unfenced(self) -> list[str]:
        """Addresses of the sources that may still write."""
        return [a for a, source in self.sources.items() if source.state is SourceState.GRANTED]

    @property
    def is_quarantined(self) -> bool:
        """Nobody wants the pages any more, and somebody may still write to them."""
        return self.cancel_reason is not None and bool(self.unfenced)

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

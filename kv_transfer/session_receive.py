"""The receiving side of one transfer, pure: who was given pages, who has delivered, and when the pages are ours again.

A *source* is one prefill rank that holds KV heads of ours. A session ends only when every source has settled: it delivered, it
fenced, it is proven dead, the transport ended it, or it never got a grant. Until then the pages may still be written, and the
engine must not get them back: a session that was cancelled stays open for exactly that reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


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
    deadline: float
    """When to stop waiting, in the clock of the caller."""
    sources: dict[str, Source]
    """By control address."""
    cancel_reason: str | None = None
    pages: int = 0
    bytes: int = 0
    times: dict[str, float] = field(default_factory=dict)

    def granted(self, address: str, tag: int, pages_expected: int) -> None:
        """A grant leaves for this source: from now on it may write."""
        source = self.sources[address]
        assert source.state is SourceState.UNKNOWN, f"{self.transfer_id}: granted {address} twice"
        assert self.cancel_reason is None, f"{self.transfer_id}: granted after cancel"
        source.state, source.tag, source.pages_expected = SourceState.GRANTED, tag, pages_expected

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
        """The source will not write any more and has not delivered: fenced, dead, revoked, or never granted."""
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
    def outcome(self) -> str | None:
        """``landed``, ``failed``, or None while somebody may still write or has not answered."""
        if any(source.state not in SETTLED for source in self.sources.values()):
            return None
        has_landed = self.cancel_reason is None and all(
            source.state is not SourceState.ENDED for source in self.sources.values()
        )
        return "landed" if has_landed and self.pages else "failed"

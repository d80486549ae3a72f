"""When what happened to the sends of one rank: for its transfer log, and as facts for timelines.

The path of a write is hot: it costs one record of a few numbers here, whatever its pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.messages import Delivered, Fenced
from splitserve.kv_transfer.transfer_facts import (
    DELIVERED,
    WRITE_LIMIT_GROUPS,
    LayerWrite,
    SendFacts,
    in_groups,
)

if TYPE_CHECKING:
    from splitserve.kv_transfer.session_send import SendSession
    from splitserve.kv_transfer.transfer_log import TransferLog


@dataclass
class _Prompt:
    """One request that is computed here."""

    times: dict[str, float]
    traceparent: str
    is_told: bool = False
    """Facts of some attempt have left."""


@dataclass
class _Filling:
    """One grant that is written to."""

    first_write: float
    writes: list[LayerWrite] = field(default_factory=list)


class SendRecords:
    """Of all open sends. Owned by the transfer thread."""

    def __init__(self, rank: int, log: TransferLog) -> None:
        self.facts: list[SendFacts] = []
        """Of what has ended; emptied by the thread."""
        self._rank = rank
        self._log = log
        self._prompts: dict[str, _Prompt] = {}
        """By transfer id."""
        self._fillings: dict[tuple[str, str, int], _Filling] = {}
        """By transfer id, peer and attempt."""

    def opened(self, transfer_id: str, traceparent: str, now: float) -> None:
        """A request is computed here for a peer."""
        self._prompts[transfer_id] = _Prompt({"opened": now}, traceparent)

    def note(self, transfer_id: str, what: str, at: float, *, is_first: bool = False) -> None:
        """Something happened to an open send; with ``is_first`` only its first time counts."""
        prompt = self._prompts.get(transfer_id)
        if prompt is not None and not (is_first and what in prompt.times):
            prompt.times[what] = at

    def posted(self, transfer_id: str, peer: str, attempt: int, now: float) -> None:
        """A write was handed to the transport."""
        key = (transfer_id, peer, attempt)
        if key not in self._fillings:
            self._fillings[key] = _Filling(now)
            self.note(transfer_id, "first_write", now, is_first=True)

    def written(self, transfer_id: str, peer: str, attempt: int, write: LayerWrite) -> None:
        """A write is complete."""
        filling = self._fillings.get((transfer_id, peer, attempt))
        if filling is None:
            return
        filling.writes.append(write)
        if len(filling.writes) > 2 * WRITE_LIMIT_GROUPS:
            filling.writes = in_groups(filling.writes)

    def ended(
        self, peer: str, message: Delivered | Fenced, session: SendSession | None, now: float
    ) -> None:
        """The peer is told that nothing is written any more."""
        transfer_id, attempt = message.transfer_id, message.attempt
        prompt = self._prompts.get(transfer_id)
        filling = self._fillings.pop((transfer_id, peer, attempt), None)
        is_delivered = isinstance(message, Delivered)
        outcome = DELIVERED if isinstance(message, Delivered) else message.reason
        pages = message.pages if isinstance(message, Delivered) else None
        size_bytes = message.bytes if isinstance(message, Delivered) else None
        if self._log.is_on:
            self._write_line(peer, message, session, now, outcome, pages, size_bytes)
        # A fence is given as often as it is asked for.
        if prompt is None or not (is_delivered or filling is not None or not prompt.is_told):
            return
        prompt.is_told = True
        writes = in_groups(filling.writes) if filling is not None else []
        self.facts.append(SendFacts(
            transfer_id=transfer_id,
            attempt=attempt,
            rank=self._rank,
            outcome=outcome,
            ended=now,
            started=prompt.times.get("started"),
            computed=prompt.times.get("last_layer"),
            first_write=filling.first_write if filling is not None else None,
            pages=sum(w.pages for w in writes) if pages is None else pages,
            bytes=sum(w.bytes for w in writes) if size_bytes is None else size_bytes,
            writes=tuple(writes),
            traceparent=prompt.traceparent,
        ))  # fmt: skip

    def released(self, transfer_id: str) -> None:
        """Nothing of the request is sent any more."""
        self._prompts.pop(transfer_id, None)
        for key in [key for key in self._fillings if key[0] == transfer_id]:
            del self._fillings[key]

    def _write_line(
        self,
        peer: str,
        message: Delivered | Fenced,
        session: SendSession | None,
        now: float,
        outcome: str,
        pages: int | None,
        size_bytes: int | None,
    ) -> None:
        sink = session.sinks.get(peer) if session is not None else None
        prompt = self._prompts.get(message.transfer_id)
        times: dict[str, Any] = prompt.times if prompt is not None else {}
        self._log.record(
            "send",
            transfer_id=message.transfer_id,
            attempt=message.attempt,
            peer=peer,
            prompt_tokens=session.prompt_tokens if session is not None else None,
            first_block=sink.grant.first_block if sink is not None else None,
            outcome=outcome,
            pages=pages,
            bytes=size_bytes,
            ended=now,
            **times,
        )

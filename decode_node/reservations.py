"""What a decode node adds to an engine's scheduler: pages reserved for a prompt that is computed
elsewhere.

Engine-neutral and pure. A request asks for its pages exactly once: after a failed load or a
preemption it is computed here like any other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import structs

from splitserve.kv_transfer.orders import BeginReceive, Decline, Retarget

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from splitserve.kv_transfer.transfer_params import TransferParams


EARLY_LIMIT_RETARGETS = 1_000
"""News of decode legs that are still on their way; older ones are forgotten."""


class ReservationState(Enum):
    """Where a decode leg stands."""

    ARRIVED = "arrived"
    RESERVED = "reserved"
    SETTLED = "settled"
    """Landed, failed or declined: it never asks again."""
    STARTED = "started"
    """Settled, and in a step of the engine."""


@dataclass
class Reservation:
    """One request whose prompt is computed elsewhere."""

    params: TransferParams
    prompt_tokens: int
    prompt_hash: bytes
    state: ReservationState = ReservationState.ARRIVED


class Reservations:
    """All decode legs of this engine. Changed only by the engine's scheduler thread."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._reservations: dict[str, Reservation] = {}
        self._transfers: dict[str, str] = {}
        """Request ids by transfer id."""
        self._receives: list[BeginReceive] = []
        self._cancels: list[tuple[str, str]] = []
        self._starting: list[str] = []
        """In the coming step."""
        self._started: list[str] = []
        """In a step that was told of: over when the next one begins."""
        self._retargets: list[Retarget] = []
        self._early_retargets: OrderedDict[str, Retarget] = OrderedDict()
        """By transfer id: news of transfers whose decode leg is not here yet."""
        self._declines: list[Decline] = []

    def arrived(
        self, request_id: str, params: TransferParams, prompt_tokens: int, prompt_hash: bytes
    ) -> bool:
        """A decode leg reached the engine. False when its transfer is already waited for here."""
        if params.transfer_id in self._transfers:
            return False
        self._transfers[params.transfer_id] = request_id
        early = self._early_retargets.pop(params.transfer_id, None)
        if early is not None and early.attempt > params.attempt:
            params = _retargeted(params, early)
        self._reservations[request_id] = Reservation(params, prompt_tokens, prompt_hash)
        return True

    def retarget(self, order: Retarget) -> None:
        """The prompt of a transfer is computed by another prefill node than was said."""
        request_id = self._transfers.get(order.transfer_id)
        if request_id is None:
            self._early_retargets[order.transfer_id] = order
            while len(self._early_retargets) > EARLY_LIMIT_RETARGETS:
                self._early_retargets.popitem(last=False)
            return
        reservation = self._reservations[request_id]
        if order.attempt <= reservation.params.attempt:
            return
        reservation.params = _retargeted(reservation.params, order)
        if reservation.state is ReservationState.RESERVED:
            self._retargets.append(order)
        elif reservation.state in (ReservationState.SETTLED, ReservationState.STARTED):
            reason = "the decode node computes the prompt itself"
            self._declines.append(
                Decline(order.transfer_id, order.attempt, order.peer_addresses, reason)
            )

    def wanted_tokens(self, request_id: str, computed_tokens: int) -> int:
        """How many prompt tokens after ``computed_tokens`` (whole blocks) should come from the
        prefill node.

        0 when none: not a decode leg, already asked, or only the last token is missing, which every
        engine computes itself. Asking has no effect; it may be repeated.
        """
        reservation = self._reservations.get(request_id)
        if reservation is None or reservation.state is not ReservationState.ARRIVED:
            return 0
        missing = reservation.prompt_tokens - computed_tokens
        return missing if missing > 1 else 0

    def reserved(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """The engine has blocks for the request; the last ``tokens`` prompt tokens come from
        outside.

        With ``tokens`` 0 the engine computes the prompt itself and the prefill node is told so, or
        it goes on with a request whose pages have landed.
        """
        reservation = self._reservations.get(request_id)
        if reservation is not None and reservation.state is ReservationState.SETTLED:
            self._starting.append(request_id)
            reservation.state = ReservationState.STARTED
        if reservation is None or reservation.state is not ReservationState.ARRIVED:
            return
        params = reservation.params
        if tokens == 0:
            self.declined(request_id, "the decode node has this prompt already")
            return
        first = (reservation.prompt_tokens - tokens) // self._block_tokens
        end = -(-reservation.prompt_tokens // self._block_tokens)
        assert (reservation.prompt_tokens - tokens) % self._block_tokens == 0
        assert len(block_ids) >= end, f"{request_id}: {len(block_ids)} blocks for {end}"
        reservation.state = ReservationState.RESERVED
        self._receives.append(BeginReceive(
            transfer_id=params.transfer_id,
            request_id=request_id,
            attempt=params.attempt,
            peer_incarnation=params.peer_incarnation,
            peer_addresses=params.peer_addresses,
            first_block=first,
            block_ids=tuple(block_ids[first:end]),
            prompt_tokens=reservation.prompt_tokens,
            prompt_hash=reservation.prompt_hash,
            traceparent=params.traceparent,
        ))  # fmt: skip

    def declined(self, request_id: str, reason: str, *, keeps: bool = False) -> None:
        """The engine will not fetch this prompt: the prefill node need not keep it, unless
        (``keeps``) another decode node may come for it.
        """
        reservation = self._reservations.get(request_id)
        if reservation is None or reservation.state is not ReservationState.ARRIVED:
            return
        reservation.state = ReservationState.SETTLED
        params = reservation.params
        self._declines.append(
            Decline(params.transfer_id, params.attempt, params.peer_addresses, reason, keeps)
        )

    def settled(self, request_ids: Iterable[str]) -> None:
        """The workers have reported these as received, with or without their pages."""
        for request_id in request_ids:
            reservation = self._reservations.get(request_id)
            if reservation is not None:
                reservation.state = ReservationState.SETTLED

    def finished(self, request_id: str) -> None:
        """The engine is done with the request, whatever its state."""
        reservation = self._reservations.get(request_id)
        if reservation is None:
            return
        if reservation.state in (ReservationState.RESERVED, ReservationState.SETTLED):
            self._cancels.append((request_id, "the request was aborted on the decode node"))
        elif reservation.state is ReservationState.ARRIVED:
            self.declined(request_id, "the request was aborted on the decode node", keeps=True)
        del self._reservations[request_id]
        self._transfers.pop(reservation.params.transfer_id, None)

    @property
    def waiting(self) -> int:
        """Requests whose pages are reserved and have not landed."""
        return sum(r.state is ReservationState.RESERVED for r in self._reservations.values())

    def unreserved(self) -> list[tuple[str, str, str]]:
        """(transfer id, request id, prefill node's incarnation) of the requests that have no pages
        yet. May be called from any thread.
        """
        known = list(self._reservations.items())  # In one step of the interpreter.
        return [
            (r.params.transfer_id, request_id, r.params.peer_incarnation)
            for request_id, r in known
            if r.state is ReservationState.ARRIVED
        ]

    @property
    def has_orders(self) -> bool:
        """Whether the workers must be told something before anything else happens."""
        news = (self._receives, self._retargets, self._cancels, self._declines)
        return any(news) or bool(self._starting or self._started)

    def take_orders(
        self,
    ) -> tuple[
        tuple[BeginReceive, ...],
        tuple[Retarget, ...],
        tuple[str, ...],
        tuple[tuple[str, str], ...],
        tuple[Decline, ...],
    ]:
        """(receives, retargets, acknowledged, cancels, declines) since the last call. Acknowledged
        are requests of the step before: it is over when these orders are carried out.
        """
        taken = (
            tuple(self._receives),
            tuple(self._retargets),
            tuple(self._started),
            tuple(self._cancels),
            tuple(self._declines),
        )
        self._receives.clear()
        self._retargets.clear()
        self._started, self._starting = self._starting, []
        self._cancels.clear()
        self._declines.clear()
        return taken


def _retargeted(params: TransferParams, order: Retarget) -> TransferParams:
    return structs.replace(
        params,
        attempt=order.attempt,
        peer_incarnation=order.peer_incarnation,
        peer_addresses=order.peer_addresses,
    )

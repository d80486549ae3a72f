"""What the nodes say of transfers that have ended, kept for the requests that they belong to.

Facts of the two sides come in any order, before the request has ended or after. Their times are of
the monotonic clock of the node's host. On the router's host that is the router's clock, and times
are exact. Of another host the offset is taken from the quickest of its latest messages, so its
times lie late by what that message needed to get here: the network's delay one way, as a rule well
under a millisecond.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

from splitserve.kv_transfer.transfer_facts import (
    DELIVERED,
    LANDED,
    LayerWrite,
    ReceiveFacts,
    SendFacts,
    in_groups,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.transfer_facts import TransferFacts
    from splitserve.orchestrator.agent.messages import NodeTransfers

REQUEST_LIMIT = 4_096
"""Requests whose facts are kept; those that were heard of first are forgotten."""
FACTS_LIMIT_PER_REQUEST = 256
"""Facts of one request: one for each side, rank and attempt. Later ones are ignored."""
CLOCK_SAMPLES = 64
"""Latest messages of another host from which its clock's offset is taken."""
CLOCK_LIMIT_HOSTS = 1_024
LANDED_SLACK_S = 0.05
"""A transfer that landed so little after the first data may have brought it: clocks differ."""


class Transfer(NamedTuple):
    """The transfer that mattered to a request, in seconds of the router's clock; None for what did
    not happen or is not known. With several ranks the last one counts.
    """

    reserved: float | None = None
    granted: float | None = None
    prefill_started: float | None = None
    prefill_ended: float | None = None
    first_write: float | None = None
    delivered: float | None = None
    landed: float | None = None
    writes: tuple[LayerWrite, ...] = ()
    pages: int | None = None
    bytes: int | None = None
    is_complete: bool = False
    """Both sides have told what they know."""


NO_TRANSFER = Transfer()


class RequestFacts:
    """What is known of one request's transfers by now."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[tuple[float, TransferFacts]] = []
        """(what is to be added to its times, facts), in the order of their arrival."""

    @property
    def may_be_complete(self) -> bool:
        """Whether both sides have told something."""
        return len({type(facts) for _, facts in self._known}) > 1

    def add(self, offset: float, facts: TransferFacts) -> None:
        """A node has told something."""
        if len(self._known) < FACTS_LIMIT_PER_REQUEST:
            self._known.append((offset, facts))

    def transfer(self, first_data: float | None) -> Transfer:
        """The transfer that brought the first data; without one the latest."""
        if not self._known:
            return NO_TRANSFER
        attempts: dict[tuple[str, int], list[tuple[float, ReceiveFacts]]] = {}
        for offset, facts in self._known:
            if isinstance(facts, ReceiveFacts):
                attempts.setdefault((facts.transfer_id, facts.attempt), []).append((offset, facts))
        latest = self._known[-1][1]
        key = (latest.transfer_id, latest.attempt)
        if attempts:
            in_time = [
                attempt
                for attempt, received in attempts.items()
                if _have_landed(received) and is_in_time(_last(received, "ended"), first_data)
            ]
            key = in_time[-1] if in_time else next(reversed(attempts))
        sent = [
            (offset, facts)
            for offset, facts in self._known
            if isinstance(facts, SendFacts) and (facts.transfer_id, facts.attempt) == key
        ]
        return _joined(sent, attempts.get(key, []))


class TransferBook:
    """The facts of all requests, up to a bound."""

    def __init__(self, clock: str) -> None:
        """``clock`` names the clock that the router's own times are of."""
        self._clock = clock
        self._by_request: OrderedDict[str, RequestFacts] = OrderedDict()
        self._delays: OrderedDict[str, deque[float]] = OrderedDict()
        """By clock: received here minus sent there."""

    def of(self, request_id: str) -> RequestFacts:
        """Of that request: what is known, and what will be."""
        found = self._by_request.get(request_id)
        if found is None:
            found = self._by_request[request_id] = RequestFacts()
            if len(self._by_request) > REQUEST_LIMIT:
                self._by_request.popitem(last=False)
        return found

    def find(self, request_id: str) -> RequestFacts | None:
        """Of that request, if any node has told something of it."""
        return self._by_request.get(request_id)

    def take(self, frame: NodeTransfers, now: float) -> None:
        """A node has told of transfers."""
        offset = self._offset(frame.clock, now - frame.sent)
        for facts in frame.ended:
            request_id = facts.transfer_id.rpartition(".")[0]
            self.of(request_id).add(offset, facts)

    def _offset(self, clock: str, delay: float) -> float:
        """What is to be added to times of that clock."""
        if clock == self._clock:
            return 0.0
        delays = self._delays.setdefault(clock, deque(maxlen=CLOCK_SAMPLES))
        if len(self._delays) > CLOCK_LIMIT_HOSTS:
            self._delays.popitem(last=False)
        delays.append(delay)
        return min(delays)


def is_in_time(landed: float, first_data: float | None) -> bool:
    """Whether the first data may have come of that transfer."""
    return first_data is None or landed <= first_data + LANDED_SLACK_S


def _joined(
    sent: list[tuple[float, SendFacts]], received: list[tuple[float, ReceiveFacts]]
) -> Transfer:
    has_landed = _have_landed(received)
    pages = sum(facts.pages for _, facts in received)
    delivered = [item for item in sent if item[1].outcome == DELIVERED]
    is_delivered = has_landed and sum(facts.pages for _, facts in delivered) >= pages
    return Transfer(
        reserved=_last_known(received, "reserved"),
        granted=_last_known(received, "granted"),
        prefill_started=_last_known(sent, "started"),
        prefill_ended=_last_known(sent, "computed"),
        first_write=_first_known(sent, "first_write"),
        delivered=_last(delivered, "ended") if is_delivered else None,
        landed=_last(received, "ended") if has_landed else None,
        writes=_writes(sent),
        pages=pages if received else None,
        bytes=sum(facts.bytes for _, facts in received) if received else None,
        is_complete=is_delivered,
    )


def _have_landed(received: list[tuple[float, ReceiveFacts]]) -> bool:
    """Whether every rank has its pages."""
    if not received or any(facts.outcome != LANDED for _, facts in received):
        return False
    return len({facts.rank for _, facts in received}) >= received[0][1].ranks


def _writes(sent: list[tuple[float, SendFacts]]) -> tuple[LayerWrite, ...]:
    """In the order of their ends; what several ranks wrote of the same layers is one write."""
    found: dict[tuple[int, int, int], LayerWrite] = {}
    for offset, facts in sent:
        for number, write in enumerate(facts.writes):
            key = (number, write.first_layer, write.last_layer)
            known = found.get(key)
            found[key] = LayerWrite(
                write.first_layer,
                write.last_layer,
                max(write.at + offset, known.at if known else write.at + offset),
                write.pages + (known.pages if known else 0),
                write.bytes + (known.bytes if known else 0),
            )
    return tuple(in_groups(sorted(found.values(), key=lambda write: write.at)))


def _times(items: Sequence[tuple[float, TransferFacts]], name: str) -> list[float]:
    times = ((offset, getattr(facts, name)) for offset, facts in items)
    return [offset + at for offset, at in times if at is not None]


def _last(items: Sequence[tuple[float, TransferFacts]], name: str) -> float:
    return max(_times(items, name))


def _last_known(items: Sequence[tuple[float, TransferFacts]], name: str) -> float | None:
    return max(_times(items, name), default=None)


def _first_known(items: Sequence[tuple[float, TransferFacts]], name: str) -> float | None:
    return min(_times(items, name), default=None)

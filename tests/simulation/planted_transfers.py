"""Bugs of the transfer books and of what the engines add to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from simulation.engine import Engine
from simulation.planting import is_false, method, never, no_effects_of
from splitserve.kv_transfer.holdings import HoldingsTaker
from splitserve.kv_transfer.receive_book import ReceiveBook
from splitserve.kv_transfer.send_book import SendBook
from splitserve.kv_transfer.session_receive import MAY_WRITE, Finish, ReceiveSession
from splitserve.kv_transfer.session_send import Release, Say, SendSession, Write
from splitserve.kv_transfer.transfer_lifecycle import SinkState, SourceState
from splitserve.prefill_node.prefills import Prefills

if TYPE_CHECKING:
    from simulation.planting import Plant


def _fence_at_once(real: Any, book: SendBook, session: Any, sink: Any) -> Any:
    """Fenced is said although a write is still open."""
    if sink.state is SinkState.FENCING:
        sink.open_writes.clear()
    return real(book, session, sink)


def _ends_granted(real: Any, session: ReceiveSession, *arguments: Any) -> None:
    """A cancel takes the pages back without a fence."""
    real(session, *arguments)
    for source in session.sources.values():
        if source.state in MAY_WRITE:
            source.state = SourceState.ENDED


def _silence_is_death(real: Any, book: ReceiveBook, address: str, reason: str, now: float) -> Any:
    """A lost introduction counts as a fence."""
    for session in book.sessions():
        session.ended(address, reason)
    return real(book, address, reason, now)


def _released_twice(real: Any, book: SendBook, session: Any) -> Any:
    """A finished prefill is reported as sent once more."""
    effects = real(book, session)
    if any(isinstance(effect, Release) for effect in effects):
        book.later = [*getattr(book, "later", []), *effects]  # type: ignore[attr-defined]
    elif getattr(book, "later", None):
        effects = [*effects, book.later.pop()]  # type: ignore[attr-defined]
    return effects


def _final_too_early(real: Any, book: SendBook, transfer: str, layer: int, end: int) -> None:
    """The block after the last final one is sent too."""
    real(book, transfer, layer, end + 1)


def _frees_at_abort(real: Any, engine: Engine, request_id: str) -> None:
    """An aborted parked request gives its blocks back at once."""
    request = engine.requests.get(request_id)
    real(engine, request_id)
    if request is not None and request.blocks and request_id in engine.requests:
        engine.memory.give_back(request.id, request.blocks)
        request.blocks = []


def _reported_twice(real: Any, book: ReceiveBook, *arguments: Any) -> Any:
    """A receive that has ended is reported with the next one once more."""
    effects = real(book, *arguments)
    again = getattr(book, "again", [])
    book.again = [e for e in effects if isinstance(e, Finish)]  # type: ignore[attr-defined]
    return [*effects, *again]


def _lost_write(real: Any, book: SendBook, **named: Any) -> Any:
    """The last write that is due is forgotten."""
    effects = real(book, **named)
    if len(effects) > 2 and isinstance(effects[-1], Write):
        effects.pop()
    return effects


def _any_count(
    real: Any, session: ReceiveSession, address: str, pages: int, size_bytes: int
) -> None:
    """Whatever was sent is enough."""
    source = session.sources.get(address)
    real(session, address, source.pages_expected if source else pages, size_bytes)


def _uncounted(patch: Any) -> None:
    """A write is lost, and the count of pages, which would show it, is not compared."""
    method(SendBook, "due_writes", _lost_write)(patch)
    method(ReceiveSession, "delivered", _any_count)(patch)


def _always_fits(real: Any, session: SendSession, grant: Any) -> None:
    """Prompts are not compared."""


def _next_at_once(real: Any, book: ReceiveBook, order: Any, now: float) -> Any:
    """Pages are granted to the next writer before the one before has fenced."""
    for session in book.sessions():
        if session.transfer_id == order.transfer_id and session.attempt < order.attempt:
            for address in session.unfenced:
                session.ended(address, "somebody else is named")
    return real(book, order, now)


def _filled_twice(real: Any, book: SendBook, session: SendSession, offer: Any) -> Any:
    """A grant that comes again is filled again."""
    known = session.sinks.get(offer.peer)
    if known is not None and known.grant.attempt == offer.grant.attempt:
        del session.sinks[offer.peer]
    return real(book, session, offer)


def _anybodys_death(real: Any, book: ReceiveBook, **named: Any) -> Any:
    """The death of one engine ends what others were granted."""
    named.pop("incarnation", None)
    return real(book, **named)


def _hasty(real: Any, taker: HoldingsTaker, limits: Any) -> None:
    """A writer that has not fenced is overdue at once."""
    real(taker, replace(limits, fence_timeout_s=0.0))


def _released_while_read(real: Any, book: SendBook, session: SendSession) -> Any:
    """A request is released although a write still reads its blocks."""
    for sink in session.sinks.values():
        if sink.state is SinkState.FENCING:
            sink.state = SinkState.ENDED
    return real(book, session)


BUGS: dict[str, tuple[Plant, int]] = {
    "fenced while a write is open": (method(SendBook, "_advance", _fence_at_once), 12),
    "pages taken back without a fence": (method(ReceiveSession, "cancel", _ends_granted), 10),
    "a lost connection is a fence": (method(ReceiveBook, "lost", _silence_is_death), 106),
    "a release is lost": (method(SendBook, "_settle", no_effects_of(Release)), 1),
    "a release comes twice": (method(SendBook, "_settle", _released_twice), 0),
    "a block is sent before it is final": (method(SendBook, "blocks_final", _final_too_early), 2),
    "a lease never ends": (method(SendBook, "expire", never), 2),
    "a deadline never ends": (method(ReceiveBook, "tick", never), 2),
    "a finished prefill is free at once": (method(Prefills, "finished", is_false), 0),
    "an aborted parked request frees its blocks": (method(Engine, "abort", _frees_at_abort), 15),
    "a receive is reported twice": (method(ReceiveBook, "_finish", _reported_twice), 0),
    "pages are not counted": (_uncounted, 1),
    "prompts are not compared": (method(SendSession, "refusal", _always_fits), 1),
    "granted again before the fence": (method(ReceiveBook, "retarget", _next_at_once), 85),
    "a repeated grant is filled twice": (method(SendBook, "_accept", _filled_twice), 63),
    "a cancel is not answered": (method(SendBook, "cancelled", no_effects_of(Say)), 4),
    "a death is taken for another's": (method(ReceiveBook, "_where", _anybodys_death), 6),
    "writers are overdue at once": (method(HoldingsTaker, "__init__", _hasty), 3),
    "released while a write reads": (method(SendBook, "_settle", _released_while_read), 12),
}
"""By what is wrong: how to plant it, and a seed that finds it."""

"""Protocol bugs to plant: each breaks one promise, and the seeds must find it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.engine import Engine
from splitserve.kv_transfer.receive_book import ReceiveBook
from splitserve.kv_transfer.send_book import SendBook
from splitserve.kv_transfer.session_receive import MAY_WRITE, ReceiveSession
from splitserve.kv_transfer.session_send import Release
from splitserve.kv_transfer.transfer_lifecycle import SinkState, SourceState
from splitserve.orchestrator.core.actions import Actions
from splitserve.orchestrator.core.effects import AnnounceDeath, CancelLeg
from splitserve.orchestrator.core.router_core import RouterCore
from splitserve.prefill_node.prefills import Prefills

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    Plant = Callable[[pytest.MonkeyPatch], None]


def _method(owner: type, name: str, replacement: Any) -> Plant:
    """A bug that replaces one method; ``replacement`` gets the real one first."""
    real = getattr(owner, name)

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, lambda self, *a, **k: replacement(real, self, *a, **k))

    return plant


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


def _no_effects_of(kind: type) -> Any:
    def replacement(real: Any, book: Any, *arguments: Any, **named: Any) -> Any:
        return [e for e in real(book, *arguments, **named) if not isinstance(e, kind)]

    return replacement


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


def _never(real: Any, *arguments: Any, **named: Any) -> list[Any]:
    return []


def _frees_at_abort(real: Any, engine: Engine, request_id: str) -> None:
    """An aborted parked request gives its blocks back at once."""
    request = engine.requests.get(request_id)
    real(engine, request_id)
    if request is not None and request.blocks and request_id in engine.requests:
        engine.memory.give_back(request.id, request.blocks)
        request.blocks = []


def _slot_is_kept(real: Any, actions: Actions, request: Any) -> None:
    """A prefill leg ends without giving its slot back."""
    request.has_prefill_leg = False


def _abort_is_not_told(real: Any, prefills: Prefills, request_id: str, **named: Any) -> bool:
    """A finished prefill's blocks are free at once."""
    return False


BUGS: dict[str, Plant] = {
    "fenced while a write is open": _method(SendBook, "_advance", _fence_at_once),
    "pages taken back without a fence": _method(ReceiveSession, "cancel", _ends_granted),
    "a lost connection is a fence": _method(ReceiveBook, "lost", _silence_is_death),
    "a release is lost": _method(SendBook, "_settle", _no_effects_of(Release)),
    "a release comes twice": _method(SendBook, "_settle", _released_twice),
    "a block is sent before it is final": _method(SendBook, "blocks_final", _final_too_early),
    "a lease never ends": _method(SendBook, "expire", _never),
    "a deadline never ends": _method(ReceiveBook, "tick", _never),
    "a cancelled leg is not closed": _method(Actions, "_cancel_legs", _no_effects_of(CancelLeg)),
    "deaths are not announced": _method(RouterCore, "_on_node_died", _no_effects_of(AnnounceDeath)),
    "a prefill slot is not given back": _method(Actions, "_give_back_prefill", _slot_is_kept),
    "a finished prefill is free at once": _method(Prefills, "finished", _abort_is_not_told),
    "an aborted parked request frees its blocks": _method(Engine, "abort", _frees_at_abort),
}
"""By what is wrong."""

"""Operators' wishes: from a ``Manage`` to its ``Managed``. Pure, like the books it looks into.

What the books know is answered at once. What needs a tier is a *work* (``control_work.py``), looked
after in every turn until it is over or its time is, and answered with what holds then. Nothing is
answered to a client that is gone. A wish that cannot be read or carried out is ``Refused``; it does
not cut the client off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kv_transfer.cache import control_stat
from splitserve.kv_transfer.cache.book_effects import AskTier, Effect, Send
from splitserve.kv_transfer.cache.control_messages import (
    ARGUMENTS,
    EVERY_TENANT,
    ChunksWish,
    ClearWish,
    Done,
    LookupWish,
    Quotas,
    QuotaWish,
    Refused,
    Result,
    StatWish,
)
from splitserve.kv_transfer.cache.control_work import (
    ClearWork,
    FetchWork,
    LookupWork,
    MoveWork,
    Work,
)
from splitserve.kv_transfer.cache.keys import split_keys
from splitserve.kv_transfer.cache.messages import KEYS_LIMIT, MESSAGE_LIMIT_BYTES, Manage, Managed
from splitserve.kv_transfer.cache.quota_book import inner_tag

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.kv_transfer.cache.cache_book import CacheBook
    from splitserve.kv_transfer.cache.control_work import Found
    from splitserve.kv_transfer.cache.index import TierIndex
    from splitserve.kv_transfer.cache.tier_book import TierBook

ARENA = "cpu"
"""What the arena is called, also where no tier is configured to be it."""
LIMIT_S = 3_600.0
"""The longest time that a wish may take."""
WORKS_LIMIT = 64
"""Works at a time."""
PIN_LIMIT_SHARE = 0.75
"""Of a tier's capacity may be pinned: what engines load and save needs the rest."""
RESULT_LIMIT_BYTES = MESSAGE_LIMIT_BYTES - 1024

_encode = msgspec.msgpack.Encoder().encode


class RefusalError(Exception):
    """It cannot be done; says what, why, and what to do."""


@dataclass(eq=False)
class Operation:
    """A work that somebody waits for."""

    client: int
    request_id: int
    until: float
    work: Work


class Control:
    """All wishes of one cache server. Whoever calls it carries out the effects, in order."""

    def __init__(self, book: CacheBook, *, started: float = 0.0) -> None:
        self._book = book
        self._started = started
        self._operations: list[Operation] = []
        self._asks: dict[int, tuple[TierBook, Callable[[Found], None]]] = {}
        self._clears: dict[int, ClearWork] = {}
        self._clear_ids = 0

    # -- the server's loop -----------------------------------------------------------------------

    def handle(self, client: int, message: Manage, now: float) -> list[Effect]:
        """An operator wants something."""
        try:
            wish = _wish_of(message)
            answer = self._begin(message.verb, wish, now)
        except RefusalError as error:
            answer = Refused(error=str(error))
        if isinstance(answer, Result):
            return [*self._book.take_effects(), _managed(client, message.request_id, answer)]
        until = now + wish.limit_s
        self._operations.append(Operation(client, message.request_id, until, answer))
        return self.tick(now)

    def asked(self, ask_id: int, found: Found, elapsed_s: float) -> None:
        """A tier has said which keys it has (None: it could not be asked), perhaps to somebody
        else.
        """
        asked = self._asks.pop(ask_id, None)
        if asked is None:
            return
        tier, answer = asked
        if found is not None:
            tier.health.answered(elapsed_s)
        answer(found)

    def cleared(self, clear_id: int, chunks: int, is_complete: bool = True) -> list[Effect]:
        """A tier has removed so many chunks, and (``is_complete``) has no more of them."""
        work = self._clears.pop(clear_id, None)
        if work is not None:
            work.cleared(clear_id, chunks, is_complete)
        return []

    def client_gone(self, client: int, now: float) -> list[Effect]:
        """Nobody waits for what this client wanted."""
        effects: list[Effect] = []
        for operation in self._operations:
            if operation.client == client:
                effects += operation.work.give_up(now)
        self._operations = [o for o in self._operations if o.client != client]
        return effects

    def tick(self, now: float) -> list[Effect]:
        """All works go on; those that are over, or whose time is, are answered."""
        effects: list[Effect] = []
        going: list[Operation] = []
        for operation in self._operations:
            effects += operation.work.advance(now)
            if not operation.work.is_over and now < operation.until:
                going.append(operation)
                continue
            effects += operation.work.give_up(now)
            result = operation.work.result()
            effects.append(_managed(operation.client, operation.request_id, result))
        self._operations = going
        return effects

    def next_deadline(self) -> float:
        """When ``tick`` has to be called at the latest."""
        return min((o.until for o in self._operations), default=float("inf"))

    # -- verbs -----------------------------------------------------------------------------------

    def _begin(self, verb: str, wish: Any, now: float) -> Result | Work:
        match wish:
            case StatWish():
                return control_stat.stat(self._book, now - self._started, RESULT_LIMIT_BYTES)
            case QuotaWish():
                return self._quota(wish)
            case ChunksWish() if verb in ("pin", "unpin"):
                return self._pin(wish, is_pinned=verb == "pin")
        if not 0 < wish.limit_s <= LIMIT_S:
            raise RefusalError(f"limit_s is {wish.limit_s}; it has to be above 0, up to {LIMIT_S}")
        if len(self._operations) >= WORKS_LIMIT:
            raise RefusalError(
                f"{WORKS_LIMIT} operations on the cache are under way; wait for one to end"
            )
        match wish:
            case LookupWish():
                return LookupWork(self._book, self._ask, _keys_of(wish.keys))
            case ClearWish():
                return self._clear(wish)
        return self._bring(wish, now, takes_away=verb == "move")

    def _pin(self, wish: ChunksWish, *, is_pinned: bool) -> Done:
        keys = _keys_of(wish.keys)
        chunks = size_bytes = 0
        indexes = self._indexes(wish.tier)
        for key in keys:
            there = [(index, entry) for index in indexes if (entry := index.get(key)) is not None]
            if is_pinned:
                for index, entry in there:
                    limit = PIN_LIMIT_SHARE * index.capacity_bytes
                    if index.pinned_bytes + entry.size_bytes <= limit:
                        index.pin([key])
                there = [(index, entry) for index, entry in there if entry.is_pinned]
            else:
                for index, _ in there:
                    index.unpin([key])
            if there:
                chunks += 1
                size_bytes += sum(entry.size_bytes for _, entry in there)
        return Done(chunks=chunks, bytes=size_bytes, missing=len(keys) - chunks)

    def _bring(self, wish: ChunksWish, now: float, *, takes_away: bool) -> Work:
        keys = _keys_of(wish.keys)
        if takes_away and not wish.tier:
            raise RefusalError(f"say where to move: one of {self._known()}")
        tier = self._tier(wish.tier) if wish.tier else None
        if self._book.geometry is None:
            raise RefusalError(
                "no engine has used the cache since its server started, so the size of chunks is "
                "not known; wait until one is connected"
            )
        until = now + wish.limit_s
        if tier is None:
            return FetchWork(self._book, keys, until)
        if not tier.is_usable:
            raise RefusalError(
                f"the {tier.name} tier is left alone for a while: {tier.health.last_error}; look "
                "after it and try again"
            )
        return MoveWork(self._book, self._ask, keys, tier, until, takes_away=takes_away)

    def _clear(self, wish: ClearWish) -> Work:
        tag = None if wish.tenant is None else self._tag(wish.tenant)
        only = self._tier(wish.tier) if wish.tier else None
        if only is not None and _only_reads(only):
            raise RefusalError(f"the {only.name} tier is only read (its admission is never)")
        lower = [only] if only is not None else [] if wish.tier else self._book.tiers
        return ClearWork(
            self._book,
            self._new_clear,
            [tier for tier in lower if not _only_reads(tier)],
            tag,
            arena=only is None,
            keep_pinned=wish.keep_pinned,
            prefix=b"" if tag is None else bytes.fromhex(tag),
        )

    def _quota(self, wish: QuotaWish) -> Quotas:
        book = self._book
        if wish.tier:
            self._tier(wish.tier)
        tenant = wish.tenant
        if tenant is not None and tenant != EVERY_TENANT:
            tenant = self._tag(tenant)
        if wish.changes:
            if tenant is None or not wish.tier:
                raise RefusalError("a quota is one tenant's in one tier: give both")
            if wish.limit_bytes is not None and wish.limit_bytes < 0:
                raise RefusalError(f"a quota of {wish.limit_bytes} bytes cannot be")
            book.quotas.set(tenant, wish.tier, wish.limit_bytes)
            book.shrink(wish.tier, None if tenant == EVERY_TENANT else tenant)
        return Quotas(tenants=control_stat.quotas(book, tenant, wish.tier, RESULT_LIMIT_BYTES))

    # -- inside ----------------------------------------------------------------------------------

    def _ask(self, tier: TierBook, keys: list[bytes], answer: Callable[[Found], None]) -> AskTier:
        ask_id = self._book.new_ask()
        self._asks[ask_id] = (tier, answer)
        return AskTier(tier.number, ask_id, keys)

    def _new_clear(self, work: ClearWork) -> int:
        self._clear_ids += 1
        self._clears[self._clear_ids] = work
        return self._clear_ids

    def _known(self) -> str:
        return ", ".join([ARENA, *(tier.name for tier in self._book.tiers)])

    def _tier(self, name: str) -> TierBook | None:
        """The lower tier of that name, None for the arena."""
        if name == ARENA:
            return None
        for tier in self._book.tiers:
            if tier.name == name:
                return tier
        raise RefusalError(f"there is no tier {name!r}; known: {self._known()}")

    def _tag(self, tag: str) -> str:
        try:
            return inner_tag(tag)
        except ValueError as error:
            raise RefusalError(f"there is no tenant {tag!r}: {error}") from error

    def _indexes(self, name: str) -> list[TierIndex[Any]]:
        """Of the tiers whose chunks can be pinned."""
        own = [tier.index for tier in self._book.tiers if tier.index is not None]
        if not name:
            return [self._book.arena.index, *own]
        tier = self._tier(name)
        if tier is None:
            return [self._book.arena.index]
        if tier.index is None:
            raise RefusalError(
                f"nothing can be pinned in the {name} tier: its store decides by itself what it "
                "keeps; pin in a tier of this host"
            )
        return [tier.index]


def _wish_of(message: Manage) -> Any:
    kind = ARGUMENTS.get(message.verb)
    if kind is None:
        raise RefusalError(f"there is no {message.verb!r}; known: {', '.join(ARGUMENTS)}")
    try:
        return msgspec.msgpack.decode(message.arguments, type=kind)
    except msgspec.DecodeError as error:
        raise RefusalError(
            f"the arguments of {message.verb} cannot be read: {error}; are both of one version?"
        ) from error


def _keys_of(joined: bytes) -> list[bytes]:
    """In their order, each once."""
    try:
        keys = list(dict.fromkeys(split_keys(joined)))
    except ValueError as error:
        raise RefusalError(f"the keys cannot be read: {error}") from error
    if len(keys) > KEYS_LIMIT:
        raise RefusalError(f"{len(keys)} chunks; at most {KEYS_LIMIT} at a time")
    return keys


def _only_reads(tier: TierBook) -> bool:
    """Whether the store is somebody else's, who fills it."""
    return tier.index is None and tier.settings.admission == "never"


def _managed(client: int, request_id: int, result: Result) -> Send:
    return Send(client, Managed(request_id=request_id, result=_encode(result)))

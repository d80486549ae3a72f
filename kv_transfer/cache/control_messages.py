"""What operators ask of a host's cache server, and what it answers: the content of ``Manage`` and
``Managed``.

Chunks go by their keys: who asks knows the model, the tenant's salt and the tokens, and computes
the keys as an engine does. Tenants go by their tags, tiers by their names
(``settings.tier_names``); an empty tier means what each verb says. Arguments and results are
msgpack: the keys of the longest prompt (``KEYS_LIMIT``) fit into one packet.
"""

from __future__ import annotations

import msgspec

TENANTS_LIMIT = 256
"""Tenants of one answer, those that hold most first."""
ENGINES_LIMIT = 256
EVERY_TENANT = "*"
"""In a quota: each tenant that no quota of its own names."""


class StatWish(msgspec.Struct, frozen=True):
    """``stat``: what the cache holds and how it fares. Answer: ``Stat``."""


class LookupWish(msgspec.Struct, frozen=True, kw_only=True):
    """``lookup``: where these chunks of one prompt are. Counts as no use of them, and asks tiers
    whose content the server does not know by heart. Answer: ``LookedUp``.
    """

    keys: bytes
    limit_s: float
    """Answer with what is known by then."""


class ChunksWish(msgspec.Struct, frozen=True, kw_only=True):
    """Something is to be done with these chunks of one prompt. Answer: ``Done``.

    ``pin``: they do not leave ``tier`` (empty: wherever each one is) until they are unpinned, or
    the server ends; only tiers of this host have pins, each for a part of its capacity, and what
    goes beyond that is missing. ``unpin``: the reverse. ``prefetch``: they are in ``tier`` (empty:
    the arena) too, read from below or written from above; of a prompt larger than the arena its
    beginning. ``move``: they are in ``tier`` and in none above it, but for those that are pinned
    above, which are missing.
    """

    keys: bytes
    tier: str = ""
    limit_s: float
    """Answer with what is done by then; the rest is given up and counts as missing."""


class ClearWish(msgspec.Struct, frozen=True, kw_only=True):
    """``clear``: chunks are removed, also those that are being read or written in a lower tier, but
    not what an engine saves just then. Answer: ``Done``, which counts each tier's copy, and bytes
    as far as they are known (not in shared tiers); ``missing`` are those that could not be removed
    (a store that does not answer), at least one per such tier. Shared tiers of which nothing is
    written (``admission: never``) are left out.
    """

    tenant: str | None
    """Only this tenant's; None: everybody's. The tag of requests without a tenant is empty."""
    tier: str = ""
    """Only there; empty: everywhere."""
    keep_pinned: bool = True
    limit_s: float


class QuotaWish(msgspec.Struct, frozen=True, kw_only=True):
    """``quota``: what tenants may hold, and, where ``changes`` is set, another bound from now on.
    Answer: ``Quotas``, as they are then.

    Of a tenant that holds more its own chunks go at once, but for those that are pinned or read; of
    a shared tier nothing goes, and nothing is added. A tenant's first quota of its own replaces
    those of ``EVERY_TENANT`` in that tier and keeps the others as its own.
    """

    tenant: str | None
    """A tag, ``EVERY_TENANT``, or None (only without ``changes``): all."""
    tier: str = ""
    """Empty: all (only without ``changes``)."""
    limit_bytes: int | None = None
    """None with ``changes``: no bound."""
    changes: bool = False


ARGUMENTS: dict[str, type[msgspec.Struct]] = {
    "stat": StatWish,
    "lookup": LookupWish,
    "pin": ChunksWish,
    "unpin": ChunksWish,
    "prefetch": ChunksWish,
    "move": ChunksWish,
    "clear": ClearWish,
    "quota": QuotaWish,
}
"""By the verb of ``Manage``."""


class ArenaStat(msgspec.Struct, frozen=True, kw_only=True):
    """The shared memory. Slots are counted once: leased ones are read or being filled."""

    bytes: int
    slots: int
    slot_bytes: int
    used: int = 0
    leased: int = 0
    pinned: int = 0
    reserved: int = 0


class TierStat(msgspec.Struct, frozen=True, kw_only=True):
    """One tier since the server's start; what a tier does not know is None."""

    name: str
    type: str
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    chunks: int | None = None
    pinned: int = 0
    state: str = "ok"
    """``ok`` or ``breaker open``."""
    trouble: str = ""
    """The latest error, in words; empty when there was none."""
    hits: int = 0
    """Chunks that were found here."""
    misses: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    shed: int = 0
    """Chunks that were not written because too many waited."""
    evictions: int = 0
    errors: int = 0
    broken_removed: int = 0
    waiting_bytes: int = 0
    """Chunks that wait to be written."""
    codec: str = "raw"
    """How new chunks are coded: as configured, or what ``auto`` has chosen."""
    latency_s: float | None = None
    """Measured; None before anything was read."""
    bytes_per_s: float | None = None


class TenantStat(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant holds and may hold, by tier name."""

    tenant: str
    """Its tag, or ``EVERY_TENANT``."""
    used_bytes: dict[str, int] = {}
    quota_bytes: dict[str, int] = {}


class EngineStat(msgspec.Struct, frozen=True, kw_only=True):
    """One connection of an engine."""

    engine: str
    """Incarnation."""
    rank: int
    """-1: the scheduler."""
    model: bytes


class Stat(msgspec.Struct, frozen=True, kw_only=True, tag="stat"):
    """Answer to ``stat``."""

    server: str
    uptime_s: float
    chunk_tokens: int
    arena: ArenaStat
    tiers: tuple[TierStat, ...]
    tenants: tuple[TenantStat, ...] = ()
    tenants_left_out: int = 0
    engines: tuple[EngineStat, ...] = ()
    counters: dict[str, float] = {}
    """Everything else that is counted, by name."""


class LookedUp(msgspec.Struct, frozen=True, kw_only=True, tag="looked_up"):
    """Answer to ``lookup``; chunks are counted from the first one on, without a gap."""

    chunks: int
    """In any tier."""
    by_tier: dict[str, int]
    """In this tier alone."""
    pinned: int = 0
    silent: tuple[str, ...] = ()
    """Tiers that did not answer in time, or whose breaker is open."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Answer to what changes chunks."""

    chunks: int
    """For which it holds now."""
    bytes: int
    missing: int = 0
    """Those for which it does not: in no tier, no room, or out of time."""


class Quotas(msgspec.Struct, frozen=True, kw_only=True, tag="quotas"):
    """Answer to ``quota``."""

    tenants: tuple[TenantStat, ...]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """It cannot be done; nothing has changed."""

    error: str
    """What, why, and what to do."""


Result = Stat | LookedUp | Done | Quotas | Refused

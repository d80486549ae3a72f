"""How fast each lower tier of the cache takes, gives and removes one chunk, and how far its clock
is from this machine's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.cache.settings import tier_names
from splitserve.orchestrator.launch.cache_settings import tier_settings
from splitserve.orchestrator.launch.checks.model import kv_item_bytes
from splitserve.orchestrator.launch.finding import Finding, Problem, failure, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config import TierConfig
    from splitserve.orchestrator.launch.checks.subject import Subject

ROUNDS = 3
DEFAULT_CHUNK_BYTES = 4 << 20
"""Where the model does not say."""
CHUNK_LIMIT_BYTES = 64 << 20
SLOW_S = 1.0
"""For one chunk: computing it again is hardly ever slower."""
CLOCK_LIMIT_S = 2.0
CLOCK_REFUSED_S = 900.0
"""Beyond this S3 refuses every signed request."""
_WITH_CLOCKS = ("redis", "mooncake", "s3")
_TIERS = "splitserve.kv_transfer.cache.tiers"
_UNFOUND = "see the check `cache`"


@dataclass(frozen=True)
class TierResult:
    """One tier's speed with one chunk; seconds are medians."""

    name: str
    chunk_bytes: int
    put_s: float
    get_s: float
    delete_s: float
    free_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """For ``doctor --json``."""
        return {
            "tier": self.name,
            "chunk_bytes": self.chunk_bytes,
            "put_bytes_per_s": round(self.chunk_bytes / self.put_s),
            "get_bytes_per_s": round(self.chunk_bytes / self.get_s),
            "put_ms": round(self.put_s * 1e3, 2),
            "get_ms": round(self.get_s * 1e3, 2),
            "delete_ms": round(self.delete_s * 1e3, 2),
            "free_bytes": self.free_bytes,
        }


def tiers(subject: Subject) -> Finding:
    """Each lower tier takes a chunk, gives the same bytes back, and removes it."""
    check, cache = "tiers", subject.config.cache
    if cache is None:
        return Finding(check, "no cache")
    if subject.running is not None:
        return Finding(check, "not measured beside a running cluster (`splitserve cache stat`)")
    names = tier_names(tier.type for tier in cache.tiers)
    size = chunk_bytes(subject)
    results: list[TierResult] = []
    parts: list[str] = []
    problems: list[Problem] = []
    for index, (name, tier) in enumerate(zip(names, cache.tiers, strict=True)):
        if tier.type == "cpu":
            continue
        problems += _unguarded(f"cache.tiers[{index}]", tier, cache.encrypt)
        if tier.admission == "never":
            parts.append(f"{name}: only read, not written to")
            continue
        try:
            result = _tried(name, tier, size)
        except _tier_error() as error:
            parts.append(f"{name}: cannot be used ({_UNFOUND})")
            problems += _broken(f"cache.tiers[{index}]", tier, error)
            continue
        results.append(result)
        parts.append(_in_words(result))
        problems += _slow(f"cache.tiers[{index}]", result)
    detail = "; ".join(parts) or "memory only"
    return Finding(check, detail, tuple(problems), {"tiers": [r.as_dict() for r in results]})


def clocks(subject: Subject) -> Finding:
    """Stores tell the same time as this machine."""
    check, cache = "clocks", subject.config.cache
    skews: dict[str, float] = {}
    problems: list[Problem] = []
    lower = cache.tiers if cache is not None else []
    names = tier_names(tier.type for tier in lower)
    for index, (name, tier) in enumerate(zip(names, lower, strict=True)):
        if tier.type in _WITH_CLOCKS and (skew := _skew(tier)) is not None:
            skews[name] = round(skew, 3)
            problems += _far(f"cache.tiers[{index}]", tier, skew)
    shown = [f"{name} {skew:+.3f} s" for name, skew in skews.items()]
    detail = ", ".join(shown) or "nobody else's clock to compare with"
    return Finding(check, detail, tuple(problems), {"skew_s": skews})


def chunk_bytes(subject: Subject) -> int:
    """Bytes of one chunk's body: whole pages, within bounds."""
    cache, facts = subject.config.cache, subject.model_facts
    size = DEFAULT_CHUNK_BYTES
    if cache is not None and facts is not None:
        per_token = facts.kv_bytes_per_token(kv_item_bytes(subject.config.prefill, facts))
        size = (per_token or 0) * cache.chunk_tokens or size
    size = min(size, CHUNK_LIMIT_BYTES)
    return max(mmap.PAGESIZE, size - size % mmap.PAGESIZE)


def _tried(name: str, tier: TierConfig, size: int) -> TierResult:
    """A chunk under a key that nobody else has is written, read, compared and removed. Raises
    ``TierError``.
    """
    base = import_module(f"{_TIERS}.base")
    key = os.urandom(32)
    header, body, back = base.new_header(), mmap.mmap(-1, size), mmap.mmap(-1, size)
    body.write(os.urandom(1 << 16) * (size >> 16) + os.urandom(size & 0xFFFF))
    chunk = base.ChunkBuffers(key, header, memoryview(body))
    again = base.ChunkBuffers(key, base.new_header(), memoryview(back))
    store = import_module(f"{_TIERS}.registry").create(tier_settings(tier))
    with contextlib.closing(store):
        store.check()
        took = []
        try:
            for _ in range(ROUNDS):
                took.append(_round(store, chunk, again, base))
        finally:
            with contextlib.suppress(base.TierError):
                store.remove([key])
        free = store.free_bytes()
    if body[:] != back[:]:
        raise base.TierUnavailableError(f"the {name} tier gives other bytes back than it was given")
    put, get, delete = (median(times) for times in zip(*took, strict=True))
    return TierResult(name, size, put, get, delete, free)


def _round(store: Any, chunk: Any, again: Any, base: Any) -> tuple[float, float, float]:
    """Seconds of a write, a read and a removal."""
    started = time.perf_counter()
    (written,) = store.write([chunk])
    put = time.perf_counter()
    if written is not base.WriteOutcome.WRITTEN:
        raise base.TierUnavailableError(
            f"a chunk of {len(chunk.body)} bytes was not taken: the store is full; make room"
        )
    ((_, outcome),) = store.read([again])
    got = time.perf_counter()
    if outcome is not base.ReadOutcome.HIT:
        raise base.TierUnavailableError(
            f"a chunk that was just written is {outcome.value}: the store keeps nothing; give it "
            "memory, or look at its rules"
        )
    store.remove([chunk.key])
    return put - started, got - put, time.perf_counter() - got


def _broken(where: str, tier: TierConfig, error: Exception) -> Iterator[Problem]:
    """What the check ``cache``, which only asks, does not tell already."""
    try:
        store = import_module(f"{_TIERS}.registry").create(tier_settings(tier))
        with contextlib.closing(store):
            store.check()
    except _tier_error():
        return
    yield Problem.told(f"{where}: {error}")


def _unguarded(where: str, tier: TierConfig, encrypt: bool) -> Iterator[Problem]:
    """What nobody guards is as safe as its network."""
    if tier.type == "mooncake" and not encrypt:
        yield warning(
            where,
            "a Mooncake Store has no authentication, and those who give it memory listen on all "
            "interfaces: whoever reaches them reads and changes the KV of every tenant",
            "set cache.encrypt: true, and keep the store's ports within a network of their own",
        )


def _slow(where: str, result: TierResult) -> Iterator[Problem]:
    slowest = max(result.put_s, result.get_s)
    if slowest > SLOW_S:
        yield warning(
            where,
            f"one chunk of {result.chunk_bytes / 1e6:.1f} MB takes {result.put_s:.2f} s to write "
            f"and {result.get_s:.2f} s to read: what computes faster is not loaded from there",
            "use a nearer or faster store, smaller cache.chunk_tokens, or remove the tier",
        )


def _skew(tier: TierConfig) -> float | None:
    """Seconds by which the store's clock is ahead; None when it does not say."""
    try:
        store = import_module(f"{_TIERS}.registry").create(tier_settings(tier))
        with contextlib.closing(store):
            before = time.time()
            told: float | None = store.clock_unix_s()
            after = time.time()
    except _tier_error():
        return None
    if told is None:
        return None
    step_s = 0.0 if tier.type == "redis" else 1.0  # the dates of HTTP have no fractions
    ahead, behind = told - after, before - (told + step_s)
    return ahead if ahead > 0 else -behind if behind > 0 else 0.0


def _far(where: str, tier: TierConfig, skew: float) -> Iterator[Problem]:
    if abs(skew) <= CLOCK_LIMIT_S:
        return
    what = f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
    fix = "set both by NTP (timedatectl set-ntp true)"
    if tier.type == "s3" and abs(skew) > CLOCK_REFUSED_S:
        yield failure(where, f"{what}: signed requests are refused", fix)
    else:
        yield warning(where, f"{what}: times in logs and traces do not match", fix)


def _in_words(result: TierResult) -> str:
    free = "" if result.free_bytes is None else f", {result.free_bytes / 1e9:.1f} GB free"
    return (
        f"{result.name}: a chunk of {result.chunk_bytes / 1e6:.1f} MB, PUT "
        f"{result.chunk_bytes / result.put_s / 1e6:.0f} MB/s, GET "
        f"{result.chunk_bytes / result.get_s / 1e6:.0f} MB/s, DELETE {result.delete_s * 1e3:.1f} ms"
        f"{free}"
    )


def _tier_error() -> type[Exception]:
    error: type[Exception] = import_module(f"{_TIERS}.base").TierError
    return error

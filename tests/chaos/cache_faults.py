"""What goes wrong with the shared cache and its stores. No request may fail for it, so the verdict
excuses nothing by these faults.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.cache_probe import held

from chaos.cluster import kill_all
from chaos.faults import Chaos

if TYPE_CHECKING:
    from random import Random

    from chaos.cache_stores import CacheStores
    from chaos.cluster import ChaosCluster
    from chaos.faults import Fault, Watch
    from splitserve.kv_transfer.cache.control_messages import Stat

PROGRAM = "-m splitserve.kv_transfer.cache "
STOP_LIMIT_S = 8.0
"""Of the cache server and of Redis; longer than every wait for them."""
STAT_POLL_S = 0.5
IDLE_LIMIT_S = 20.0
BACK_POLL_S = 0.2

PLACE_OF = {
    "kill cache server": "cache",
    "stop cache server": "cache",
    "kill redis": "redis",
    "stop redis": "redis",
    "empty redis": "redis",
    "delete redis keys": "redis",
    "spoil chunk files": "disk",
    "fill disk": "disk",
}
"""Kind to what it hits."""
ENGINE_KINDS = (
    "kill engine",
    "stop then kill engine",
    "stop engine shortly",
    "stop engine for long",
)
CACHE_KINDS = (*ENGINE_KINDS, *PLACE_OF)


class CacheChaos(Chaos):
    """Faults of the cache too."""

    def __init__(
        self, cluster: ChaosCluster, watch: Watch, rng: Random, stores: CacheStores
    ) -> None:
        super().__init__(cluster, watch, rng)
        self._stores = stores

    async def run(
        self, until: float, kinds: tuple[str, ...] = CACHE_KINDS, *, each: bool = False
    ) -> None:
        """As above; the disk is only filled when it is one of its own."""
        if not self._stores.can_be_full:
            kinds = tuple(kind for kind in kinds if kind != "fill disk")
        await super().run(until, kinds, each=each)

    def _victim(self, kind: str, share: float) -> str | None:
        place = PLACE_OF.get(kind)
        if place is None:
            return super()._victim(kind, share)
        return None if place in self._hit() else place

    async def _kill_server(self, fault: Fault, lasting: float) -> None:
        old = self._server()
        kill_all(old)
        end = time.monotonic() + self._limits.recovery_limit_s
        while self._server() in ((), old) or await asyncio.to_thread(self._stores.stat) is None:
            if time.monotonic() > end:
                fault.is_lost = True
                return
            await asyncio.sleep(BACK_POLL_S)

    async def _stop_server(self, fault: Fault, lasting: float) -> None:
        seconds = 0.05 + lasting**2 * STOP_LIMIT_S
        fault.detail = f"for {seconds:.1f} s"
        await self._hold(self._server(), seconds)

    async def _kill_redis(self, fault: Fault, lasting: float) -> None:
        self._stores.server.kill()
        await asyncio.sleep(lasting**2 * STOP_LIMIT_S)
        await asyncio.to_thread(self._stores.server.start)

    async def _stop_redis(self, fault: Fault, lasting: float) -> None:
        seconds = 0.05 + lasting**2 * STOP_LIMIT_S
        fault.detail = f"for {seconds:.1f} s"
        self._stores.server.stand_still()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._stores.server.go_on()

    async def _empty_redis(self, fault: Fault, lasting: float) -> None:
        fault.detail = f"{await asyncio.to_thread(self._stores.empty_redis)} keys"

    async def _delete_keys(self, fault: Fault, lasting: float) -> None:
        count = await asyncio.to_thread(self._stores.delete_keys, self._rng)
        fault.detail = f"{count} keys"

    async def _spoil_files(self, fault: Fault, lasting: float) -> None:
        fault.detail = await asyncio.to_thread(self._stores.spoil_files, self._rng)

    async def _fill_disk(self, fault: Fault, lasting: float) -> None:
        await asyncio.to_thread(self._stores.fill_disk)
        try:
            await asyncio.sleep(0.5 + lasting * STOP_LIMIT_S)
        finally:
            await asyncio.to_thread(self._stores.free_disk)

    _MAKERS = {  # noqa: RUF012 - never changed
        **Chaos._MAKERS,
        "kill cache server": _kill_server,
        "stop cache server": _stop_server,
        "kill redis": _kill_redis,
        "stop redis": _stop_redis,
        "empty redis": _empty_redis,
        "delete redis keys": _delete_keys,
        "spoil chunk files": _spoil_files,
        "fill disk": _fill_disk,
    }

    def _server(self) -> tuple[int, ...]:
        return tuple(self._cluster.up.pids(PROGRAM))


@dataclass
class CacheTally:
    """What the cache has done in all lives of its server and of the engines, looked at all the
    time.
    """

    stores: CacheStores
    watch: Watch
    _stats: dict[str, Stat] = field(default_factory=dict)
    """The latest of each life of the server."""
    _engines: dict[str, dict[str, float]] = field(default_factory=dict)
    """The latest counters of each life of an engine."""

    async def run(self) -> None:
        """For ever; ends by cancellation."""
        while True:
            await self.look()
            await asyncio.sleep(STAT_POLL_S)

    async def look(self) -> Stat | None:
        """What the server says now."""
        stat = await asyncio.to_thread(self.stores.stat)
        if stat is not None:
            self._stats[stat.server] = stat
        for node in (self.watch.view or {"nodes": {}})["nodes"].values():
            self._engines[node["incarnation"]] = node["counters"]
        return stat

    async def until_idle(self) -> list[str]:
        """What the server still holds at the limit."""
        end = time.monotonic() + IDLE_LIMIT_S
        while True:
            stat = await self.look()
            problems = ["the cache server does not answer"] if stat is None else held(stat)
            if not problems or time.monotonic() > end:
                return problems
            await asyncio.sleep(STAT_POLL_S)

    def summary(self) -> dict[str, Any]:
        """Sums over all lives."""
        stats = list(self._stats.values())
        tiers: dict[str, dict[str, int]] = {}
        for stat in stats:
            for tier in stat.tiers:
                sums = tiers.setdefault(tier.name, {})
                for key in ("reads", "writes", "evictions", "errors", "broken_removed", "shed"):
                    sums[key] = sums.get(key, 0) + getattr(tier, key)
        engines: dict[str, float] = {}
        for counters in self._engines.values():
            for name, value in counters.items():
                if name.startswith("cache_") and name.endswith(("chunks", "loads", "failed")):
                    engines[name.removeprefix("cache_")] = (
                        engines.get(name.removeprefix("cache_"), 0) + value
                    )
        return {
            "server_lives": len(stats),
            "engine_lives": len(self._engines),
            "tiers": tiers,
            "engines": engines,
        }

    def problems(self, requests: int) -> list[str]:
        """Whether the cache was in use at all: a run without hits proves nothing."""
        found = self.summary()
        loaded = found["engines"].get("loaded_chunks", 0)
        problems = []
        if loaded < requests / 4:
            problems.append(f"only {loaded:.0f} chunks were loaded in {requests} requests")
        for name, sums in found["tiers"].items():
            if not sums["reads"]:
                problems.append(f"nothing was read from the tier {name}")
        return problems

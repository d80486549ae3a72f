"""Faults by a seed, at random moments, and how long each of them lasted.

A fault's interval begins when it is made and ends when its node takes part again: its engine
answers, its agent reports, the router uses it. What is drawn (kinds, pauses, durations) follows
from the seed; which node is hit depends on which are whole at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from chaos.cluster import LINKS, kill_all

if TYPE_CHECKING:
    from random import Random

    from chaos.cluster import Bounds, ChaosCluster, NodeProcesses

ROUTER = "router"
SETTLE_S = 1.0
"""For so long a node must have been usable before its fault counts as over."""
LINK_SETTLE_S = 4.0
"""The same after a cut: heartbeats and pauses between redials end in this time."""
POLL_S = 0.2
PAUSE_S = (0.2, 2.0)
CROWD_SHARE = 0.35
"""Of the faults, so many do not wait until those before them are over."""
QUIET_LIMIT_S = 20.0

KINDS = (
    "kill engine",
    "kill agent",
    "kill guard",
    "kill router",
    "stop router",
    "stop engine shortly",
    "stop engine for long",
    "stop then kill engine",
    "stop agent",
    "terminate engine",
    "terminate router",
    "freeze link",
    "reset link",
)
LAST_KIND = "terminate agent"
"""Its node leaves the cluster for good, so it comes once, at the end."""


@dataclass
class Fault:
    """One of them. ``node`` is ``router`` for the router's; ``ended`` None while it lasts."""

    kind: str
    node: str
    began: float
    detail: str = ""
    incarnation: str = ""
    """Of the engine that was hit."""
    ended: float | None = None
    is_lost: bool = False
    """The node did not come back."""

    @property
    def seconds(self) -> float:
        """How long it lasted, after-effects included."""
        return (self.ended or time.monotonic()) - self.began


@dataclass
class Watch:
    """What the router says of its nodes, looked at all the time."""

    cluster: ChaosCluster
    view: dict[str, Any] | None = None
    usable_since: dict[str, float] = field(default_factory=dict)
    """By node, and ``router``: since when it has been usable without a break."""
    seen_at: dict[str, float] = field(default_factory=dict)
    """When the latest look that found it usable began: a look may take long, and what it finds is
    then old.
    """
    incarnations: dict[str, str] = field(default_factory=dict)

    async def run(self) -> None:
        """For ever; ends by cancellation."""
        async with aiohttp.ClientSession() as session:
            while True:
                began = time.monotonic()
                self.view = await self.cluster.status(session)
                self._note(began)
                await asyncio.sleep(POLL_S)

    def _note(self, now: float) -> None:
        view = self.view
        nodes = view["nodes"] if view else {}
        usable = {name for name, node in nodes.items() if node["is_usable"]}
        if view is not None and not view["is_stopping"]:
            usable.add(ROUTER)
        for name in (ROUTER, *self.cluster.shape.nodes):
            incarnation = nodes.get(name, {}).get("incarnation", "")
            if name not in usable or incarnation != self.incarnations.get(name, incarnation):
                self.usable_since.pop(name, None)
            if name in usable:
                self.usable_since.setdefault(name, now)
                self.seen_at[name] = now
                self.incarnations[name] = incarnation

    def is_back(self, node: str, after: float, old_life: str, settle_s: float) -> bool:
        """Whether it has been usable for long enough since ``after``, in another life when
        ``old_life`` names one.
        """
        since = self.usable_since.get(node)
        if since is None or (old_life and self.incarnations.get(node) == old_life):
            return False
        return self.seen_at[node] - max(since, after) > settle_s


class Chaos:
    """Makes the faults. ``faults`` holds all of them, also those that still last."""

    def __init__(self, cluster: ChaosCluster, watch: Watch, rng: Random) -> None:
        self.faults: list[Fault] = []
        self._cluster = cluster
        self._watch = watch
        self._rng = rng
        self._owed: list[str] = []
        self._gone: set[str] = set()

    async def run(
        self, until: float, kinds: tuple[str, ...] = KINDS, *, each: bool = False
    ) -> None:
        """Faults until that moment of the monotonic clock, and with ``each`` until every kind has
        been made; returns when all of them are over.
        """
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until or (each and not self._has_made(kinds)):
                kind = self._next_kind(kinds)
                pause = self._rng.uniform(*PAUSE_S)
                share, lasting = self._rng.random(), self._rng.random()
                is_crowd = self._rng.random() < CROWD_SHARE
                await asyncio.sleep(pause)
                if not is_crowd:
                    patience = time.monotonic() + QUIET_LIMIT_S if each else until
                    await self._until_quiet(patience)
                node = self._victim(kind, share)
                if node is not None:
                    fault = Fault(kind, node, time.monotonic())
                    self.faults.append(fault)
                    group.create_task(self._make(fault, lasting))
                else:
                    self._owed.append(kind)

    async def terminate_an_agent(self) -> None:
        """The last fault: a node leaves for good, and the others serve on."""
        node = self._victim(LAST_KIND, self._rng.random())
        assert node is not None
        fault = Fault(LAST_KIND, node, time.monotonic())
        self.faults.append(fault)
        await self._make(fault, 0.0)

    def _has_made(self, kinds: tuple[str, ...]) -> bool:
        return {fault.kind for fault in self.faults} >= set(kinds)

    async def _until_quiet(self, until: float) -> None:
        """No fault lasts any more, or that moment has come."""
        while self._hit():
            if time.monotonic() > until:
                return
            await asyncio.sleep(POLL_S)

    def _hit(self) -> set[str]:
        """The nodes with a fault that still lasts."""
        return {fault.node for fault in self.faults if fault.ended is None}

    def _next_kind(self, kinds: tuple[str, ...]) -> str:
        """Each kind once in every so many, in a random order."""
        if not self._owed:
            self._owed = self._rng.sample(kinds, len(kinds))
        return self._owed.pop(0)

    def _victim(self, kind: str, share: float) -> str | None:
        """A node without a fault, four times of five one with a whole companion in its pool; None
        when there is none.
        """
        hit = self._hit()
        if kind.endswith("router"):
            return None if ROUTER in hit else ROUTER
        whole = [n for n in self._cluster.shape.nodes if n not in hit | self._gone]
        spared = [n for n in whole if any(o != n and _pool(o) == _pool(n) for o in whole)]
        pool = spared if spared and (share * 1000) % 5 >= 1 else whole
        return pool[int(share * len(pool))] if pool else None

    async def _make(self, fault: Fault, lasting: float) -> None:
        try:
            await self._MAKERS[fault.kind](self, fault, lasting)
        finally:
            fault.ended = time.monotonic()

    # One coroutine per kind; ``lasting`` is drawn from [0, 1)

    async def _kill_engine(self, fault: Fault, lasting: float) -> None:
        processes = await self._processes(fault)
        kill_all((processes.vital[int(lasting * len(processes.vital))],))
        await self._until_new_life(fault)

    async def _kill_agent(self, fault: Fault, lasting: float) -> None:
        processes = await self._processes(fault)
        kill_all((processes.agent,))
        await self._until_new_life(fault)

    async def _kill_guard(self, fault: Fault, lasting: float) -> None:
        processes = await self._processes(fault)
        kill_all((processes.guard,))
        await self._until_new_life(fault)

    async def _terminate_engine(self, fault: Fault, lasting: float) -> None:
        processes = await self._processes(fault)
        _send(processes.engine[:1], signal.SIGTERM)
        await self._until_new_life(fault)

    async def _stop_shortly(self, fault: Fault, lasting: float) -> None:
        """Shorter than anybody's limit."""
        await self._stop(fault, 0.05 + lasting * 0.9 * self._limits.node_silence_limit_s)
        await self._until_back(fault, SETTLE_S)

    async def _stop_for_long(self, fault: Fault, lasting: float) -> None:
        """Longer than the router's limit; half of the time longer than the agent's too, which then
        kills it.
        """
        limits = self._limits
        longest = 2 * limits.engine_silence_limit_s
        await self._stop(fault, limits.node_silence_limit_s * 1.5 + lasting * longest)
        await self._until_back(fault, SETTLE_S)

    async def _stop_then_kill(self, fault: Fault, lasting: float) -> None:
        processes = await self._processes(fault)
        _send(processes.engine, signal.SIGSTOP)
        await asyncio.sleep(0.1 + 3 * lasting)
        kill_all(processes.engine)
        await self._until_new_life(fault)

    async def _stop_agent(self, fault: Fault, lasting: float) -> None:
        processes = await self._processes(fault)
        await self._hold((processes.agent,), 0.5 + lasting * 3 * self._limits.node_silence_limit_s)
        await self._until_back(fault, SETTLE_S)

    async def _terminate_agent(self, fault: Fault, lasting: float) -> None:
        processes = await self._processes(fault)
        _send((processes.agent,), signal.SIGTERM)
        self._gone.add(fault.node)
        await self._until(fault, lambda: self._cluster.has_left(fault.node))

    async def _kill_router(self, fault: Fault, lasting: float) -> None:
        old = await asyncio.to_thread(self._cluster.router_pid)
        kill_all((old,))
        await self._until_another_router(old)
        await self._until_whole(fault)

    async def _stop_router(self, fault: Fault, lasting: float) -> None:
        seconds = 0.2 + lasting * 2 * self._limits.node_silence_limit_s
        fault.detail = f"for {seconds:.1f} s"
        await self._hold((await asyncio.to_thread(self._cluster.router_pid),), seconds)
        await self._until_whole(fault)

    async def _terminate_router(self, fault: Fault, lasting: float) -> None:
        old = await asyncio.to_thread(self._cluster.router_pid)
        _send((old,), signal.SIGTERM)
        await self._until_another_router(old)
        await self._until_whole(fault)

    async def _cut(self, fault: Fault, lasting: float) -> None:
        """One kind of link of a node, or all of them; one in five for longer than a request waits
        for its first token.
        """
        mode = "freeze" if fault.kind == "freeze link" else "reset"
        chosen = int(lasting * 4000) % 4
        links = [f"{fault.node}/{link}" for link in (LINKS if chosen == 3 else LINKS[chosen:][:1])]
        seconds = 0.2 + lasting**2 * 1.5 * self._limits.first_token_deadline_s
        fault.detail = f"{', '.join(links)} for {seconds:.1f} s"
        relay = self._cluster.relay
        await asyncio.to_thread(relay.cut, links, mode)
        try:
            await asyncio.sleep(seconds)
        finally:
            relay.heal(links)
        await self._until_back(fault, LINK_SETTLE_S)

    _MAKERS = {  # noqa: RUF012 - never changed
        "kill engine": _kill_engine,
        "kill agent": _kill_agent,
        "kill guard": _kill_guard,
        "kill router": _kill_router,
        "stop engine shortly": _stop_shortly,
        "stop engine for long": _stop_for_long,
        "stop then kill engine": _stop_then_kill,
        "stop agent": _stop_agent,
        "terminate engine": _terminate_engine,
        "stop router": _stop_router,
        "terminate router": _terminate_router,
        "freeze link": _cut,
        "reset link": _cut,
        LAST_KIND: _terminate_agent,
    }

    @property
    def _limits(self) -> Bounds:
        return self._cluster.shape.bounds

    async def _processes(self, fault: Fault) -> NodeProcesses:
        fault.incarnation = self._watch.incarnations.get(fault.node, "")
        end = time.monotonic() + self._limits.recovery_limit_s
        while True:
            found = await asyncio.to_thread(self._cluster.processes_of, fault.node)
            if found.engine:
                fault.began = time.monotonic()
                return found
            assert time.monotonic() < end, f"no engine of {fault.node} lives: {found}"
            await asyncio.sleep(POLL_S)

    async def _stop(self, fault: Fault, seconds: float) -> None:
        processes = await self._processes(fault)
        await self._hold(processes.engine, seconds)
        fault.detail = f"for {seconds:.1f} s"

    async def _hold(self, pids: tuple[int | None, ...], seconds: float) -> None:
        _send(pids, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            _send(pids, signal.SIGCONT)

    async def _until_new_life(self, fault: Fault) -> None:
        watch, life = self._watch, fault.incarnation
        await self._until(fault, lambda: watch.is_back(fault.node, fault.began, life, SETTLE_S))

    async def _until_back(self, fault: Fault, settle_s: float) -> None:
        watch, now = self._watch, time.monotonic()
        await self._until(fault, lambda: watch.is_back(fault.node, now, "", settle_s))

    async def _until_another_router(self, old: int | None) -> None:
        """A new process, or the end of the time for it; whether it serves is not asked here."""
        end = time.monotonic() + self._limits.recovery_limit_s
        while await asyncio.to_thread(self._cluster.router_pid) in (None, old):
            if time.monotonic() > end:
                return
            await asyncio.sleep(POLL_S)

    async def _until_whole(self, fault: Fault) -> None:
        """The router is back, and so are the nodes that have no fault of their own."""
        watch, now = self._watch, time.monotonic()

        def is_whole() -> bool:
            nodes = [n for n in self._cluster.shape.nodes if n not in self._hit() | self._gone]
            return all(watch.is_back(name, now, "", SETTLE_S) for name in (ROUTER, *nodes))

        await self._until(fault, is_whole)

    async def _until(self, fault: Fault, condition: Any) -> None:
        end = time.monotonic() + self._limits.recovery_limit_s
        while not condition():
            if time.monotonic() > end:
                fault.is_lost = True
                return
            await asyncio.sleep(POLL_S)


def _send(pids: tuple[int | None, ...], number: signal.Signals) -> None:
    for pid in pids:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _pool(node: str) -> str:
    return node.partition("-")[0]

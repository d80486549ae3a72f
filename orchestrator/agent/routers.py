"""The routers of the cluster, as one agent sees them: a connection to each, and what each has said.

Every report goes to all of them. Routers share nothing else: what one has placed on the node, the
agent tells the others, so that they leave it room. What only one router may decide (the node's
role) is decided by the agent, in the order in which the orders come.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from splitserve.orchestrator.agent.link import RouterLink
from splitserve.orchestrator.agent.messages import (
    Dismiss,
    OtherRouter,
    OtherRouters,
    RefuseNode,
    RouterLoad,
    TellLoad,
    Welcome,
    is_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from splitserve.orchestrator.agent.life import Life
    from splitserve.orchestrator.agent.messages import (
        AgentHello,
        EngineDied,
        LoadingProgress,
        NodePrefixes,
        NodeState,
        NodeTransfers,
        Role,
        ToAgent,
    )
    from splitserve.orchestrator.config import TlsConfig

NO_LOAD = RouterLoad()


class SeenRouter:
    """One router: the connection to it and what it has said over the present one."""

    def __init__(self, number: int) -> None:
        self.number = number
        """Of its URL among those that the agent was given."""
        self.link: RouterLink
        self.forget()

    def forget(self) -> None:
        """The connection has ended: the next one may lead to another process."""
        self.answered = ""
        """The incarnation that it has said something of: that it uses it, or why not."""
        self.refused = ""
        """Why it will not use the node, empty while it does."""
        self.name = ""
        self.index = 0
        self.load = NO_LOAD

    def knows(self, life: Life | None) -> bool:
        """Whether it is there, and has said whether it uses this engine."""
        return self.link.connected and life is not None and self.answered == life.incarnation


class Routers:
    """All of them. ``on_message`` is awaited for each frame of each, those of one in their
    order.
    """

    def __init__(
        self,
        urls: Sequence[str],
        secret: bytes,
        on_message: Callable[[SeenRouter, ToAgent], Awaitable[None]],
        *,
        tls: TlsConfig | None = None,
    ) -> None:
        """Raises ``ConfigError`` for certificates that cannot be used."""
        self.all: list[SeenRouter] = []
        self._life: Life | None = None
        for number, url in enumerate(urls):
            seen = SeenRouter(number)
            seen.link = RouterLink(
                url, secret, partial(on_message, seen), tls=tls, on_lost=partial(self._lost, seen)
            )
            self.all.append(seen)

    async def run(self) -> None:
        """Keep the connections for ever; ends by cancellation."""
        async with asyncio.TaskGroup() as group:
            for router in self.all:
                group.create_task(router.link.run())

    # What they have said

    def heard(self, router: SeenRouter, message: Welcome | RefuseNode, life: Life | None) -> None:
        """The router uses the node, or says why not."""
        router.answered = life.incarnation if life is not None else ""
        if isinstance(message, RefuseNode):
            router.refused = message.reason
            return
        router.refused, router.name, router.index = "", message.router, message.index
        router.load = NO_LOAD
        self._tell_others(life)

    def load(self, router: SeenRouter, message: TellLoad, life: Life | None) -> None:
        """The router has placed something, or has got it back."""
        if life is not None and life.incarnation == message.incarnation:
            router.load = message.load
            self._tell_others(life)

    @property
    def connected(self) -> bool:
        """Whether there is any."""
        return any(router.link.connected for router in self.all)

    async def lost(self) -> None:
        """Returns when there is none."""
        while self.connected:
            for router in self.all:
                await router.link.lost()

    def all_know(self, life: Life | None) -> bool:
        """Whether every router is there, and has said whether it uses this engine."""
        return all(router.knows(life) for router in self.all)

    def any_uses(self, life: Life | None) -> bool:
        """Whether some router gives this engine work."""
        return any(router.knows(life) and not router.refused for router in self.all)

    @property
    def refused(self) -> str:
        """Why one of them will not use the node; empty when none refuses it."""
        return next((router.refused for router in self.all if router.refused), "")

    def dismissal(self, life: Life) -> Dismiss | None:
        """The order to end a draining engine: of one router at once, else of all that are there
        and may have something out on it. None while it has not come.
        """
        given = life.dismissals
        for order in given.values():
            if order.at_once:
                return order
        waits = any(
            router.link.connected and not router.refused and router.number not in given
            for router in self.all
        )
        return None if waits else next(iter(given.values()), None)

    # What they are told

    def hello(self, hello: AgentHello | None, life: Life | None) -> None:
        """The engine that runs now, None when there is none."""
        for router in self.all:
            router.load = NO_LOAD
            router.link.hello(hello)
        self._tell_others(life)

    def set_role(self, role: Role, epoch: int) -> None:
        """Hellos on later connections say so."""
        for router in self.all:
            router.link.set_role(role, epoch)

    def died(self, report: EngineDied) -> None:
        """An engine's processes are proven gone."""
        for router in self.all:
            router.link.died(report)

    def fresh(self, frame: NodeState | LoadingProgress) -> None:
        """The newest state."""
        for router in self.all:
            router.link.fresh(frame)

    @property
    def can_take_prefixes(self) -> bool:
        """Whether every router that is there would get a report of prefixes; one that does not read
        is disconnected soon.
        """
        there = [router.link for router in self.all if router.link.connected]
        return bool(there) and all(link.can_take_prefixes for link in there)

    def prefixes(self, frame: NodePrefixes) -> None:
        """To all that are there."""
        for router in self.all:
            if router.link.connected:
                router.link.prefixes(frame)

    def transfers(self, frame: NodeTransfers) -> None:
        """Each router gets the facts of its own requests; what is nobody's goes to all of them."""
        if len(self.all) == 1:
            self.all[0].link.transfers(frame)
            return
        names = {router.name for router in self.all if router.name}
        for router in self.all:
            others = names - {router.name}
            own = tuple(
                facts
                for facts in frame.ended
                if not any(is_of(facts.transfer_id, name) for name in others)
            )
            if own:
                router.link.transfers(structs.replace(frame, ended=own))

    async def flush(self, timeout_s: float) -> None:
        """Wait until every report of a death was sent to those that are there, at most
        ``timeout_s``.
        """
        await asyncio.gather(*(router.link.flush(timeout_s) for router in self.all))

    def _lost(self, router: SeenRouter) -> None:
        router.forget()
        self._tell_others(self._life)

    def _tell_others(self, life: Life | None) -> None:
        """Every router that uses the engine knows what the others have placed on it."""
        self._life = life
        if life is None or len(self.all) == 1:
            return
        known = [router for router in self.all if router.knows(life) and router.name]
        for reader in known:
            others = tuple(
                OtherRouter(name=other.name, index=other.index, load=other.load)
                for other in known
                if other is not reader
            )
            reader.link.others(
                OtherRouters(
                    node=life.node,
                    incarnation=life.incarnation,
                    others=others,
                    seen=reader.load,
                )
            )

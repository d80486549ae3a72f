"""Drives the core: hands it facts with the monotonic clock, performs its orders, wakes it in time.

Facts that arise while orders are being performed wait for their turn, so the core's orders are
performed in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING

from splitserve.orchestrator.core import effects as ef
from splitserve.orchestrator.core.breaker import BreakerState
from splitserve.orchestrator.core.events import (
    DecodeFailed,
    DrainRequested,
    Event,
    FlipRequested,
    ForgetRequested,
    PrefillFailed,
    TimePassed,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from splitserve.orchestrator.core.events import RequestArrived
    from splitserve.orchestrator.core.router_core import RouterCore
    from splitserve.orchestrator.router.agents import AgentHub
    from splitserve.orchestrator.router.engine_client import EngineClient
    from splitserve.orchestrator.router.exchange import Exchange
    from splitserve.orchestrator.router.incidents import Incidents
    from splitserve.orchestrator.router.token_counts import Tally


_log = logging.getLogger(__name__)

CLOCK_STEP_S = 0.001
"""The loop's timers count in milliseconds and may fire one early; the core's clock is finer."""


class CoreDriver:
    """The only caller of ``RouterCore.handle`` in a router."""

    def __init__(
        self,
        core: RouterCore,
        client: EngineClient,
        agents: AgentHub,
        secret: bytes,
        on_end: Callable[[ef.Timeline, Tally], None],
        incidents: Incidents,
    ) -> None:
        self.core = core
        self.name = secrets.token_hex(4)
        """This router's: no other one has had it, and ids of its requests have it in them."""
        self.client = client
        self.secret = secret
        self.exchanges: dict[str, Exchange] = {}
        self.on_arrival: Callable[[RequestArrived], None] | None = None
        """Who wants to know what comes."""
        self._agents = agents
        self._on_end = on_end
        self._incidents = incidents
        self._loop = asyncio.get_running_loop()
        self._facts: deque[Event] = deque()
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._shortest_wait_s = core.shortest_wait_s
        self._idle: asyncio.Event | None = None
        self._operators: dict[int, Callable[[Any], None]] = {}
        """Who waits for the answer to an order, by its ticket."""
        self._tickets = itertools.count(1)
        self._performers: dict[type, Callable[[Any], None]] = {
            ef.StartPair: lambda order: self.exchanges[order.request_id].start_pair(order),
            ef.StartPrefill: lambda order: self.exchanges[order.request_id].start_prefill(order),
            ef.StartDecode: lambda order: self.exchanges[order.request_id].start_decode(order),
            ef.StartAlone: lambda order: self.exchanges[order.request_id].start_alone(order),
            ef.CancelLeg: lambda order: self.exchanges[order.request_id].cancel_leg(order.leg),
            ef.DoubtLeg: lambda order: self.exchanges[order.request_id].doubt_decode(order),
            ef.AnswerError: lambda order: self.exchanges[order.request_id].answer_error(order),
            ef.PassRefusal: lambda order: self.exchanges[order.request_id].pass_refusal(),
            ef.EndRequest: self._end_request,
            ef.AcceptNode: agents.accept,
            ef.RefuseNode: agents.refuse,
            ef.DrainNode: agents.drain,
            ef.DismissNode: agents.dismiss,
            ef.AnswerDrain: lambda order: self._operators.pop(order.ticket)(order),
            ef.AnswerFlip: lambda order: self._operators.pop(order.ticket)(order),
            ef.AnswerForget: lambda order: self._operators.pop(order.ticket)(order),
            ef.SetRole: agents.set_role,
            ef.LearnRole: agents.learn_role,
            ef.TellLoad: agents.tell_load,
            ef.FailTransfer: agents.fail_transfer,
            ef.RetargetTransfer: agents.retarget_transfer,
            ef.AnnounceDeath: agents.announce_death,
            ef.EndEngine: agents.end_engine,
            ef.ReportBreaker: self._report_breaker,
        }

    def admit(self, exchange: Exchange, event: RequestArrived) -> None:
        """A new request: its exchange hears the core's orders from now on."""
        self.exchanges[exchange.id] = exchange
        if self.on_arrival is not None and event.needs_kv:
            self.on_arrival(event)
        self.tell(event)

    def drain(
        self,
        node: str,
        *,
        restarts: bool,
        is_forced: bool,
        timeout_s: float | None,
        answer: Callable[[ef.AnswerDrain], None],
    ) -> None:
        """An operator wants a node drained; ``answer`` is called with the core's verdict."""
        ticket = next(self._tickets)

        def answered(order: ef.AnswerDrain) -> None:
            if order.verdict == "draining":
                self._incidents.note("draining", node, order.message)
            answer(order)

        self._operators[ticket] = answered
        self.tell(DrainRequested(ticket, node, restarts, is_forced, timeout_s))
        # A drain's deadline may be nearer than any that the core arms by itself
        self._arm_timer()

    def flip(
        self,
        node: str,
        role: str,
        *,
        is_forced: bool = False,
        answer: Callable[[ef.AnswerFlip], None],
    ) -> None:
        """A node is to change its role; ``answer`` is called with the core's verdict."""
        ticket = next(self._tickets)

        def answered(order: ef.AnswerFlip) -> None:
            _log.info("flip of %s to %s: %s: %s", node, role, order.verdict, order.message)
            if order.verdict == "flipped":
                self._incidents.note("flipped", node, order.message)
            answer(order)

        self._operators[ticket] = answered
        self.tell(FlipRequested(ticket, node, role, is_forced))

    def forget(self, node: str, *, answer: Callable[[ef.AnswerForget], None]) -> None:
        """A node is no part of the cluster any more; ``answer`` is called with the core's
        verdict.
        """
        ticket = next(self._tickets)

        def answered(order: ef.AnswerForget) -> None:
            if order.verdict == "forgotten":
                self._agents.forget(node)
            answer(order)

        self._operators[ticket] = answered
        self.tell(ForgetRequested(ticket, node))

    def tell(self, event: Event) -> None:
        """A fact; its orders are performed before this returns, unless orders are being performed
        already.
        """
        self._facts.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._facts:
                fact = self._facts.popleft()
                now = time.monotonic()
                if self._timer is not None and self._timer_at <= now:
                    self._catch_up(now)
                self._perform(self.core.handle(fact, now))
        finally:
            self._is_busy = False
        if self._timer is None or self._timer_at > now + self._shortest_wait_s:
            self._arm_timer()

    def _catch_up(self, now: float) -> None:
        """A timer is late because the loop was busy: waits that are over end before anything else
        happens, so nothing is sent for a client that was due its answer.
        """
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        self._perform(self.core.handle(TimePassed(), now))

    def _perform(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            try:
                self._performers[type(effect)](effect)
            except Exception as error:
                self._order_failed(effect, error)

    def _order_failed(self, effect: ef.Effect, error: Exception) -> None:
        """A fault in carrying out an order ends its own request and no other."""
        _log.error("the router could not carry out %r", effect, exc_info=error)
        reason = f"the router could not send the request: {error}"
        if isinstance(effect, ef.StartPair | ef.StartDecode | ef.StartAlone):
            failed = DecodeFailed(effect.request_id, effect.attempt, reason, is_engine_fault=False)
            self._facts.append(failed)
        elif isinstance(effect, ef.StartPrefill):
            self._facts.append(
                PrefillFailed(effect.request_id, effect.attempt, reason, is_engine_fault=False)
            )
        elif isinstance(effect, ef.AnswerError | ef.PassRefusal):
            self.exchanges[effect.request_id].give_up()

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Until no request is left, at most ``timeout_s``."""
        if not self.exchanges:
            return
        self._idle = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def close(self) -> None:
        """No timer fires any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _end_request(self, order: ef.EndRequest) -> None:
        exchange = self.exchanges.pop(order.timeline.request_id)
        self._on_end(order.timeline, exchange.tally())
        if self._idle is not None and not self.exchanges:
            self._idle.set()

    def _arm_timer(self) -> None:
        due = self.core.next_deadline()
        if due is None or (self._timer is not None and self._timer_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self._loop.call_later(
            max(0.0, due - time.monotonic()) + CLOCK_STEP_S, self._time_passed
        )

    def _time_passed(self) -> None:
        self._timer = None
        self.tell(TimePassed())
        self._incidents.note_silence(self.core.membership.nodes.values())

    def _report_breaker(self, order: ef.ReportBreaker) -> None:
        """One line in the log, whose level follows what an operator should look at. A try of a node
        is no incident.
        """
        reason = f": {order.reason}" if order.reason else ""
        text = f"breaker of {order.leg} legs is {order.state}{reason}"
        is_closed = order.state == BreakerState.CLOSED.value
        _log.log(logging.INFO if is_closed else logging.WARNING, "%s: %s", order.node, text)
        if is_closed:
            self._incidents.note("breaker_closed", order.node, text)
        elif order.state == BreakerState.OPEN.value:
            self._incidents.note("breaker_open", order.node, text)

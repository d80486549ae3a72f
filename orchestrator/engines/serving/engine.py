"""The loop of an engine that runs in our own process: schedule, compute, report; one asyncio task.

As in vLLM, requests come in and are aborted only between steps, a step without work still carries
the connector's orders, and an engine with open transfers keeps stepping, a short nap apart. What
computing is, an engine says in ``_compute``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.orchestrator.engines.serving.scheduler import Request, Status, StepPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.kv_transfer.orders import TransferResults
    from splitserve.orchestrator.engines.serving.connector import Connector, NoConnector
    from splitserve.orchestrator.engines.serving.scheduler import Scheduler

NAP_S = 0.001
"""Between steps that compute nothing while a transfer is open."""
IDLE_LOOK_S = 0.05
"""How often an idle engine looks for orders of its agent."""


class EngineDeadError(RuntimeError):
    """The engine's loop has failed; no request will get an answer."""


@dataclass(frozen=True)
class Likelihoods:
    """Natural logarithms of the probabilities of one place in an answer."""

    chosen: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logarithm) of the likeliest ones, as many as were asked for."""


@dataclass(frozen=True)
class Sampled:
    """A step's new token of one request."""

    token: int
    likelihoods: Likelihoods | None = None
    """When the request asked for them."""


@dataclass(frozen=True)
class NewToken:
    """One more token of an answer. ``finish_reason`` is set with the last."""

    index: int
    """The submitter's name for the request."""
    sampled: Sampled
    finish_reason: str | None
    cached_tokens: int


@dataclass(frozen=True)
class EngineFailed:
    """There will be no more tokens."""

    reason: str


Answers = asyncio.Queue[NewToken | EngineFailed]
"""Where the tokens of one client's requests go; bounded by their ``max_tokens``."""


@dataclass(eq=False)
class _Task:
    request: Request
    answers: Answers
    index: int


@dataclass
class Totals:
    """What the engine has done since it started."""

    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(eq=False)
class Engine(ABC):
    """Requests in, tokens out. Used from one event loop."""

    scheduler: Scheduler
    connector: Connector | NoConnector
    failure: BaseException | None = None
    totals: Totals = field(default_factory=Totals)
    _tasks: dict[str, _Task] = field(default_factory=dict)
    _arrivals: deque[Request] = field(default_factory=deque)
    _aborts: deque[Request] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, request: Request, answers: Answers, index: int = 0) -> None:
        """The answer's tokens will come into ``answers``. Raises ``EngineDeadError``."""
        if self.failure is not None:
            raise EngineDeadError(f"the engine has failed: {self.failure}")
        self._tasks[request.id] = _Task(request, answers, index)
        self._arrivals.append(request)
        self._wake.set()

    def abort(self, request: Request) -> None:
        """Nobody waits for the answer any more; harmless when it is complete."""
        if self._tasks.pop(request.id, None) is not None:
            self._aborts.append(request)
            self._wake.set()

    async def run(self) -> None:
        """Serve until cancelled. Raises what made the engine fail, after every client was told."""
        try:
            while True:
                self._take_in()
                while self._is_held():
                    self._wake.clear()
                    await self._wake.wait()
                    self._take_in()
                plan = self.scheduler.schedule()
                await self._step(plan)
                await self._rest(plan)
        except Exception as error:
            self.failure = error
            for task in self._tasks.values():
                task.answers.put_nowait(EngineFailed(f"the engine has failed: {error!r}"))
            raise

    # -- what an engine is ---------------------------------------------------------------------

    @abstractmethod
    async def _compute(self, plan: StepPlan) -> Mapping[str, Sampled]:
        """The step's forward pass; the connector hears of every layer, in order, also when the
        plan is empty. The new token of each request whose chunk ``samples``.
        """

    def _is_held(self) -> bool:
        """Whether no step may begin now; ``_wake`` makes the engine look again."""
        return False

    def _reported(self, results: TransferResults) -> TransferResults:
        """What of the step's results the scheduler is told now."""
        return results

    # -- the loop ------------------------------------------------------------------------------

    def _take_in(self) -> None:
        while self._arrivals:
            self.scheduler.add(self._arrivals.popleft())
        while self._aborts:
            self.scheduler.abort(self._aborts.popleft())

    async def _step(self, plan: StepPlan) -> None:
        if plan.preempted:
            await asyncio.to_thread(self.connector.begin_step, plan)
        else:
            self.connector.begin_step(plan)
        sampled = await self._compute(plan)
        results = self._reported(self.connector.end_step())
        tokens = {name: new.token for name, new in sampled.items()}
        for progress in self.scheduler.update(plan, tokens, results):
            self._deliver(progress.request, sampled[progress.request.id])

    async def _rest(self, plan: StepPlan) -> None:
        """Let others run; wait when there is nothing to compute."""
        if plan.chunks or self._arrivals or self._aborts or self.connector.has_orders:
            await asyncio.sleep(0)
        elif self.scheduler.has_work or self.scheduler.awaits_reports:
            await asyncio.sleep(NAP_S)
        else:
            self._wake.clear()
            try:
                async with asyncio.timeout(IDLE_LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _deliver(self, request: Request, sampled: Sampled) -> None:
        self.totals.generated_tokens += 1
        if len(request.answer) == 1:
            self.totals.prompt_tokens += len(request.prompt)
        task = self._tasks.get(request.id)
        if task is None:
            return
        task.answers.put_nowait(
            NewToken(task.index, sampled, request.finish_reason, request.cached)
        )
        if request.status is Status.FINISHED:
            del self._tasks[request.id]

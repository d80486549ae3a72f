"""The mock engine's loop: schedule, compute layer by layer, report; one asyncio task that does all
of it.

As in vLLM, requests come in and are aborted only between steps, a step without work still carries
the connector's orders, and an engine with open transfers keeps stepping, a short nap apart.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.orchestrator.engines.mock.scheduler import Request, Status, StepPlan
from splitserve.orchestrator.engines.mock.timing import Landings, StepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.engines.mock.connector import Connector, NoConnector
    from splitserve.orchestrator.engines.mock.faults import FaultBox
    from splitserve.orchestrator.engines.mock.model import KvMemory, MockModel, States
    from splitserve.orchestrator.engines.mock.scheduler import Scheduler
    from splitserve.orchestrator.engines.mock.timing import Timing

NAP_S = 0.001
"""Between steps that compute nothing while a transfer is open."""
IDLE_LOOK_S = 0.05
"""How often an idle engine looks for orders of its agent."""


class EngineDeadError(RuntimeError):
    """The engine's loop has failed; no request will get an answer."""


@dataclass(frozen=True)
class NewToken:
    """One more token of an answer. ``finish_reason`` is set with the last."""

    index: int
    """The submitter's name for the request."""
    token: int
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
    states: States


class MockEngine:
    """Requests in, tokens out. Used from one event loop."""

    def __init__(
        self,
        model: MockModel,
        memories: Sequence[KvMemory],
        scheduler: Scheduler,
        connector: Connector | NoConnector,
        faults: FaultBox,
        timing: Timing,
    ) -> None:
        self.scheduler = scheduler
        self.failure: BaseException | None = None
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._model = model
        self._memories = memories
        self._connector = connector
        self._faults = faults
        self._timing = timing
        self._clock = StepClock(model.shape.layers)
        self._landings = Landings(timing)
        self._tasks: dict[str, _Task] = {}
        self._arrivals: deque[Request] = deque()
        self._aborts: deque[Request] = deque()
        self._wake = asyncio.Event()
        faults.on_change = self._wake.set

    def submit(self, request: Request, answers: Answers, index: int = 0) -> None:
        """The answer's tokens will come into ``answers``. Raises ``EngineDeadError``."""
        if self.failure is not None:
            raise EngineDeadError(f"the engine has failed: {self.failure}")
        self._tasks[request.id] = _Task(request, answers, index, self._model.states(()))
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
                while self._faults.holds_step(self._longest_answer_tokens()):
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

    def _take_in(self) -> None:
        while self._arrivals:
            self.scheduler.add(self._arrivals.popleft())
        while self._aborts:
            self.scheduler.abort(self._aborts.popleft())

    async def _step(self, plan: StepPlan) -> None:
        if plan.preempted:
            await asyncio.to_thread(self._connector.begin_step, plan)
        else:
            self._connector.begin_step(plan)
        self._landings.parked(self.scheduler.parked)
        sampled = await self._compute(plan)
        results = self._landings.held_back(self._connector.end_step(), self.scheduler.parked)
        for progress in self.scheduler.update(plan, sampled, results):
            self._deliver(progress.request, progress.token)

    async def _compute(self, plan: StepPlan) -> dict[str, int]:
        """The forward pass, layer by layer, each at its time; the new tokens."""
        if plan.chunks:
            self._clock.begin(
                self._timing.step_s(plan),
                computes_prompts=any(not chunk.request.answer for chunk in plan.chunks),
            )
        else:
            self._clock.rest()
        states = {chunk.request.id: self._states_of(chunk.request) for chunk in plan.chunks}
        sampled: dict[str, int] = {}
        for layer in range(self._model.shape.layers):
            if plan.chunks:
                await self._faults.reach_layer(layer)
            for chunk in plan.chunks:
                new = states[chunk.request.id][chunk.first : chunk.first + chunk.tokens]
                for memory in self._memories:
                    self._model.write(memory, layer, new, chunk.first, chunk.block_ids)
            if plan.chunks:
                if layer == self._model.shape.layers - 1:
                    sampled = self._sample(plan)
                await self._clock.layer_due(layer, self._look_for_landings())
            self._connector.layer_done(layer)
        return sampled

    def _look_for_landings(self) -> Callable[[], None] | None:
        """What notes when a prompt lands in the middle of a step; None when that does not matter or
        none is on its way.
        """
        if not (self._timing.delays_landings and self.scheduler.parked):
            return None
        return lambda: self._landings.seen(self._connector.look())

    def _sample(self, plan: StepPlan) -> dict[str, int]:
        return {
            chunk.request.id: self._model.next_token(
                self._memories, chunk.block_ids, chunk.request.length
            )
            for chunk in plan.chunks
            if chunk.samples
        }

    def _states_of(self, request: Request) -> States:
        task = self._tasks.get(request.id)
        if task is None:  # aborted while the step was being planned; it ends before the next one
            return self._model.states(request.tokens)
        task.states = self._model.states(request.tokens, task.states)
        return task.states

    async def _rest(self, plan: StepPlan) -> None:
        """Let others run; wait when there is nothing to compute."""
        if plan.chunks or self._arrivals or self._aborts or self._connector.has_orders:
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

    def _deliver(self, request: Request, token: int) -> None:
        self.generated_tokens += 1
        if len(request.answer) == 1:
            self.prompt_tokens += len(request.prompt)
        task = self._tasks.get(request.id)
        if task is None:
            return
        task.answers.put_nowait(NewToken(task.index, token, request.finish_reason, request.cached))
        if request.status is Status.FINISHED:
            del self._tasks[request.id]

    def _longest_answer_tokens(self) -> int:
        return max((len(task.request.answer) for task in self._tasks.values()), default=0)

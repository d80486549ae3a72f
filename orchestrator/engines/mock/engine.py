"""The mock engine: computes its model's KV layer by layer, each at its time, and holds and fails
where a test has asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.engines.mock.timing import Landings, StepClock
from splitserve.orchestrator.engines.serving.engine import Engine, Sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.orders import TransferResults
    from splitserve.orchestrator.engines.mock.faults import FaultBox
    from splitserve.orchestrator.engines.mock.model import KvMemory, MockModel, States
    from splitserve.orchestrator.engines.mock.timing import Timing
    from splitserve.orchestrator.engines.serving.connector import Connector, NoConnector
    from splitserve.orchestrator.engines.serving.scheduler import Request, Scheduler, StepPlan


class MockEngine(Engine):
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
        super().__init__(scheduler, connector)
        self._model = model
        self._memories = memories
        self._faults = faults
        self._timing = timing
        self._clock = StepClock(model.shape.layers)
        self._landings = Landings(timing)
        self._states: dict[str, States] = {}
        """By request that somebody waits for."""
        faults.on_change = self._wake.set

    def _is_held(self) -> bool:
        longest = max((len(task.request.answer) for task in self._tasks.values()), default=0)
        return self._faults.holds_step(longest)

    def _reported(self, results: TransferResults) -> TransferResults:
        return self._landings.held_back(results, self.scheduler.parked)

    async def _compute(self, plan: StepPlan) -> dict[str, Sampled]:
        """The forward pass, layer by layer, each at its time; the new tokens."""
        self._landings.parked(self.scheduler.parked)
        if plan.chunks:
            self._clock.begin(
                self._timing.step_s(plan),
                computes_prompts=any(not chunk.request.answer for chunk in plan.chunks),
            )
        else:
            self._clock.rest()
        states = {chunk.request.id: self._states_of(chunk.request) for chunk in plan.chunks}
        sampled: dict[str, Sampled] = {}
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
            self.connector.layer_done(layer)
        self._states = {name: known for name, known in self._states.items() if name in self._tasks}
        return sampled

    def _look_for_landings(self) -> Callable[[], None] | None:
        """What notes when a prompt lands in the middle of a step; None when that does not matter or
        none is on its way.
        """
        if not (self._timing.delays_landings and self.scheduler.parked):
            return None
        return lambda: self._landings.seen(self.connector.look())

    def _sample(self, plan: StepPlan) -> dict[str, Sampled]:
        return {
            chunk.request.id: Sampled(
                self._model.next_token(self._memories, chunk.block_ids, chunk.request.length)
            )
            for chunk in plan.chunks
            if chunk.samples
        }

    def _states_of(self, request: Request) -> States:
        states = self._model.states(request.tokens, self._states.get(request.id))
        self._states[request.id] = states
        return states

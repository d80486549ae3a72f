"""A seeded request whose prompt takes several steps, on CPU.

vLLM samples at the end of every step, also where a prompt goes on in the next one, and throws such
a token away. So that the seed's numbers are not used up by it, it moves the request's generator
back, in a way that only a GPU's generators have: on CPU the engine dies with all its requests
(``CPU Generator does not use offset``). Here the generators keep their state over that sampling
instead, and vLLM does not see them afterwards.

vLLM loads this module as a general plugin in each of its processes. It changes nothing unless
``SPLITSERVE_SEEDED_CHUNKS`` is 1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Generator
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

SEEDED_CHUNKS_ENV = "SPLITSERVE_SEEDED_CHUNKS"
_WRAPPED = ("_sample", "_bookkeeping_sync")


def install() -> None:
    """Model runners of this process move generators back on CPU too.

    Raises ``RuntimeError`` when this vLLM's runner works otherwise; vLLM logs it and goes on
    without the plugin.
    """
    if os.environ.get(SEEDED_CHUNKS_ENV) != "1":
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    for name in _WRAPPED:
        if not callable(getattr(CPUModelRunner, name, None)):
            raise RuntimeError(f"{SEEDED_CHUNKS_ENV}: this vLLM's CPUModelRunner has no {name}")
    sample, keep_books = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def _sample(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        states = [(each, each.get_state()) for each in _of_unfinished(self).values()]
        found = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return found

    def _bookkeeping_sync(self: CPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        hidden = _of_unfinished(self)
        generators = self.input_batch.generators
        for index in hidden:
            del generators[index]
        try:
            return keep_books(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    CPUModelRunner._sample = _sample
    CPUModelRunner._bookkeeping_sync = _bookkeeping_sync


def _of_unfinished(runner: CPUModelRunner) -> dict[int, Generator]:
    """Index in the batch to generator, of requests whose sampled token is thrown away."""
    count = runner.input_batch.num_reqs
    thrown_away = runner.discard_request_mask.np
    return {
        index: generator
        for index, generator in runner.input_batch.generators.items()
        if index < count and thrown_away[index]
    }

"""Generators of requests whose sampled token is thrown away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker import cpu_model_runner

from splitserve.orchestrator.engines.vllm import seeded_chunks
from splitserve.orchestrator.engines.vllm.seeded_chunks import SEEDED_CHUNKS_ENV


class Runner:
    """vLLM's as far as the plugin knows it: four requests, three with a seed, two of them in the
    middle of their prompt.
    """

    def __init__(self) -> None:
        generators = {index: torch.Generator().manual_seed(index) for index in (0, 1, 3)}
        self.input_batch = SimpleNamespace(num_reqs=4, generators=generators)
        self.discard_request_mask = SimpleNamespace(np=np.array([True, False, True, True, True]))

    def _sample(self, logits: str) -> dict[int, float]:
        found = self.input_batch.generators.items()
        return {index: float(torch.rand(1, generator=each)) for index, each in found} | {9: logits}

    def _bookkeeping_sync(self, *, fails: bool = False) -> list[int]:
        if fails:
            raise RuntimeError("the step has failed")
        return list(self.input_batch.generators)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With the plugin."""

    class Mended(Runner):
        pass

    monkeypatch.setattr(cpu_model_runner, "CPUModelRunner", Mended)
    monkeypatch.setenv(SEEDED_CHUNKS_ENV, "1")
    seeded_chunks.install()
    return Mended()


def test_what_is_thrown_away_uses_nothing_up(runner: Any) -> None:
    """The next step draws the same numbers again; who has got a token draws the next one."""
    first, second = runner._sample("logits"), runner._sample("logits")
    assert (second[0], second[3], second[9]) == (first[0], first[3], "logits")
    assert second[1] != first[1]
    plain = Runner()
    assert first == plain._sample("logits")
    assert second[1] == plain._sample("logits")[1]


def test_vllm_does_not_see_them(runner: Any) -> None:
    """While it keeps its books; afterwards they are there again, also when that fails."""
    assert runner._bookkeeping_sync() == [1]
    assert set(runner.input_batch.generators) == {0, 1, 3}
    with pytest.raises(RuntimeError, match="the step has failed"):
        runner._bookkeeping_sync(fails=True)
    assert set(runner.input_batch.generators) == {0, 1, 3}


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_vllm_is_untouched(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """Other engines of the same environment stay as they are."""
    monkeypatch.delenv(SEEDED_CHUNKS_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(SEEDED_CHUNKS_ENV, value)
    own = Runner._sample
    monkeypatch.setattr(cpu_model_runner, "CPUModelRunner", Runner)
    seeded_chunks.install()
    assert Runner._sample is own


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner without these steps is named, not silently left to die."""
    monkeypatch.setenv(SEEDED_CHUNKS_ENV, "1")
    monkeypatch.setattr(cpu_model_runner, "CPUModelRunner", type("Other", (), {}))
    with pytest.raises(RuntimeError, match=SEEDED_CHUNKS_ENV):
        seeded_chunks.install()

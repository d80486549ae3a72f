"""Loads for a controller without a cluster: requests come and end evenly, and are served as the
closed form expects of the nodes that there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from splitserve.orchestrator.tuner.capacity import Assumptions, ClosedForm, Sample
from splitserve.orchestrator.tuner.controller import (
    Controller,
    ControllerSettings,
    Decision,
    Finished,
    NodeSeen,
)
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

TARGETS = Targets(ttft_s=2.0, itl_s=0.06)
BATCH_TOKENS = 2048
PROFILE = Profile(
    model="m",
    engine="none 1",
    hardware="none",
    limits=EngineLimits(
        step_tokens=BATCH_TOKENS,
        sequences=128,
        block_tokens=16,
        total_blocks=8000,
        max_model_len=32_768,
    ),
    kv_bytes_per_token=1000,
    prefill=PrefillTime(exactly(0.01), exactly(5e-4), exactly(2e-9)),
    decode=DecodeTime(exactly(0.03), exactly(5e-4), exactly(4e-7)),
    transfers=(TransferTime("", "", exactly(0.005), exactly(5e9)),),
    request_s=0.005,
)


class Mix(NamedTuple):
    """Equal requests at an even pace."""

    rate_per_s: float
    prompt: int
    answer: int


PROMPTS = Mix(6.0, 1000, 30)
"""Wants three of four nodes for prefill."""
ANSWERS = Mix(6.0, 150, 300)
"""Wants one of four nodes for prefill."""
BALANCED = Mix(4.0, 600, 150)
"""Two of each will do."""


def nodes_of(prefill: int, decode: int) -> list[NodeSeen]:
    """So many nodes of each role."""
    return [NodeSeen(f"p{n}", "prefill") for n in range(prefill)] + [
        NodeSeen(f"d{n}", "decode") for n in range(decode)
    ]


class Story:
    """A controller and the time."""

    def __init__(self, settings: ControllerSettings | None = None) -> None:
        self.settings = settings or ControllerSettings(TARGETS, batch_tokens=BATCH_TOKENS)
        self.controller = Controller(PROFILE, self.settings)
        self.controller.begin(0.0)
        self.now = 0.0

    def window(self, mix: Mix, nodes: Sequence[NodeSeen], *, is_late: bool = False) -> Decision:
        """A window passes under that load; what is decided at its end."""
        seconds = self.settings.window_s
        count = round(mix.rate_per_s * seconds)
        working = [node for node in nodes if node.is_usable and not node.is_slow]
        decode = max(1, sum(node.role == "decode" for node in working))
        step_s = form_of(mix).expected(mix.rate_per_s, max(1, len(working) - decode), decode).step_s
        ttft_s = PROFILE.prefill.seconds(mix.prompt, 0) + PROFILE.request_s + 0.005 + 1.5 * step_s
        finished = Finished(mix.prompt, 0, mix.answer, mix.prompt)
        for number in range(count):
            at_s = self.now + seconds * number / count
            self.controller.arrived(at_s, mix.prompt)
            self.controller.served(at_s, finished, 9.0 if is_late else ttft_s, step_s)
        self.now += seconds
        return self.controller.decide(self.now, nodes)

    def windows(self, count: int, mix: Mix, nodes: Sequence[NodeSeen]) -> list[Decision]:
        """The same so many times; nothing is carried out."""
        return [self.window(mix, nodes) for _ in range(count)]


def form_of(mix: Mix) -> ClosedForm:
    """The closed form for equal requests."""
    ones = np.ones(20)
    sample = Sample(ones * mix.prompt, ones * 0, ones * mix.answer)
    return ClosedForm(PROFILE, Assumptions(TARGETS, batch_tokens=BATCH_TOKENS), sample)

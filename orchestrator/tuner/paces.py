"""How fast the nodes really are, in the times of the profile: what a plan must know when nodes are
not what was measured once, or not all equal, or slow each other.

*Decode*: the answers that ended in a window say how many streams there were (tokens times gap, over
the window and the nodes), and so how long a step should take; their gaps say how long it took.
*Prefill*: a request that did not wait says how long its prompt took. Which ones did not is not
known: the fastest of the long prompts stand for them. When nearly all wait, nodes are taken for
slower than they are, within bounds; that errs to the right side.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from splitserve.orchestrator.tuner.profile import (
    Estimate,
    Profile,
    exactly,
)

if TYPE_CHECKING:
    from splitserve.orchestrator.tuner.forecast import Finished

SLOWEST = 1.5
"""Largest pace that is believed; 1 / SLOWEST is the least."""
WEIGHT = 0.15
"""Of the newest window."""
WINDOW_LIMIT_REQUESTS = 20_000
LEAST_REQUESTS = 8
"""A window with fewer says nothing."""
UNHINDERED = 15
"""Percentile of the times of long prompts that is taken for one without waiting."""


class Paces:
    """Two factors by which the profile's times are multiplied, learnt from window to window."""

    def __init__(self, profile: Profile) -> None:
        self.prefill = 1.0
        self.decode = 1.0
        self._profile = profile
        self._seen: deque[tuple[Finished, float, float]] = deque(maxlen=WINDOW_LIMIT_REQUESTS)
        """(request, TTFT, ITL) of this window."""

    @property
    def profile(self) -> Profile:
        """The profile with the times that the nodes really take."""
        return paced(self._profile, self.prefill, self.decode)

    def note(self, request: Finished, ttft_s: float, itl_s: float) -> None:
        """A request has ended well."""
        self._seen.append((request, ttft_s, itl_s))

    def close_window(self, seconds: float, decode_nodes: int) -> None:
        """So long, on so many nodes, did it take to end what was noted."""
        seen = list(self._seen)
        self._seen.clear()
        if len(seen) < LEAST_REQUESTS or seconds <= 0 or decode_nodes < 1:
            return
        new, cached, answers = np.array(
            [(r.new_tokens, r.cached_tokens, r.answer_tokens) for r, _, _ in seen], dtype=np.float64
        ).T
        ttft = np.array([first for _, first, _ in seen])
        gaps = np.array([gap for _, _, gap in seen])
        weights = np.maximum(0.0, answers - 1)
        if weights.sum() <= 0:
            return
        step_s = float((weights * gaps).sum() / weights.sum())
        streams = float((weights * gaps).sum()) / seconds / decode_nodes
        context = float((weights * (new + cached + answers / 2)).sum() / weights.sum())
        expected_s = self._profile.decode.seconds(streams, streams * context)
        if expected_s > 0:
            self.decode = _moved(self.decode, step_s / expected_s)
        long = new >= np.median(new)
        times = self._profile.prefill
        alone = np.array([times.seconds(n, c) for n, c in zip(new, cached, strict=True)])
        fixed_s = self._profile.request_s + self._profile.transfer().latency_s.value + 1.5 * step_s
        found = (ttft[long] - fixed_s) / np.maximum(alone[long], 1e-9)
        self.prefill = _moved(self.prefill, float(np.percentile(found, UNHINDERED)))


def crowded(profile: Profile) -> Profile:
    """The profile with the times that steps take while all nodes of their host compute."""
    others = profile.nodes_per_host - 1
    prefill, decode = profile.prefill.neighbour.value, profile.decode.neighbour.value
    return paced(profile, 1 + others * prefill, 1 + others * decode)


def paced(profile: Profile, prefill: float, decode: float) -> Profile:
    """The profile with the times of both kinds of steps multiplied."""

    def times(estimate: Estimate, factor: float) -> Estimate:
        return exactly(estimate.value * factor)

    p, d = profile.prefill, profile.decode
    return msgspec.structs.replace(
        profile,
        prefill=msgspec.structs.replace(
            p,
            base_s=times(p.base_s, prefill),
            token_s=times(p.token_s, prefill),
            attention_s=times(p.attention_s, prefill),
            sending_s=times(p.sending_s, prefill),
        ),
        decode=msgspec.structs.replace(
            d,
            base_s=times(d.base_s, decode),
            sequence_s=times(d.sequence_s, decode),
            context_s=times(d.context_s, decode),
        ),
    )


def _moved(pace: float, found: float) -> float:
    found = min(max(found, 1 / SLOWEST), SLOWEST)
    return pace + WEIGHT * (found - pace)

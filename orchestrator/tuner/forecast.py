"""What clients will ask in the next minutes, from what they asked in the last ones.

Time is cut into windows of equal length. Of each window three figures are kept: arrivals per
second, the mean prompt and the mean answer. Each is smoothed as a level and a damped trend (Holt's
method, https://doi.org/10.1016/j.ijforecast.2003.09.015), and the forecast is the mean over the
horizon. The longest request of a window counts as long as its second longest, and a window that is
far from its neighbours counts as if it were nearer: one odd request changes nothing, one odd window
little. A window in which hardly anything came changes little too.

Lengths are scattered around their means as those of the latest requests were.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from splitserve.orchestrator.tuner.capacity import Sample

if TYPE_CHECKING:
    import numpy.typing as npt

LEVEL = 0.3
"""Weight of the newest window."""
TREND = 0.1
ODD = 1.5
"""A window counts for at most so many times the middle one of the latest three, or so little."""
DAMPING = 0.8
"""What is left of a trend after each further window."""
FULL_WINDOW_REQUESTS = 20
"""A window with fewer requests has less weight in mean lengths."""
SAMPLE_REQUESTS = 256
LEAST_SAMPLE_REQUESTS = 10
"""Fewer requests stand for nothing."""
WINDOW_LIMIT_REQUESTS = 20_000
"""Of one window, whose lengths are remembered."""
FORGOTTEN_WINDOWS = 100
"""So many empty windows are as good as any number."""
CHANGE_LIMIT = 2.0
"""A trend is believed up to this factor of the level, either way."""


class Finished(NamedTuple):
    """A request that has ended, as far as it tells of those that will come."""

    new_tokens: int
    """Of its prompt, that were computed."""
    cached_tokens: int
    answer_tokens: int
    estimated_tokens: int
    """Of its prompt, as said on arrival."""


class Figure:
    """One figure, smoothed."""

    def __init__(self) -> None:
        self.level = math.nan
        self.trend = 0.0
        self._latest: deque[float] = deque(maxlen=3)

    def add(self, value: float, weight: float = 1.0) -> None:
        """The value of the next window; ``weight`` below 1 for one that is known badly."""
        self._latest.append(value)
        usual = median(self._latest)
        value = min(max(value, usual / ODD), usual * ODD)
        if math.isnan(self.level):
            self.level = value
            return
        alpha = LEVEL * weight
        expected = self.level + DAMPING * self.trend
        level = expected + alpha * (value - expected)
        self.trend = DAMPING * self.trend + TREND * weight * (level - self.level - self.trend)
        self.level = max(0.0, level)

    def mean_ahead(self, windows: int) -> float:
        """Mean over the next so many windows."""
        change = total = 0.0
        damping = DAMPING
        for _ in range(windows):
            change += damping * self.trend
            damping *= DAMPING
            total += change
        ahead = self.level + total / max(1, windows)
        return min(max(ahead, self.level / CHANGE_LIMIT), self.level * CHANGE_LIMIT)


class Forecast(NamedTuple):
    """The mean of the next minutes."""

    rate_per_s: float
    prompt_tokens: float
    """Of one request, to be computed."""
    cached_tokens: float
    answer_tokens: float
    sample: Sample


class Forecaster:
    """Remembers the latest requests; times are given, in seconds of any clock."""

    def __init__(self, window_s: float, horizon_s: float) -> None:
        self.window_s = window_s
        self.began_s: float | None = None
        """When it began to watch."""
        self._windows_ahead = max(1, round(horizon_s / window_s))
        self._window_ends_s = 0.0
        self._arrivals = 0
        self._prompts: deque[int] = deque(maxlen=WINDOW_LIMIT_REQUESTS)
        """Of arrivals in this window."""
        self._answers: deque[int] = deque(maxlen=WINDOW_LIMIT_REQUESTS)
        """That ended in this window."""
        self._rate, self._prompt, self._answer = Figure(), Figure(), Figure()
        self._latest: deque[Finished] = deque(maxlen=SAMPLE_REQUESTS)

    def begin(self, now: float) -> None:
        """Watching begins now; what is added before that has no window."""
        self.began_s = now
        self._window_ends_s = now + self.window_s

    def arrived(self, now: float, prompt_tokens: int) -> None:
        """A request has come."""
        self.pass_to(now)
        self._arrivals += 1
        self._prompts.append(prompt_tokens)

    def finished(self, now: float, request: Finished) -> None:
        """A request has ended well."""
        self.pass_to(now)
        self._answers.append(request.answer_tokens)
        self._latest.append(request)

    def pass_to(self, now: float) -> None:
        """Windows that have ended by now are counted."""
        if self.began_s is None:
            self.begin(now)
        ended = math.floor((now - self._window_ends_s) / self.window_s) + 1
        for _ in range(min(ended, FORGOTTEN_WINDOWS)):
            self._close_window()
        self._window_ends_s += max(0, ended) * self.window_s

    def forecast(self) -> Forecast | None:
        """None while too little has been seen."""
        figures = (self._rate, self._prompt, self._answer)
        if len(self._latest) < LEAST_SAMPLE_REQUESTS or any(math.isnan(f.level) for f in figures):
            return None
        rate, prompt, answer = (figure.mean_ahead(self._windows_ahead) for figure in figures)
        latest = np.array(self._latest, dtype=np.float64)
        new, cached, answers, estimated = (_without_outlier(column) for column in latest.T)
        # What comes is known by its estimates, what they are worth by what has ended
        scale = prompt / max(1.0, float(estimated.mean()))
        sample = Sample(
            np.maximum(1.0, new * scale),
            cached * scale,
            np.maximum(1.0, answers * answer / max(1.0, float(answers.mean()))),
        )
        return Forecast(
            rate,
            float(sample.new_tokens.mean()),
            float(sample.cached_tokens.mean()),
            float(sample.answer_tokens.mean()),
            sample,
        )

    def _close_window(self) -> None:
        self._rate.add(self._arrivals / self.window_s)
        for figure, values in ((self._prompt, self._prompts), (self._answer, self._answers)):
            if values:
                weight = min(1.0, len(values) / FULL_WINDOW_REQUESTS)
                figure.add(
                    float(_without_outlier(np.array(values, dtype=np.float64)).mean()), weight
                )
        self._arrivals = 0
        self._prompts.clear()
        self._answers.clear()


def _without_outlier(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The values, the largest as large as the second largest."""
    if len(values) < 2:
        return values
    limited: npt.NDArray[np.float64] = np.minimum(values, np.partition(values, -2)[-2])
    return limited

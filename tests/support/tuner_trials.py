"""Trials whose figures a test chooses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from splitserve.orchestrator.tuner.trial import PARTS, Job, Percentiles, Split, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def trial(
    split: Split, share_good: float, *, strain: float = 0.5, parts: Sequence[int] | None = None
) -> Trial:
    """Of 1000 requests in each part, ``share_good`` of them good in all parts alike, or as many as
    ``parts`` says.
    """
    good = tuple(parts) if parts is not None else (round(1000 * share_good),) * PARTS
    times = Percentiles(strain / 2, strain, strain * 2)
    return Trial(
        split=split,
        requests=1000 * len(good),
        failed=0,
        goodput=sum(good) / 1000,
        good_in_part=good,
        requests_in_part=(1000,) * len(good),
        ttft=times,
        itl=times,
        strain=strain,
        busy_prefill=math.nan if split.is_aggregated else 0.5,
        busy_decode=0.5,
    )


class Made:
    """Makes trials from a function of the job, and remembers which."""

    def __init__(self, share_good: Callable[[Job], float]) -> None:
        self.jobs: list[Job] = []
        self._share_good = share_good

    def __call__(self, jobs: Sequence[Job]) -> list[Trial]:
        self.jobs += jobs
        return [
            trial(job.split, share, strain=2 - share)
            for job in jobs
            for share in [self._share_good(job)]
        ]

"""Trials of many splits, on all cores.

Workers are processes of their own (a simulation is pure Python), started afresh: they hold the
workloads and profiles once and get jobs of three numbers. They end with the block that started
them, with Ctrl-C, and when the process that started them dies.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.membership import DECODE, PREFILL
from splitserve.orchestrator.tuner.simulator import SimulationSettings, run_fixed
from splitserve.orchestrator.tuner.trial import trial_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from splitserve.orchestrator.traces import TraceRequest
    from splitserve.orchestrator.tuner.outcome import Targets
    from splitserve.orchestrator.tuner.profile import Profile
    from splitserve.orchestrator.tuner.trial import Job, Trial

WAIT_LIMIT_S = 3600.0
"""For all jobs of one call together."""


class EvaluationError(Exception):
    """Trials could not be finished; the message says why."""


@dataclass(frozen=True)
class Setting:
    """What all trials have in common."""

    workloads: tuple[tuple[TraceRequest, ...], ...]
    profiles: tuple[Profile, ...]
    targets: Targets
    limits: CoreLimits = field(default_factory=CoreLimits)
    block_tokens: int = 512
    """Of the workloads' blocks."""
    noise: float = 0.0
    """Relative spread of step times."""
    seed: int = 0


class Workers:
    """Makes trials on ``count`` processes; with one, in this process. Use it as a context manager.

    ``on_trial`` is called after each.
    """

    def __init__(
        self, setting: Setting, count: int, on_trial: Callable[[Trial], None] | None = None
    ) -> None:
        self._setting = setting
        self._on_trial = on_trial or (lambda _: None)
        self._known: dict[Job, Trial] = {}
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, context, _begin, (setting,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __call__(self, jobs: Sequence[Job]) -> list[Trial]:
        """The trials of ``jobs``, in order; none is made twice. Raises ``EvaluationError``."""
        missing = [job for job in dict.fromkeys(jobs) if job not in self._known]
        if self._pool is None:
            for job in missing:
                self._keep(job, made(self._setting, job))
        else:
            self._make(self._pool, missing)
        return [self._known[job] for job in jobs]

    def _make(self, pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> None:
        futures = {pool.submit(_work, job): job for job in jobs}
        try:
            for future in as_completed(futures, WAIT_LIMIT_S):
                self._keep(futures[future], future.result())
        except TimeoutError as error:
            raise EvaluationError(
                f"the simulations were not done within {WAIT_LIMIT_S:g} s; simulate fewer requests"
            ) from error
        except BrokenProcessPool as error:
            raise EvaluationError(
                "a process that simulates was killed, perhaps for want of memory; use fewer "
                "processes or fewer requests"
            ) from error

    def _keep(self, job: Job, trial: Trial) -> None:
        self._known[job] = trial
        self._on_trial(trial)


def made(setting: Setting, job: Job) -> Trial:
    """One trial, made here."""
    split = job.split
    placement = replace(setting.limits.placement, min_uncached_tokens=split.threshold_tokens)
    settings = SimulationSettings(
        limits=replace(setting.limits, placement=placement),
        trace_block_tokens=setting.block_tokens,
        noise=setting.noise,
    )
    workload, profile = setting.workloads[job.workload], setting.profiles[job.profile]
    done = run_fixed(workload, profile, split.prefill, split.decode, settings, setting.seed)
    busy = done.busy_shares()
    shares = (busy.get(PREFILL, math.nan), busy.get(DECODE, math.nan))
    return trial_of(split, done.outcome(), setting.targets, shares)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


# In a worker

_setting: Setting | None = None


def _begin(setting: Setting) -> None:
    global _setting
    _setting = setting
    # Ctrl-C reaches the whole process group; the parent tells of it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(job: Job) -> Trial:
    assert _setting is not None
    return made(_setting, job)

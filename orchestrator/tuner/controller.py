"""Which node should change its role, and why: the decisions of ``policy.autotune``.

Pure: it is told what clients ask and how they are served, and asked once in a while what to do with
the nodes that there are. It forecasts the load (``forecast``), learns how fast nodes are
(``paces``), computes what every split of the usable nodes would make of the load (``capacity``),
and wants at most one node changed at a time.

A change has to be worth it. It costs the time that a node spends on what it owes in its old role;
it must gain ``least_gain`` beyond that; two decisions in a row must agree on its direction, unless
targets are missed; and after a change nothing is changed for ``change_interval_s``, or
``missed_interval_s`` while targets are missed. Nodes that get no work, and slow ones, are neither
changed nor counted; each role keeps a node beside them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.orchestrator.tuner.capacity import Assumptions, ClosedForm
from splitserve.orchestrator.tuner.decision import Decision, NodeSeen, Outlook, Plan
from splitserve.orchestrator.tuner.forecast import Finished, Forecast, Forecaster
from splitserve.orchestrator.tuner.paces import Paces, crowded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.tuner.outcome import Targets
    from splitserve.orchestrator.tuner.profile import Profile

__all__ = ["Controller", "ControllerSettings", "Decision", "Finished", "NodeSeen"]

PREFILL = "prefill"
DECODE = "decode"

RATES = ((0.7, 0.15), (0.85, 0.2), (1.0, 0.3), (1.15, 0.2), (1.3, 0.15))
"""(part of the forecast rate, weight): a split must do for more than the forecast itself."""
HOPELESS = 0.3
"""When no split serves this share in time, the one that carries most is the best."""
SPLITS_AT_A_TIME = 12
"""Of many nodes about so many splits are computed first, and then again so many near the best."""
LATEST_LIMIT_REQUESTS = 20_000
"""Whose being in time is remembered."""
MISSED_WINDOWS = 2
"""Over which requests that missed a target are counted."""


@dataclass(frozen=True)
class ControllerSettings:
    """What bounds the decisions."""

    targets: Targets
    window_s: float = 30.0
    """Length of the windows of the forecast."""
    change_interval_s: float = 300.0
    """Between two changes; also the horizon of the forecast."""
    missed_interval_s: float = 120.0
    """Between two changes while targets are missed."""
    warm_up_s: float = 120.0
    """Nothing is changed before so much has been seen."""
    least_gain: float = 0.05
    """Requests served in time, as a part of all, that a change must bring."""
    missed_share: float = 0.1
    """Targets are missed when more than this part of the latest requests was late."""
    split_from_tokens: int = 0
    """Prompts of which fewer tokens have to be computed are not split."""
    batch_tokens: int = 0
    """Prompts are computed together up to so many tokens."""


class Controller:
    """Watches and decides; times are in seconds of any clock that goes on."""

    def __init__(self, profile: Profile, settings: ControllerSettings) -> None:
        self._settings = settings
        # A cluster that has to be tuned is busy; how busy its nodes really are, paces learn
        self._paces = Paces(crowded(profile))
        self._forecaster = Forecaster(settings.window_s, settings.change_interval_s)
        self._assumed = Assumptions(
            settings.targets,
            settings.split_from_tokens,
            settings.batch_tokens,
            settings.change_interval_s,
        )
        self._in_time: deque[tuple[float, bool]] = deque(maxlen=LATEST_LIMIT_REQUESTS)
        """(end, whether in time) of the latest requests."""
        self._decided_s: float | None = None
        self._changed_s: float | None = None
        self._direction = 0
        """In which the last decision would have changed a node."""

    # What it is told

    def begin(self, now: float) -> None:
        """It watches from now on."""
        self._forecaster.begin(now)

    def arrived(self, now: float, prompt_tokens: int) -> None:
        """A request has come; its prompt may be estimated."""
        self._forecaster.arrived(now, prompt_tokens)

    def served(
        self, now: float, request: Finished, ttft_s: float | None, itl_s: float | None
    ) -> None:
        """A request has ended well. None for times that are not known, as of an answer that was not
        streamed.
        """
        self._forecaster.finished(now, request)
        if ttft_s is None or itl_s is None:
            return
        self._paces.note(request, ttft_s, itl_s)
        targets = self._settings.targets
        is_late = (targets.ttft_s is not None and ttft_s > targets.ttft_s) or (
            targets.itl_s is not None and itl_s > targets.itl_s
        )
        self._in_time.append((now, not is_late))

    def failed(self, now: float) -> None:
        """A request was refused for want of room, or has ended with an error."""
        self._in_time.append((now, False))

    def changed(self, now: float) -> None:
        """A node has taken another role, whoever wanted it."""
        self._changed_s = now
        self._direction = 0

    # What it says

    def decide(self, now: float, nodes: Sequence[NodeSeen], waiting: int = 0) -> Decision:
        """What to do with these nodes, while ``waiting`` requests have no place yet. To be called
        once in each window.
        """
        prefill, decode = (
            [n for n in nodes if n.is_usable and not n.is_slow and n.role == role]
            for role in (PREFILL, DECODE)
        )
        self._forecaster.pass_to(now)
        if self._decided_s is not None:
            self._paces.close_window(now - self._decided_s, len(decode))
        self._decided_s = now
        forecast = self._forecaster.forecast()
        why = self._why_silent(now, forecast, len(prefill), len(decode))
        if why or forecast is None:
            self._direction = 0
            return Decision(now, why, self._missed(now))
        outlook = self._outlook(forecast, len(prefill), len(decode), waiting)
        return self._weighed(now, outlook, prefill, decode)

    def _why_silent(self, now: float, forecast: Forecast | None, prefill: int, decode: int) -> str:
        """Why nothing can be said; empty when something can."""
        began, warm_up = self._forecaster.began_s, self._settings.warm_up_s
        watched_s = 0.0 if began is None else now - began
        if watched_s < warm_up:
            return f"watches for {warm_up:.0f} s before it decides; {watched_s:.0f} s have passed"
        if forecast is None:
            return "has seen too few requests end to decide anything"
        if not (prefill and decode):
            return f"no {DECODE if prefill else PREFILL} node is usable: nothing to divide"
        return ""

    def _missed(self, now: float) -> float:
        """Part of the latest requests that were late or failed."""
        since = now - MISSED_WINDOWS * self._settings.window_s
        latest = [is_good for ended_s, is_good in self._in_time if ended_s >= since]
        return latest.count(False) / len(latest) if latest else 0.0

    def _outlook(self, forecast: Forecast, prefill: int, decode: int, waiting: int) -> Outlook:
        plans = self._plans(forecast, prefill, decode, waiting)
        is_hopeless = max(plan.score for plan in plans) < HOPELESS
        if is_hopeless:
            plans = [plan._replace(score=plan.carried) for plan in plans]
        current = next(plan for plan in plans if plan.prefill == prefill)
        # Of equals the one that takes the fewest changes
        best = max(plans, key=lambda plan: (round(plan.score, 3), -abs(plan.prefill - prefill)))
        return Outlook(forecast, current, best, is_hopeless)

    def _plans(self, forecast: Forecast, prefill: int, decode: int, waiting: int) -> list[Plan]:
        """Splits of so many nodes, the present one and its neighbours among them."""
        form = ClosedForm(self._paces.profile, self._assumed, forecast.sample)
        nodes, rate = prefill + decode, forecast.rate_per_s

        def plan(count: int) -> Plan:
            split = (count, nodes - count)
            score = sum(
                weight * form.expected(rate * part, *split, waiting).good_share
                for part, weight in RATES
            )
            return Plan(*split, score, form.expected(rate, *split, waiting))

        near = {prefill - 1, prefill, prefill + 1} - {0, nodes}
        plans = {count: plan(count) for count in near}
        low, high, step = 1, nodes - 1, nodes
        while step > 1:
            step = max(1, (high - low) // SPLITS_AT_A_TIME)
            missing = set(range(low, high + 1, step)) - plans.keys()
            plans |= {count: plan(count) for count in missing}
            best = max(plans.values(), key=lambda found: (found.score, found.carried)).prefill
            low, high = max(1, best - step), min(nodes - 1, best + step)
        return list(plans.values())

    def _weighed(
        self,
        now: float,
        outlook: Outlook,
        prefill: Sequence[NodeSeen],
        decode: Sequence[NodeSeen],
    ) -> Decision:
        """The decision, now that it is known which split is the best."""
        missed, direction = self._missed(now), outlook.direction
        gain = outlook.best.score - outlook.current.score - self._cost(outlook)
        if not direction or gain < self._settings.least_gain:
            self._direction = 0
            return Decision(now, outlook.kept(), missed, outlook)
        agrees, self._direction = self._direction == direction, direction
        givers, role = (decode, PREFILL) if direction > 0 else (prefill, DECODE)
        is_missed = missed > self._settings.missed_share
        obstacle = self._obstacle(now, givers, [*prefill, *decode], is_missed=is_missed)
        if not (obstacle or agrees or is_missed):
            obstacle = "waits for the next decision to agree"
        if obstacle:
            return Decision(now, f"{obstacle}: {outlook.better()}", missed, outlook)
        able = [node for node in givers if node.can_flip]
        node = min(able, key=lambda node: (node.legs, node.name)).name
        why = f"{node} becomes {role}: {outlook.better()}"
        return Decision(now, why, missed, outlook, node, role)

    def _obstacle(
        self,
        now: float,
        givers: Sequence[NodeSeen],
        nodes: Sequence[NodeSeen],
        *,
        is_missed: bool,
    ) -> str:
        """What is against changing one of ``givers``; empty when nothing is."""
        if len(givers) < 2:
            return f"{givers[0].name} is the last {givers[0].role} node"
        if not any(node.can_flip for node in givers):
            return f"no {givers[0].role} node may change its role"
        settings = self._settings
        interval = settings.missed_interval_s if is_missed else settings.change_interval_s
        if self._changed_s is not None and now < self._changed_s + interval:
            return f"waits {self._changed_s + interval - now:.0f} s more after the last change"
        owing = next((node.name for node in nodes if node.owes), "")
        return f"waits for {owing}, which owes work of its old role" if owing else ""

    def _cost(self, outlook: Outlook) -> float:
        """Part of all work of an interval that a change loses: that of a decode node until its
        answers have ended. A prefill node owes little.
        """
        if outlook.direction <= 0:
            return 0.0
        owing_s = outlook.forecast.answer_tokens * outlook.current.expected.step_s
        nodes = outlook.current.prefill + outlook.current.decode
        return min(1.0, owing_s / self._settings.change_interval_s) / nodes

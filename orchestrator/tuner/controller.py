"""Which node should change its role, and why: the decisions of ``policy.autotune``.

Pure: it is told what clients ask and how they are served, and asked once in a while what to do with
the nodes that there are. It forecasts the load (``forecast``), computes what every split of the
usable nodes would make of it (``capacity``), and says at most one change at a time.

A change has to be worth it. It costs the time that a node spends on what it owes in its old role;
it must gain ``least_gain`` beyond that; two decisions in a row must agree on its direction; and
after a change nothing is changed for ``change_interval_s``, or ``missed_interval_s`` while clients
are served late. Nodes that get no work, and slow ones, are neither changed nor counted; each role
keeps a node beside them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from splitserve.orchestrator.tuner.capacity import Assumptions, ClosedForm, Expected
from splitserve.orchestrator.tuner.forecast import Finished, Forecast, Forecaster
from splitserve.orchestrator.tuner.paces import Paces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.tuner.outcome import Targets
    from splitserve.orchestrator.tuner.profile import Profile

PREFILL = "prefill"
DECODE = "decode"

RATES = ((0.7, 0.15), (0.85, 0.2), (1.0, 0.3), (1.15, 0.2), (1.3, 0.15))
"""(part of the forecast rate, weight): a split must do for more than the forecast itself."""
HOPELESS = 0.3
"""When no split serves this share in time, the one that carries most is the best."""
SPLITS_LIMIT = 64
"""Splits that are computed for a decision; of more nodes not every one is."""


@dataclass(frozen=True)
class ControllerSettings:
    """What bounds the decisions."""

    targets: Targets
    window_s: float = 30.0
    """Length of the windows of the forecast."""
    change_interval_s: float = 300.0
    """Between two changes."""
    missed_interval_s: float = 120.0
    """The same while targets are missed."""
    warm_up_s: float = 120.0
    """Nothing is changed before so much has been seen."""
    least_gain: float = 0.05
    """Requests served in time, as a part of all, that a change must bring."""
    missed_share: float = 0.1
    """Targets are missed when more than this part of the latest requests was late."""
    split_from_tokens: int = 0
    batch_tokens: int = 0


class NodeSeen(NamedTuple):
    """A node as it is now."""

    name: str
    role: str
    is_usable: bool = True
    """Whether it gets new work."""
    is_slow: bool = False
    """It does, but is not what it should be."""
    can_flip: bool = True
    owes: bool = False
    """Something of the role that it had before."""
    legs: int = 0
    """Out to it."""


class Plan(NamedTuple):
    """A split of the usable nodes, and what it would make of the forecast."""

    prefill: int
    decode: int
    score: float
    """Share of requests in time, over ``RATES``."""
    expected: Expected
    """Of the forecast itself."""

    @property
    def carried(self) -> float:
        """Part of the load that the pool with less to spare can do; at most 1."""
        return min(1.0, 1 / max(self.expected.prefill_use, self.expected.decode_use, 1e-9))

    def __str__(self) -> str:
        """As ``3:5``."""
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True)
class Decision:
    """What to do now, and why."""

    at_s: float
    why: str
    """One line."""
    node: str = ""
    """Of which the role is to change; empty: none."""
    role: str = ""
    forecast: Forecast | None = None
    current: Plan | None = None
    best: Plan | None = None
    missed: float = 0.0
    """Part of the latest requests that were late or failed."""
    is_hopeless: bool = False
    """No split would meet the targets: plans are judged by what they carry, whenever."""

    @property
    def is_change(self) -> bool:
        """Whether a node is to change its role."""
        return bool(self.node)


@dataclass
class _Latest:
    """How the requests of the last windows were served."""

    ends: deque[tuple[float, bool]] = field(default_factory=deque)
    """(when, whether in time)."""

    def missed(self, now: float, span_s: float) -> float:
        while self.ends and self.ends[0][0] < now - span_s:
            self.ends.popleft()
        late = sum(not is_good for _, is_good in self.ends)
        return late / len(self.ends) if self.ends else 0.0


LATEST_LIMIT = 20_000


class Controller:
    """Watches and decides; times are in seconds of any clock that goes on."""

    def __init__(self, profile: Profile, settings: ControllerSettings) -> None:
        self._settings = settings
        self._paces = Paces(profile)
        self._paced_s: float | None = None
        """When the last window of the paces ended."""
        self._assumed = Assumptions(
            settings.targets,
            settings.split_from_tokens,
            settings.batch_tokens,
            settings.change_interval_s,
        )
        # A decision holds for an interval, and the mean load of that is in its middle
        self._forecaster = Forecaster(settings.window_s, settings.change_interval_s)
        self._latest = _Latest(deque(maxlen=LATEST_LIMIT))
        self._changed_s: float | None = None
        self._wish = 0
        """1: the last decision would have had more prefill nodes, -1: fewer."""

    # What it is told

    def begin(self, now: float) -> None:
        """It watches from now on."""
        self._forecaster.begin(now)

    def arrived(self, now: float, prompt_tokens: int) -> None:
        """A request has come."""
        self._forecaster.arrived(now, prompt_tokens)

    def served(self, now: float, request: Finished, ttft_s: float, itl_s: float) -> None:
        """A request has ended well."""
        self._forecaster.finished(now, request)
        self._paces.note(request, ttft_s, itl_s)
        targets = self._settings.targets
        is_late = (targets.ttft_s is not None and ttft_s > targets.ttft_s) or (
            targets.itl_s is not None and itl_s > targets.itl_s
        )
        self._latest.ends.append((now, not is_late))

    def failed(self, now: float) -> None:
        """A request was refused or has ended with an error."""
        self._latest.ends.append((now, False))

    def changed(self, now: float) -> None:
        """A node has taken another role, whoever wanted it."""
        self._changed_s = now
        self._wish = 0

    # What it says

    def decide(self, now: float, nodes: Sequence[NodeSeen], waiting: int = 0) -> Decision:
        """What to do with these nodes, while ``waiting`` requests have no place."""
        self._forecaster.pass_to(now)
        prefill, decode = (
            [n for n in nodes if n.is_usable and not n.is_slow and n.role == role]
            for role in (PREFILL, DECODE)
        )
        if self._paced_s is not None:
            self._paces.close_window(now - self._paced_s, len(decode))
        self._paced_s = now
        missed = self._latest.missed(now, 2 * self._settings.window_s)
        forecast = self._forecaster.forecast()
        began = self._forecaster.began_s
        watched_s = now - began if began is not None else 0.0
        if forecast is None or watched_s < self._settings.warm_up_s:
            self._wish = 0
            return Decision(now, self._still_watching(watched_s), missed=missed)
        if not (prefill and decode):
            which = "decode" if prefill else "prefill"
            self._wish = 0
            return Decision(now, f"no {which} node is usable: nothing to divide", missed=missed)
        plans = self._plans(forecast, len(prefill), len(decode), waiting)
        is_hopeless = max(plan.score for plan in plans) < HOPELESS
        if is_hopeless:
            plans = [plan._replace(score=plan.carried) for plan in plans]
        current = next(plan for plan in plans if plan.prefill == len(prefill))
        # Of equals the one that takes the fewest changes
        best = max(plans, key=lambda p: (round(p.score, 3), -abs(p.prefill - current.prefill)))
        found = Decision(
            now,
            "",
            forecast=forecast,
            current=current,
            best=best,
            missed=missed,
            is_hopeless=is_hopeless,
        )
        return self._weighed(found, prefill, decode)

    def _plans(self, forecast: Forecast, prefill: int, decode: int, waiting: int) -> list[Plan]:
        """Splits of so many nodes, the present one and its neighbours among them."""
        form = ClosedForm(self._paces.profile, self._assumed, forecast.sample)
        nodes = prefill + decode
        step = max(1, nodes // SPLITS_LIMIT)
        choices = {*range(step, nodes, step), prefill - 1, prefill, prefill + 1} - {0, nodes}

        def plan(count: int) -> Plan:
            split = (count, nodes - count)
            rate = forecast.rate_per_s
            score = sum(
                weight * form.expected(rate * part, *split, waiting).good_share
                for part, weight in RATES
            )
            return Plan(*split, score, form.expected(rate, *split, waiting))

        return [plan(count) for count in sorted(choices)]

    def _weighed(
        self, found: Decision, prefill: Sequence[NodeSeen], decode: Sequence[NodeSeen]
    ) -> Decision:
        """The decision, once it is known which split is the best."""
        current, best = found.current, found.best
        assert current is not None
        assert best is not None
        wish = (best.prefill > current.prefill) - (best.prefill < current.prefill)
        gain = best.score - current.score - self._cost(found, wish)
        if not wish or gain < self._settings.least_gain:
            self._wish = 0
            return replace(found, why=self._why_keep(found))
        agrees, self._wish = self._wish == wish, wish
        better = self._why_better(found)
        if (left_s := self._interval_left_s(found)) > 0:
            return replace(found, why=f"waits {left_s:.0f} s after the last change: {better}")
        givers = decode if wish > 0 else prefill
        if any(node.owes for node in (*prefill, *decode)):
            owing = next(node.name for node in (*prefill, *decode) if node.owes)
            return replace(found, why=f"waits for what {owing} owes of its old role: {better}")
        if len(givers) < 2:
            return replace(found, why=f"{givers[0].name} is the last of its role: {better}")
        able = [node for node in givers if node.can_flip]
        if not able:
            return replace(found, why=f"none of its nodes may change its role: {better}")
        if not agrees and found.missed <= self._settings.missed_share:
            return replace(found, why=f"waits for the next decision to agree: {better}")
        node = min(able, key=lambda node: (node.legs, node.name))
        role = PREFILL if wish > 0 else DECODE
        return replace(
            found, node=node.name, role=role, why=f"{node.name} becomes {role}: {better}"
        )

    def _cost(self, found: Decision, wish: int) -> float:
        """Part of all work of an interval that a change loses: that of a node until it has
        delivered what it owes.
        """
        assert found.current is not None
        assert found.forecast is not None
        nodes = found.current.prefill + found.current.decode
        owing_s = 0.0
        if wish > 0:
            owing_s = found.forecast.answer_tokens * found.current.expected.step_s
        return min(1.0, owing_s / self._settings.change_interval_s) / nodes

    def _interval_left_s(self, found: Decision) -> float:
        """Until a change may follow the last one."""
        if self._changed_s is None:
            return 0.0
        is_missed = found.missed > self._settings.missed_share
        interval = self._settings.change_interval_s
        if is_missed:
            interval = min(interval, self._settings.missed_interval_s)
        return self._changed_s + interval - found.at_s

    # Words

    def _still_watching(self, watched_s: float) -> str:
        warm_up = self._settings.warm_up_s
        if watched_s < warm_up:
            return f"watches for {warm_up:.0f} s before it decides; {watched_s:.0f} s have passed"
        return "has seen too few requests end to decide anything"

    def _why_keep(self, found: Decision) -> str:
        current, best = found.current, found.best
        assert current is not None
        assert best is not None
        kept = f"keeps {current}, which {_serves(found, current)}"
        if best.prefill == current.prefill:
            return kept
        return f"{kept}; {best} is not enough better ({100 * best.score:.0f} %)"

    def _why_better(self, found: Decision) -> str:
        current, best = found.current, found.best
        assert current is not None
        assert best is not None
        return f"{best} {_serves(found, best)}, {current} {100 * current.score:.0f} %"


def _serves(found: Decision, plan: Plan) -> str:
    forecast = found.forecast
    assert forecast is not None
    prompts, answers = forecast.prompt_tokens, forecast.answer_tokens
    load = (
        f"of {forecast.rate_per_s:.3g} requests/s with prompts of {prompts:.0f} and answers of "
        f"{answers:.0f} tokens"
    )
    share = f"{100 * plan.score:.0f} %"
    if found.is_hopeless:
        return f"could carry {share} {load} (too late: no split meets the targets)"
    return f"would serve {share} {load} in time"

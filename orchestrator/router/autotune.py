"""The shell around the controller of ``policy.autotune``: tells it what comes and how it is served,
asks it once per window, says in the log what it decides, and carries that out when the mode is
``on``.

Of several routers the one with the lowest number that is there decides; it takes what comes to each
of the others to be as much as what comes to itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.core.breaker import BreakerState
from splitserve.orchestrator.core.membership import DECODE, PREFILL
from splitserve.orchestrator.router.probes import PROBE
from splitserve.orchestrator.tuner.controller import (
    Controller,
    ControllerSettings,
    Decision,
    Finished,
    NodeSeen,
)
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.profile import ProfileError, parse_profile
from splitserve.orchestrator.tuner.slow_nodes import SlowNodes

if TYPE_CHECKING:
    from splitserve.orchestrator.config import AutotuneConfig, ClusterConfig
    from splitserve.orchestrator.core.effects import AnswerFlip, Timeline
    from splitserve.orchestrator.core.events import RequestArrived
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.token_counts import Tally
    from splitserve.orchestrator.tuner.profile import Profile

_log = logging.getLogger(__name__)

SHOWN_DECISIONS = 20
FULL_QUEUE = 429


class Autotune:
    """Watches one router. ``start`` and ``stop`` are for its owner."""

    def __init__(
        self,
        settings: AutotuneConfig,
        profile: Profile,
        controller: Controller,
        driver: CoreDriver,
    ) -> None:
        self._settings = settings
        self._profile = profile
        self._controller = controller
        self._driver = driver
        self._slow = SlowNodes()
        self._known: dict[str, tuple[str, str]] = {}
        """(incarnation, role) of each node at the last decision."""
        self._decisions: deque[tuple[float, Decision]] = deque(maxlen=SHOWN_DECISIONS)
        """(unix time, decision), the latest last."""
        self._timer: asyncio.TimerHandle | None = None
        self._routers = 1
        """How many there are, as of the last window."""

    def start(self) -> None:
        """It watches from now on."""
        self._controller.begin(time.monotonic())
        self._driver.on_arrival = self.arrived
        self._arm()

    def stop(self) -> None:
        """It decides nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def arrived(self, event: RequestArrived) -> None:
        """A request has come."""
        if event.endpoint != PROBE:
            for _ in range(self._routers):
                self._controller.arrived(time.monotonic(), event.prompt_tokens)

    def ended(self, timeline: Timeline, tally: Tally) -> None:
        """A request is over. One that the client broke off or got wrong tells nothing."""
        if timeline.endpoint == PROBE:
            return
        now = time.monotonic()
        if timeline.status >= 500 or timeline.status == FULL_QUEUE or timeline.outcome == "error":
            self._controller.failed(now)
        elif timeline.outcome == "ok" and tally.output_tokens:
            self._served(now, timeline, tally, tally.output_tokens)

    def status(self) -> dict[str, Any]:
        """For people: the settings and the latest decisions, the newest first."""
        settings = self._settings
        return {
            "mode": settings.mode,
            "ttft_ms": settings.ttft_ms,
            "itl_ms": settings.itl_ms,
            "is_left_to_another": self._is_left_to_another,
            "decisions": [
                _as_record(unix_s, decision) for unix_s, decision in reversed(self._decisions)
            ],
        }

    def decide(self) -> None:
        """One decision, said and, when that is wanted, carried out; none while it is another
        router's.
        """
        now, core = time.monotonic(), self._driver.core
        nodes = core.membership.nodes
        self._routers = core.peers.count(nodes.values())
        if self._is_left_to_another:
            return
        self._note_changes(now, nodes)
        slow = {role: self._slow.slow(role) for role in (PREFILL, DECODE)}
        seen = [_seen(node, is_slow=node.name in slow[node.role]) for node in nodes.values()]
        decision = self._controller.decide(now, seen, core.queue.size * self._routers)
        self._decisions.append((time.time(), decision))
        is_advice = decision.is_change and self._settings.mode != "on"
        _log.info("autotune%s: %s", " advises" if is_advice else "", decision.why)
        if decision.is_change and not is_advice:
            self._driver.flip(decision.node, decision.role, answer=self._answered)

    @property
    def _is_left_to_another(self) -> bool:
        core = self._driver.core
        return not core.peers.is_lowest(core.membership.nodes.values())

    def _answered(self, order: AnswerFlip) -> None:
        """The driver has logged the verdict; the change is seen at the next decision."""
        if order.verdict != "flipped":
            _log.warning("autotune could not change a role: %s", order.message)

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._settings.window_s, self._on_timer)

    def _on_timer(self) -> None:
        self._arm()
        self.decide()

    def _note_changes(self, now: float, nodes: dict[str, Node]) -> None:
        """Roles that have changed since the last decision, whoever wanted it."""
        known, self._known = self._known, {}
        for name, node in nodes.items():
            self._known[name] = (node.description.incarnation, node.role)
            before = known.get(name)
            if before is None or before == self._known[name]:
                continue
            self._slow.forget(name)
            if before[1] != node.role:
                self._controller.changed(now)

    def _served(self, now: float, timeline: Timeline, tally: Tally, answer: int) -> None:
        prompt = timeline.prompt_tokens if tally.prompt_tokens is None else tally.prompt_tokens
        cached = min(timeline.expected_cached_tokens, prompt - 1)
        finished = Finished(max(1, prompt - cached), cached, answer, timeline.prompt_tokens)
        ttft_s = itl_s = None
        first, last = timeline.first_data, timeline.last_data
        if timeline.streaming and first is not None and last is not None:
            ttft_s = first - timeline.received
            itl_s = (last - first) / max(1, answer - 1)
            if answer > 1:
                self._slow.note(timeline.decode_node, DECODE, itl_s)
        if timeline.prefill_node and timeline.prefill_answered and timeline.dispatched:
            took_s = timeline.prefill_answered - timeline.dispatched
            usual_s = self._profile.prefill.seconds(finished.new_tokens, cached)
            usual_s += self._profile.request_s
            if usual_s > 0:
                self._slow.note(timeline.prefill_node, PREFILL, took_s / usual_s)
        self._controller.served(now, finished, ttft_s, itl_s)


def autotune_of(config: ClusterConfig, driver: CoreDriver) -> Autotune | None:
    """None when it is off, or when its profile, which `up` has checked, cannot be read any more:
    serving goes on without it.
    """
    settings = config.policy.autotune
    if settings.mode == "off":
        return None
    assert settings.profile is not None, "the path is filled in by `up`"
    try:
        profile = parse_profile(Path(settings.profile).read_bytes(), settings.profile)
    except (OSError, ProfileError) as error:
        _log.error("autotune is off: policy.autotune.profile cannot be used: %s", error)
        return None
    controller = Controller(
        profile,
        ControllerSettings(
            Targets(_seconds(settings.ttft_ms), _seconds(settings.itl_ms)),
            window_s=settings.window_s,
            change_interval_s=settings.change_interval_s,
            missed_interval_s=settings.missed_interval_s,
            warm_up_s=settings.warm_up_s,
            least_gain=settings.least_gain,
            split_from_tokens=config.policy.conditional.min_uncached_tokens,
            batch_tokens=config.router.prefill_batch_tokens,
        ),
    )
    return Autotune(settings, profile, controller, driver)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _seen(node: Node, *, is_slow: bool) -> NodeSeen:
    legs = node.prefill_legs + node.decode_legs
    if node.others is not None:
        legs += node.others.prefill_legs + node.others.decode_legs
    breaker = node.decode_breaker if node.role == DECODE else node.prefill_breaker
    return NodeSeen(
        node.name,
        node.role,
        is_usable=node.is_usable,
        is_slow=is_slow or breaker.state is not BreakerState.CLOSED,
        can_flip=not node.description.flip_obstacle,
        owes=node.is_flipping,
        legs=legs,
    )


def _as_record(unix_s: float, decision: Decision) -> dict[str, Any]:
    record: dict[str, Any] = {
        "at_unix_s": round(unix_s, 3),
        "why": decision.why,
        "node": decision.node,
        "role": decision.role,
        "missed_share": round(decision.missed, 4),
    }
    outlook = decision.outlook
    if outlook is not None:
        forecast = outlook.forecast
        record["forecast"] = {
            "rate_per_s": round(forecast.rate_per_s, 4),
            "prompt_tokens": round(forecast.prompt_tokens, 1),
            "cached_tokens": round(forecast.cached_tokens, 1),
            "answer_tokens": round(forecast.answer_tokens, 1),
        }
        record["plans"] = {
            name: {"split": str(plan), "share_in_time": round(plan.score, 4)}
            for name, plan in (("current", outlook.current), ("best", outlook.best))
        }
    return record

"""The modelled network: delays, partitions, and on the control channel also loss, repetition and
disorder, as faults say.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.world import World

MEAN_DELAY_S = 0.0005


@dataclass(frozen=True)
class Weather:
    """How bad the control channel is at the moment, as probabilities per message."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_s: float = 0.0
    """Mean of an additional delay."""


class Network:
    """Messages between hosts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        """The worst of all that is bad now."""
        self._bad: list[Weather] = []
        self._cuts: dict[frozenset[str], int] = {}
        self._last: dict[tuple[str, str, str], float] = {}

    def cut(self, a: str, b: str) -> None:
        """Nothing passes between two hosts until ``mend``."""
        key = frozenset((a, b))
        self._cuts[key] = self._cuts.get(key, 0) + 1

    def mend(self, a: str, b: str) -> None:
        """The end of one ``cut``."""
        self._cuts[frozenset((a, b))] -= 1

    def is_cut(self, a: str, b: str) -> bool:
        """Whether nothing passes."""
        return self._cuts.get(frozenset((a, b)), 0) > 0

    def worsen(self, bad: Weather) -> None:
        """The control channel gets worse until ``clear``."""
        self._bad.append(bad)
        self._look()

    def clear(self, bad: Weather) -> None:
        """The end of one ``worsen``."""
        self._bad.remove(bad)
        self._look()

    def _look(self) -> None:
        worst = {
            f.name: max([0.0, *(getattr(b, f.name) for b in self._bad)]) for f in fields(Weather)
        }
        self.weather = Weather(**worst)

    def delay(self) -> float:
        """How long a message takes now."""
        return self.world.random.expovariate(1 / MEAN_DELAY_S)

    def send(self, source: str, target: str, call: Callable[..., None], *args: Any) -> bool:
        """A message on a byte stream: in order, once. False when the hosts are cut apart."""
        if self.is_cut(source, target):
            return False
        self._in_order(source, target, "stream", self.delay(), call, args)
        return True

    def send_control(self, source: str, target: str, call: Callable[..., None], *args: Any) -> None:
        """A control message, under the weather."""
        random, weather = self.world.random, self.weather
        if self.is_cut(source, target):
            return
        if not self._bad:
            self._in_order(source, target, "control", self.delay(), call, args)
            return
        if random.random() < weather.drop:
            return
        copies = 2 if random.random() < weather.duplicate else 1
        for _ in range(copies):
            delay = self.delay()
            if weather.delay_s:
                delay += random.expovariate(1 / weather.delay_s)
            if random.random() < weather.reorder:
                self.world.at(delay + random.random() * 0.2, call, *args)
            else:
                self._in_order(source, target, "control", delay, call, args)

    def _in_order(
        self,
        source: str,
        target: str,
        lane: str,
        delay: float,
        call: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        key = (source, target, lane)
        arrival = max(self.world.now + delay, self._last.get(key, 0.0))
        self._last[key] = arrival
        self.world.at(arrival - self.world.now, call, *args)

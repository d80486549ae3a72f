"""Virtual time: one queue of events, one source of randomness, processes that can stop and die."""

from __future__ import annotations

import heapq
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

STORY_LIMIT_LINES = 400


class InvariantError(AssertionError):
    """Something happened that must never happen; the message tells the world's last events."""


class World:
    """One run. The same seed gives the same run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.steps = 0
        """Events delivered so far."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._story: deque[tuple[float, str, tuple[Any, ...]]] = deque(maxlen=STORY_LIMIT_LINES)

    def at(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """``call`` happens ``delay_s`` from now, after what was planned for the same moment."""
        assert delay_s >= 0
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, call, args))

    def step(self) -> bool:
        """Deliver the next event; False when there is none."""
        if not self._queue:
            return False
        self.now, _, call, args = heapq.heappop(self._queue)
        self.steps += 1
        call(*args)
        return True

    def run_for(self, seconds: float) -> None:
        """Deliver everything that happens within so long."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.step()
        self.now = end

    def note(self, text: str, *facts: Any) -> None:
        """A line of the story. It is only formatted when somebody reads it: ``facts`` must be such
        as never change.
        """
        self._story.append((self.now, text, facts))

    def story(self) -> str:
        """The latest lines."""
        return "\n".join(f"{at:9.4f}  {text.format(*facts)}" for at, text, facts in self._story)

    def fail(self, what: str) -> NoReturn:
        """Raise ``InvariantError`` with the story."""
        raise InvariantError(f"seed {self.seed}, {self.now:.4f} s: {what}\n{self.story()}")


class Process:
    """Something with a life of its own: what it planned does not happen while it is stopped, and
    never after its death.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.slowness = 1.0
        """Its own work takes this many times as long."""
        self._stops = 0
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_stopped(self) -> bool:
        """Whether it is between SIGSTOP and SIGCONT."""
        return self._stops > 0

    def at(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """As ``World.at``, as something that this process does or notices."""
        self.world.at(delay_s, self._run, call, args)

    def work(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """As ``at``, for what takes the process's own time."""
        self.at(seconds * self.slowness, call, *args)

    def _run(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.is_alive:
            return
        if self.is_stopped:
            self._held.append((call, args))
        else:
            call(*args)

    def stop(self) -> None:
        """SIGSTOP."""
        self._stops += 1

    def go_on(self) -> None:
        """SIGCONT: what was held happens now, in its order."""
        self._stops -= 1
        if not self.is_stopped:
            held, self._held = self._held, []
            for call, args in held:
                self.at(0.0, call, *args)

    def kill(self) -> None:
        """SIGKILL; works on a stopped process too."""
        self.is_alive = False
        self._held.clear()

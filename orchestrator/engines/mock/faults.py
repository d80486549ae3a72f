"""Faults on demand, for tests: read and set over HTTP while the engine runs, when it was started
with ``--enable-faults``.

Nothing here sleeps: a held engine waits until a test lets it go, so a test decides the order of
events and no clock does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS_ENV = "SPLITSERVE_MOCK_FAULTS"
"""JSON of the faults to start with."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong from now on; all of it is replaced at once."""

    refuse_requests: int = 0
    """So many coming completions get status 500."""
    hold_requests: bool = False
    """Requests wait before they reach the scheduler."""
    hold_steps: bool = False
    """The engine takes no step, but requests still come in and are aborted."""
    hold_at_layer: int | None = None
    """A step stops before it computes this layer."""
    die_at_layer: int | None = None
    """SIGKILL when a step is about to compute this layer."""
    hold_after_tokens: int | None = None
    """Answers stop after so many tokens: the engine takes no step once a running request has them.
    """
    tokenise_differently: bool = False
    """Prompts given as text get one more token than the tokenizer says."""


class FaultBox:
    """The faults in force."""

    def __init__(self, faults: Faults) -> None:
        self.now = faults
        self.on_change: Callable[[], None] = lambda: None
        """Called when the faults are replaced; set by the engine."""
        self._changed = asyncio.Event()

    def set(self, faults: Faults) -> None:
        """Replace the faults; whatever is held looks again."""
        self.now = faults
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    def take_refusal(self) -> bool:
        """Whether this request is to be refused."""
        left = self.now.refuse_requests
        if left > 0:
            self.now = msgspec.structs.replace(self.now, refuse_requests=left - 1)
        return left > 0

    async def admit(self) -> None:
        """Returns when requests may reach the scheduler."""
        while self.now.hold_requests:
            await self._changed.wait()

    async def reach_layer(self, layer: int) -> None:
        """Returns when ``layer`` may be computed; may be the process's end."""
        if self.now.die_at_layer == layer:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.now.hold_at_layer == layer:
            await self._changed.wait()

    def holds_step(self, longest_answer_tokens: int) -> bool:
        """Whether no step may begin now."""
        limit = self.now.hold_after_tokens
        return self.now.hold_steps or (limit is not None and longest_answer_tokens >= limit)


def initial_faults() -> Faults:
    """What the environment asks for. Raises ``ValueError`` when it cannot be read."""
    return msgspec.json.decode(os.environ.get(FAULTS_ENV, "{}"), type=Faults)

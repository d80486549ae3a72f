"""How vLLM's processes wait for each other on a host with few cores.

EngineCore and the workers exchange steps through shared memory. For a second after its last message
a reader looks again and again and yields its core between looks; only then does it sleep until it
is notified. Where all processes of an engine share the cores that compute, as on a CPU node, this
is taken from the forward pass: EngineCore polls for the very answer that the worker is computing.
With ``install`` a reader sleeps at once. In that second it also looks by itself now and then,
because a notification may be lost: the publisher's queue holds one, and whether it is free again is
learnt late. (vLLM by itself looks after five seconds.)

vLLM loads this module as a general plugin in each of its processes, before their queues exist. It
changes nothing unless ``SPLITSERVE_SLEEPING_WAITS`` is 1.
"""

from __future__ import annotations

import inspect
import logging
import os
import time

logger = logging.getLogger("vllm.splitserve.process_waits")
"""Below vLLM's own logger, whose handler alone prints in its processes."""

SLEEPING_WAITS_ENV = "SPLITSERVE_SLEEPING_WAITS"
LATENESS = 0.1
"""What a lost notification may cost: this share of the time since the last message, at least 1 ms.
"""
RECENT_S = 1.0
"""As long after a message the next one is expected soon: vLLM's own ``busy_loop_s``."""


def install() -> None:
    """Message queues made in this process from now on sleep instead of polling.

    Raises ``RuntimeError`` when this vLLM has no such wait; vLLM logs it and goes on without the
    plugin.
    """
    if os.environ.get(SLEEPING_WAITS_ENV) != "1":
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    parameters = list(inspect.signature(SpinCondition.__init__).parameters.values())
    if parameters[-1].name != "busy_loop_s":
        raise RuntimeError(f"{SLEEPING_WAITS_ENV}: this vLLM's SpinCondition does not poll")
    wait_for_notification = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        waited_s = time.monotonic() - self.last_read
        if waited_s <= RECENT_S:
            timeout_ms = max(1, int(waited_s * LATENESS * 1e3))
        wait_for_notification(self, timeout_ms)

    SpinCondition.__init__.__defaults__ = (0.0,)
    SpinCondition.wait = wait
    logger.info("Waiting for other processes of this engine without polling")

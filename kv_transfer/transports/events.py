"""Events that wait for the next ``poll``, and a descriptor that says so."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.kv_transfer.transports.base import TransportEvent


class EventQueue:
    """What has happened and was not yet told: at most one event per open write and per peer.

    ``fileno`` is readable while an event waits.
    """

    def __init__(self) -> None:
        self._events: list[TransportEvent] = []
        self._signalled = False
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def put(self, event: TransportEvent) -> None:
        """The next ``take`` returns ``event`` after those put before."""
        self.wake()
        self._events.append(event)

    def wake(self) -> None:
        """``fileno`` is readable until the next ``take``, which may then find nothing."""
        if not self._signalled:
            os.eventfd_write(self._descriptor, 1)
            self._signalled = True

    def take(self) -> list[TransportEvent]:
        """All waiting events, oldest first; none waits afterwards."""
        if not self._signalled:
            return []
        os.eventfd_read(self._descriptor)
        self._signalled = False
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

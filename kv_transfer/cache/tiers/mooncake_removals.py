"""Removals that wait for readers: Mooncake refuses to remove an object while somebody holds a lease
on it, and reading or asking for it takes one.

Such a chunk counts as gone at once for this server, and is removed from the store when its last
lease has ended. Other servers may read it until then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.tiers.base import TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

RETRY_S = 1.0
FORCE_S = 30.0
"""After so long leases are broken: every reader of that age has given up. Others keep a chunk that
they ask for again and again.
"""
WAITING_LIMIT_KEYS = 65_536
"""More are not waited for: their leases are broken at once."""
BATCH_KEYS = 256
JOIN_S = 60.0


class Removals:
    """The chunks of one tier that are to go; a thread tries again while there are any.

    ``remove`` takes keys and whether to break leases, and returns those that are still there; it
    may raise ``TierError``.
    """

    def __init__(
        self,
        remove: Callable[[Sequence[bytes], bool], Collection[bytes]],
        *,
        retry_s: float = RETRY_S,
        force_s: float = FORCE_S,
    ) -> None:
        self._remove = remove
        self._retry_s = retry_s
        self._force_s = force_s
        self._waiting: dict[bytes, float] = {}
        """Key to when its leases are broken."""
        self._lock = threading.Lock()
        """Held while the thread removes, so that what is claimed is not removed later."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk counts as gone."""
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def wait_for(self, keys: Collection[bytes]) -> list[bytes]:
        """These go when they can; returns those for which there is no room."""
        with self._lock:
            room = WAITING_LIMIT_KEYS - len(self._waiting)
            until = time.monotonic() + self._force_s
            taken = list(keys)[: max(0, room)]
            self._waiting |= {key: until for key in taken if key not in self._waiting}
            if self._waiting and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(
                    target=self._run, name="mooncake-removals", daemon=True
                )
                self._thread.start()
        return list(keys)[len(taken) :]

    def claim(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of them that were to go; they are the caller's to replace now."""
        if not self._waiting:
            return set()
        with self._lock:
            return {key for key in keys if self._waiting.pop(key, None) is not None}

    def close(self) -> None:
        """Nothing is removed any more; what still waits stays in the store."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._ended.wait(self._retry_s):
            with self._lock:
                with contextlib.suppress(TierError):  # The store does not answer: it is asked again
                    self._try_all(time.monotonic())
                if not self._waiting:
                    self._thread = None
                    return

    def _try_all(self, now: float) -> None:
        for force in (False, True):
            keys = [key for key, until in self._waiting.items() if (until <= now) is force]
            for start in range(0, len(keys), BATCH_KEYS):
                batch = keys[start : start + BATCH_KEYS]
                left = set(self._remove(batch, force))
                for key in batch:
                    if key not in left:
                        del self._waiting[key]

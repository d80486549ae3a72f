"""Who watches the router live: ``GET /internal/events`` answers with server-sent events for as long
as its connection lasts. Nothing is done while nobody watches.

``status``   what ``GET /internal/status`` says, at most once a second and only when it has changed.
             The first one has the latest ``timelines`` and ``incidents`` too; later ones do not,
             for these come by themselves. ``ended`` counts what has ended since somebody watches.
``request``  the record of a request that has ended, as in the log, when it is final; at most so
             many a second, failed ones for longer. ``ended.left_out`` counts the others.
``incident`` one thing that has happened (``incidents.py``); the same ``id`` again when it has
             happened again.

A comment every few seconds tells that the connection lives. A watcher that does not take what it is
sent is cut off: it comes again, and begins with a whole status.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.router.http_server import HttpConnection
    from splitserve.orchestrator.router.incidents import Incident, Incidents
    from splitserve.orchestrator.router.request_log import RequestLog
    from splitserve.orchestrator.router.request_records import Account
    from splitserve.orchestrator.router.sink import Sink
    from splitserve.orchestrator.router.token_counts import Tally

EVENTS_PATH = "/internal/events"
WATCHERS_LIMIT = 16
HELD_LIMIT_BYTES = 2**20
"""Of events that wait for one slow watcher, beyond what its connection holds and the latest
status.
"""
INTERVAL_S = 1.0
TIME_SHARE = 0.02
"""Of the router's time, that telling a status may take; large clusters' come less often."""
HEARTBEAT_S = 10.0
REQUESTS_PER_S_LIMIT = 20
"""Records of requests that are sent within a second; twice as many where requests fail."""
FIRST_TIMELINES = 32
SERVER_ERROR = 500
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
_HEARTBEAT = b": alive\n\n"


class Ended(msgspec.Struct):
    """What has ended while somebody watched: counts that only grow."""

    requests: int = 0
    failed: int = 0
    left_out: int = 0
    """Requests whose record was not sent."""
    prompt_tokens: int = 0
    expected_cached_tokens: int = 0
    """Of those prompt tokens, the ones that their nodes were expected to have."""
    output_tokens: int = 0


class EventStreams:
    """All watchers of a router."""

    def __init__(
        self,
        snapshot: Callable[[], dict[str, Any]],
        log: RequestLog,
        incidents: Incidents,
    ) -> None:
        self._snapshot = snapshot
        self._log = log
        self._incidents = incidents
        self._watchers: set[Watcher] = set()
        self._ended = Ended()
        self._sent_requests = 0
        """Within the present second."""
        self._last_status = b""
        self._said_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        incidents.on_incident = self._on_incident
        log.on_final.append(self._on_final)

    @property
    def are_on(self) -> bool:
        """Somebody watches."""
        return bool(self._watchers)

    def begin(self, connection: HttpConnection) -> None:
        """The connection gets events from now on. Raises ``ApiError`` 429 when there are many."""
        if len(self._watchers) >= WATCHERS_LIMIT:
            message = f"{WATCHERS_LIMIT} others watch already; close a page that nobody looks at"
            raise ApiError(429, message, retry_after_s=10)
        status = self._status()
        if not self._watchers:
            self._last_status = orjson.dumps(status)
        status["timelines"] = self._log.latest(FIRST_TIMELINES)
        status["incidents"] = self._incidents.shown()
        watcher = Watcher(connection, self)
        self._watchers.add(watcher)
        connection.listener = watcher
        connection.send_head(200, _HEADERS, None)
        watcher.say(_event("status", orjson.dumps(status)))
        if self._timer is None:
            self._arm()

    def forget(self, watcher: Watcher) -> None:
        """That one has left."""
        self._watchers.discard(watcher)

    def close(self) -> None:
        """The router stops: every stream ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            watcher.close()

    def _on_final(self, timeline: Timeline, tally: Tally, account: Account) -> None:
        """A request is over, and where its time went is known."""
        if not self._watchers:
            return
        ended = self._ended
        is_failed = timeline.status >= SERVER_ERROR or timeline.outcome == "error"
        prompt = timeline.prompt_tokens if tally.prompt_tokens is None else tally.prompt_tokens
        ended.requests += 1
        ended.failed += is_failed
        ended.prompt_tokens += prompt
        ended.expected_cached_tokens += min(prompt, timeline.expected_cached_tokens)
        ended.output_tokens += tally.output_tokens or 0
        if self._sent_requests >= REQUESTS_PER_S_LIMIT * (2 if is_failed else 1):
            ended.left_out += 1
            return
        self._sent_requests += 1
        self._say(_event("request", orjson.dumps(self._log.record(timeline, tally, account))))

    def _on_incident(self, incident: Incident) -> None:
        if self._watchers:
            self._say(_event("incident", msgspec.json.encode(incident)))

    def _arm(self, took_s: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(INTERVAL_S, took_s / TIME_SHARE), self._tick)

    def _tick(self) -> None:
        """A second is over."""
        self._timer = None
        self._sent_requests = 0
        if not self._watchers:
            return
        began = time.monotonic()
        try:
            self._tell_status()
        finally:
            self._arm(time.monotonic() - began)

    def _tell_status(self) -> None:
        """To all, when it has changed; else they hear that the connection lives."""
        status = orjson.dumps(self._status())
        if status != self._last_status:
            self._last_status = status
            self._said_at = time.monotonic()
            event = _event("status", status)
            for watcher in tuple(self._watchers):
                watcher.say_status(event)
        elif time.monotonic() - self._said_at >= HEARTBEAT_S:
            self._say(_HEARTBEAT)

    def _status(self) -> dict[str, Any]:
        return self._snapshot() | {"ended": msgspec.to_builtins(self._ended)}

    def _say(self, data: bytes) -> None:
        self._said_at = time.monotonic()
        for watcher in tuple(self._watchers):
            watcher.say(data)


class Watcher:
    """One that watches; the listener of its connection."""

    def __init__(self, sink: Sink, streams: EventStreams) -> None:
        self._sink = sink
        self._streams = streams
        self._is_paused = False
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._held_status = b""

    def say_status(self, data: bytes) -> None:
        """The status is sent; a slow watcher gets only the latest one."""
        if self._is_paused:
            self._held_status = data
        else:
            self._sink.send_body(data)

    def say(self, data: bytes) -> None:
        """The event is sent, held for a slow watcher, or too much for it: that one is cut off."""
        if not self._is_paused:
            self._sink.send_body(data)
        elif self._held_bytes + len(data) <= HELD_LIMIT_BYTES:
            self._held.append(data)
            self._held_bytes += len(data)
        else:
            self._drop()
            self._streams.forget(self)
            self._sink.abort()

    def close(self) -> None:
        """The stream ends with what was sent."""
        self._drop()
        self._sink.finish()

    def client_gone(self) -> None:
        """The watcher has left."""
        self._drop()
        self._streams.forget(self)

    def pause(self) -> None:
        """The watcher is slow."""
        self._is_paused = True

    def resume(self) -> None:
        """It has caught up."""
        self._is_paused = False
        while self._held and not self._is_paused:
            data = self._held.popleft()
            self._held_bytes -= len(data)
            self._sink.send_body(data)
        if self._held_status and not self._is_paused:
            status, self._held_status = self._held_status, b""
            self._sink.send_body(status)

    def _drop(self) -> None:
        self._held.clear()
        self._held_bytes, self._held_status = 0, b""


def _event(name: str, data: bytes) -> bytes:
    """As a server-sent event: JSON has no line ends."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

"""Who records the router's requests: each recorder gets a line of JSON when a request arrives and
one when it ends, for as long as its connection lasts. No line holds a word of a prompt.

``began`` comes first, with the time ``at_s`` on the router's own clock. ``arrived`` has the
request's ``id``, that time, and ``marks`` (hex) and ``prompt_bytes`` of its prompt
(``prompt_marks.py``), by which equal beginnings are told. ``ended`` has ``id``, ``input_tokens``,
``output_tokens`` (null without an answer) and ``output_limit_tokens``. A recorder that is too slow
loses lines, and is told how many in ``lost``.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import orjson

from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.router.http_server import HttpConnection
    from splitserve.orchestrator.router.prompt_marks import Marks
    from splitserve.orchestrator.router.sink import Sink
    from splitserve.orchestrator.router.token_counts import Tally

RECORDING_PATH = "/internal/recording"
RECORDERS_LIMIT = 4
HELD_LIMIT_BYTES = 4 * 2**20
"""Of lines that wait for a slow recorder."""
_LINES = [(b"content-type", b"application/x-ndjson")]


class Recordings:
    """All recorders of a router."""

    def __init__(self) -> None:
        self._recorders: list[Recorder] = []

    @property
    def are_on(self) -> bool:
        """Somebody records."""
        return bool(self._recorders)

    def begin(self, connection: HttpConnection) -> None:
        """The connection gets lines from now on. Raises ``ApiError`` 429 when there are many."""
        if len(self._recorders) >= RECORDERS_LIMIT:
            raise ApiError(429, f"{RECORDERS_LIMIT} recorders are at work; stop one of them")
        recorder = Recorder(connection, self)
        self._recorders.append(recorder)
        connection.listener = recorder
        connection.send_head(200, _LINES, None)
        recorder.say({"event": "began", "at_s": time.monotonic()})

    def arrived(self, request_id: str, marks: Marks) -> None:
        """A request is at the door."""
        self._say(
            {
                "event": "arrived",
                "id": request_id,
                "at_s": time.monotonic(),
                "marks": marks.joined.hex(),
                "prompt_bytes": marks.prompt_bytes,
            }
        )

    def ended(self, timeline: Timeline, tally: Tally) -> None:
        """A request is over."""
        prompt = tally.prompt_tokens
        self._say(
            {
                "event": "ended",
                "id": timeline.request_id,
                "input_tokens": timeline.prompt_tokens if prompt is None else prompt,
                "output_tokens": tally.output_tokens,
                "output_limit_tokens": tally.output_limit_tokens,
            }
        )

    def forget(self, recorder: Recorder) -> None:
        """That one has left."""
        self._recorders.remove(recorder)

    def close(self) -> None:
        """The router stops: every recording is complete."""
        recorders, self._recorders = self._recorders, []
        for recorder in recorders:
            recorder.close()

    def _say(self, line: dict[str, Any]) -> None:
        for recorder in self._recorders:
            recorder.say(line)


class Recorder:
    """One recorder; the listener of its connection."""

    def __init__(self, sink: Sink, recordings: Recordings) -> None:
        self._sink = sink
        self._recordings = recordings
        self._is_paused = False
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._lost_lines = 0

    def say(self, line: dict[str, Any]) -> None:
        """The line is sent, held for a slow recorder, or lost."""
        data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        if not self._is_paused:
            self._sink.send_body(data)
        elif self._held_bytes + len(data) > HELD_LIMIT_BYTES:
            self._lost_lines += 1
        else:
            self._held.append(data)
            self._held_bytes += len(data)

    def close(self) -> None:
        """What is held is sent, and the answer ends."""
        self.resume()
        self._sink.finish()

    def client_gone(self) -> None:
        """The recorder has left."""
        self._recordings.forget(self)

    def pause(self) -> None:
        """The recorder is slow."""
        self._is_paused = True

    def resume(self) -> None:
        """It has caught up."""
        self._is_paused = False
        held, self._held, self._held_bytes = self._held, deque(), 0
        lost, self._lost_lines = self._lost_lines, 0
        while held and not self._is_paused:
            self._sink.send_body(held.popleft())
        if held or (lost and self._is_paused):
            # Paused again by what was just sent; the rest keeps its place
            self._held = held
            self._held_bytes = sum(map(len, held))
            self._lost_lines = lost
        elif lost:
            self.say({"event": "lost", "lines": lost})

"""What the engines answer to a request's two legs, told to the core and passed on as it allows.

A streamed answer is held until the decode engine's first whole data event, so that an engine's
error in its first event still becomes an HTTP status; after that bytes are passed on as they come,
unparsed. An answer that is not streamed is held until it is complete (up to ``HELD_LIMIT_BYTES``),
so that an engine that dies in the middle of it is a 5xx and not half an answer.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import orjson

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.router.sent_tokens import BrokenStreamError
from splitserve.orchestrator.router.token_counts import UNKNOWN_COUNTS, AnswerCounter

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.engine_client import Leg, RawHeaders
    from splitserve.orchestrator.router.exchange import Exchange
    from splitserve.orchestrator.router.prompt_usage import WholeLines
    from splitserve.orchestrator.router.sent_tokens import SentTokens
    from splitserve.orchestrator.router.token_counts import TokenCounts

HELD_LIMIT_BYTES = 32 * 2**20
"""Most of an unstreamed answer that is held back until it is complete."""
FIRST_EVENT_LIMIT_BYTES = 16 * 2**20
"""Most of a stream that is held back until its first data event."""
PREFILL_LIMIT_BYTES = 64 * 1024
"""Of a longer answer of a prefill engine only its first bytes are looked at."""


class PrefillListener:
    """Reads the prefill engine's answer; its status and time go to the core, its body to
    ``on_answer``.
    """

    __slots__ = (
        "_attempt",
        "_body",
        "_body_bytes",
        "_driver",
        "_on_answer",
        "_request_id",
        "_status",
    )

    def __init__(
        self,
        driver: CoreDriver,
        request_id: str,
        attempt: int,
        on_answer: Callable[[bytes], None] | None = None,
    ) -> None:
        self._driver = driver
        self._request_id = request_id
        self._attempt = attempt
        self._on_answer = on_answer
        self._status = 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    def head_received(self, status: int, headers: RawHeaders) -> None:
        self._status = status

    def body_received(self, data: bytes, is_last: bool) -> None:
        if self._on_answer is not None and self._body_bytes < PREFILL_LIMIT_BYTES:
            self._body.append(data)
            self._body_bytes += len(data)

    def ended(self) -> None:
        if self._on_answer is not None:
            self._on_answer(b"".join(self._body))
        self._driver.tell(ev.PrefillAnswered(self._request_id, self._attempt, self._status))

    def failed(self, reason: str) -> None:
        if self._on_answer is not None:
            self._on_answer(b"")
        self._driver.tell(ev.PrefillFailed(self._request_id, self._attempt, reason))


class DecodeAnswer:
    """The decode engine's answer of one attempt: held until it may go out, then passed on."""

    __slots__ = (
        "_attempt",
        "_counter",
        "_driver",
        "_exchange",
        "_held",
        "_held_bytes",
        "_lines",
        "_sent",
        "headers",
        "heard_at",
        "is_event_stream",
        "is_relaying",
        "leg",
        "status",
    )

    def __init__(
        self, driver: CoreDriver, exchange: Exchange, attempt: int, sent: SentTokens | None
    ) -> None:
        self.leg: Leg | None = None
        self.status = 0
        self.headers: RawHeaders = []
        self.is_event_stream = False
        self.heard_at = monotonic()
        """When the engine last sent something."""
        self._driver = driver
        self._exchange = exchange
        self._attempt = attempt
        self._sent = sent
        self._counter = AnswerCounter() if sent is None else None
        """Of an answer without token ids."""
        self._lines: WholeLines | None = exchange.lines_to_count()
        """Of a stream whose events are not known to be whole, when a figure in them is changed."""
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.is_relaying = False
        """Its first data has come."""

    def fail_if_silent(self, limit_s: float) -> None:
        """The leg has failed if the engine has sent nothing for so long."""
        if monotonic() - self.heard_at >= limit_s:
            self._fail(f"its node is silent and sent nothing for {limit_s:g} s")

    def counts(self, other_events: int) -> TokenCounts:
        """What is known of an answer without token ids; so many events of it carry no token."""
        if self._counter is None or not self.is_relaying:
            return UNKNOWN_COUNTS
        return self._counter.counts(is_stream=self.is_event_stream, other_events=other_events)

    def take(self) -> bytes:
        """What is held, once."""
        held, self._held, self._held_bytes = b"".join(self._held), [], 0
        return held

    def head_received(self, status: int, headers: RawHeaders) -> None:
        self.status, self.headers = status, headers
        content_type = next((v for n, v in headers if n == b"content-type"), b"")
        self.is_event_stream = status < 400 and content_type.startswith(b"text/event-stream")

    def body_received(self, data: bytes, is_last: bool) -> None:
        self.heard_at = monotonic()
        if self.is_relaying:
            self._relay(data, is_last)
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self.is_event_stream:
            self._look_at_first_event(is_last)
        elif self._held_bytes > HELD_LIMIT_BYTES:
            if self.status >= 400:
                self._fail("its error answer is too large")
            else:
                self._start_relaying(is_last)

    def ended(self) -> None:
        if self.is_relaying and self._sent is not None and not self._sent.is_complete:
            self.failed("its stream ended before its end")
        elif self.is_relaying:
            self._end()
        elif self.status >= 400:
            self._driver.tell(ev.DecodeRefused(self._exchange.id, self._attempt, self.status))
        elif self.is_event_stream or not self._held_bytes:
            self.failed("the answer ended without any data")
        else:
            self._relay_whole()

    def failed(self, reason: str) -> None:
        if self.is_relaying and self._sent is not None and self._sent.is_finished:
            self._exchange.finish_with_tail(self._attempt)
            return
        self._driver.tell(ev.DecodeFailed(self._exchange.id, self._attempt, reason))

    def _look_at_first_event(self, is_last: bool) -> None:
        held = self.take()
        self._held, self._held_bytes = [held], len(held)
        event = first_data_event(held)
        if event is None:
            if len(held) > FIRST_EVENT_LIMIT_BYTES:
                self._fail("the stream does not begin with an event")
            return
        refusal = error_in_event(event)
        if refusal is None:
            self._start_relaying(is_last)
            return
        self.status, body = refusal
        self._held, self._held_bytes = [body], len(body)
        self.headers = [(b"content-type", b"application/json")]
        self._stop()
        self._driver.tell(ev.DecodeRefused(self._exchange.id, self._attempt, self.status))

    def _start_relaying(self, is_last: bool) -> None:
        if self._may_relay():
            self._exchange.send_answer_head(None)
            self._relay(self.take(), is_last)

    def _relay_whole(self) -> None:
        if not self._may_relay():
            return
        body = self.take()
        if self._counter is not None:
            self._counter.feed(body)
        self._exchange.relay_whole(body)
        self._end()

    def _may_relay(self) -> bool:
        """The first data has come. False when the core finds that the request's time was over
        before: the client has its answer, or another engine the request.
        """
        self._driver.tell(ev.FirstDataArrived(self._exchange.id, self._attempt))
        self.is_relaying = self._exchange.listens_to(self)
        return self.is_relaying

    def _end(self) -> None:
        if self._lines is not None and (rest := self._lines.rest()):
            self._exchange.relay(rest, False)
        self._driver.tell(ev.DecodeEnded(self._exchange.id, self._attempt))
        self._exchange.finish_answer()

    def _relay(self, data: bytes, is_last: bool) -> None:
        if self._sent is not None:
            try:
                data = self._sent.feed(data)
            except BrokenStreamError as error:
                self._fail(str(error))
                return
            if self._sent.is_followed:
                is_last = is_last and self._sent.is_complete
            else:
                self._sent, self._counter = None, AnswerCounter()
        elif self._lines is not None and self.is_event_stream:
            data = self._lines.feed(data) + (self._lines.rest() if is_last else b"")
        if self._counter is not None:
            self._counter.feed(data)
        self._exchange.relay(data, is_last)

    def _fail(self, reason: str) -> None:
        self._stop()
        self.failed(reason)

    def _stop(self) -> None:
        if self.leg is not None:
            self.leg.cancel()


def first_data_event(held: bytes) -> bytes | None:
    """The first complete event with data at the start of a stream (comments are passed over), None
    while there is none.
    """
    start = 0
    while True:
        end = held.find(b"\n\n", start)
        crlf = held.find(b"\r\n\r\n", start, end if end >= 0 else len(held))
        if crlf >= 0:
            end, size = crlf, 4
        elif end >= 0:
            size = 2
        else:
            return None
        event = held[start:end]
        if event.startswith(b"data:") or b"\ndata:" in event:
            return event
        start = end + size


def error_in_event(event: bytes) -> tuple[int, bytes] | None:
    """(status, JSON body) when the event says that the engine has failed instead of answering."""
    data = event[event.index(b"data:") + 5 :].strip()
    if not data.startswith(b'{"error"'):
        return None
    try:
        error = orjson.loads(data)["error"]
    except orjson.JSONDecodeError:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code <= 599 else 500, data

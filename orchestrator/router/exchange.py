"""One client's request in the shell: its two legs and the answer, as the core orders.

The answer goes out when the core knows of the first data: a status line that is sent is a promise.
A streamed answer is held until the decode engine's first whole data event, so that an engine's
error in its first event still becomes an HTTP status; after that bytes are passed on as they come,
unparsed. An answer that is not streamed is held until it is complete (up to ``HELD_LIMIT_BYTES``),
so that an engine that dies in the middle of it is a 5xx and not half an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import orjson

from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.router import headers as header_policy
from splitserve.orchestrator.router.engine_client import EngineAddress, Leg, RawHeaders
from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.agent.messages import NodeDescription
    from splitserve.orchestrator.core.effects import (
        AnswerError,
        StartAlone,
        StartDecode,
        StartPair,
        StartPrefill,
    )
    from splitserve.orchestrator.router.client_request import ClientRequest
    from splitserve.orchestrator.router.core_driver import CoreDriver

HELD_LIMIT_BYTES = 32 * 2**20
"""Most of an unstreamed answer that is held back until it is complete."""
FIRST_EVENT_LIMIT_BYTES = 1 * 2**20
"""Most of a stream that is held back until its first data event."""
JOIN_LIMIT_BYTES = 64 * 1024
"""Requests up to this size are written in one piece."""

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Sink(Protocol):
    """Where the client's answer goes. ``finish`` or ``abort`` comes last."""

    def send_head(self, status: int, headers: RawHeaders, body_bytes: int | None) -> None:
        """Status line and headers; ``body_bytes`` None for a body whose length is not known."""

    def send_body(self, data: bytes, is_last: bool = False) -> None:
        """The next bytes; ``is_last`` when ``finish`` follows at once."""

    def finish(self) -> None:
        """The answer is complete."""

    def abort(self) -> None:
        """Close the connection so that the client sees an incomplete answer."""


class Exchange:
    """A request, its legs and its answer. The driver calls the orders; the legs call back."""

    def __init__(
        self,
        driver: CoreDriver,
        request_id: str,
        request: ClientRequest,
        shared_headers: bytes,
        client_request_id: str,
        salt: str | None,
        sink: Sink,
    ) -> None:
        self.id = request_id
        self.client_request_id = client_request_id
        self._driver = driver
        self._request = request
        self._shared_headers = shared_headers
        self._salt = salt
        self._sink = sink
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        self._answer: DecodeAnswer | None = None
        self._is_answered = False

    # Orders of the core

    def start_pair(self, order: StartPair) -> None:
        """Send both legs."""
        self.start_prefill(order)
        self.start_decode(order)

    def start_decode(self, order: StartPair | StartDecode) -> None:
        """Send the decode leg of a split request."""
        for_decode = TransferParams(
            transfer_id=order.transfer_id,
            role="decode",
            attempt=order.attempt,
            peer_incarnation=order.prefill.incarnation,
            peer_addresses=order.prefill.control_addresses,
        )
        self._send_decode(order, orjson.dumps(seal(for_decode, self._driver.secret)))

    def start_prefill(self, order: StartPair | StartPrefill) -> None:
        """Send the prefill leg."""
        for_prefill = TransferParams(
            transfer_id=order.transfer_id,
            role="prefill",
            attempt=order.attempt,
            peer_incarnation=order.decode.incarnation,
        )
        sealed = orjson.dumps(seal(for_prefill, self._driver.secret))
        body = self._request.prefill_body(sealed, self._salt)
        listener = PrefillListener(self._driver, self.id, order.attempt)
        self._prefill = self._send(order.prefill, [body], listener)

    def start_alone(self, order: StartAlone) -> None:
        """Send the whole request to the decode node."""
        self._send_decode(order, None)

    def cancel_leg(self, leg: str) -> None:
        """Close the leg's connection."""
        if leg == "prefill" and self._prefill is not None:
            self._prefill.cancel()
        if leg == "decode" and self._decode is not None:
            self._decode.cancel()

    def answer_error(self, order: AnswerError) -> None:
        """An error status, an error event in a stream, or a broken-off answer."""
        error = ApiError(order.status, order.message, retry_after_s=order.retry_after_s)
        if not self._is_answered:
            self._answer_at_once(error.status, error.headers(self.client_request_id), error.body())
        elif self._answer is not None and self._answer.is_event_stream:
            start = b"" if self._answer.is_between_events else b"\n\n"
            self._sink.send_body(start + error.event(), is_last=True)
            self._sink.finish()
        else:
            self._sink.abort()

    def pass_refusal(self) -> None:
        """The decode engine's own error answer."""
        assert self._answer is not None
        headers = header_policy.to_client(self._answer.headers, self.client_request_id)
        self._answer_at_once(self._answer.status, headers, self._answer.take())

    def give_up(self) -> None:
        """The router itself has failed: nobody takes what was sent for an answer."""
        for leg in (self._prefill, self._decode):
            if leg is not None:
                leg.cancel()
        self._sink.abort()

    # The client's side

    def client_gone(self) -> None:
        """The client has closed its connection."""
        self._driver.tell(ev.ClientGone(self.id))

    def pause(self) -> None:
        """The client is slow: read no more from the decode engine."""
        if self._decode is not None:
            self._decode.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self._decode is not None:
            self._decode.resume()

    # The decode leg's side

    def send_answer_head(self, body_bytes: int | None) -> None:
        """The core knows of the first data: the client gets its status line."""
        assert self._answer is not None
        self._is_answered = True
        headers = header_policy.to_client(self._answer.headers, self.client_request_id)
        self._sink.send_head(self._answer.status, headers, body_bytes)

    def send_answer_body(self, data: bytes, is_last: bool) -> None:
        self._sink.send_body(data, is_last)

    def finish_answer(self) -> None:
        self._sink.finish()

    def _answer_at_once(self, status: int, headers: RawHeaders, body: bytes) -> None:
        self._is_answered = True
        self._sink.send_head(status, headers, len(body))
        self._sink.send_body(body, is_last=True)
        self._sink.finish()

    def _send_decode(
        self, order: StartPair | StartDecode | StartAlone, params: bytes | None
    ) -> None:
        self._answer = DecodeAnswer(self._driver, self, order.attempt)
        body = self._request.decode_body(params, self._salt)
        self._decode = self._send(order.decode, body, self._answer)
        self._answer.leg = self._decode

    def _send(
        self,
        node: NodeDescription,
        body: Sequence[bytes | memoryview],
        listener: PrefillListener | DecodeAnswer,
    ) -> Leg:
        address = EngineAddress.of(node.engine_url)
        size = sum(map(len, body))
        head = header_policy.request_head(
            PATHS[self._request.endpoint],
            f"{address.host}:{address.port}",
            node.engine_api_key,
            self._shared_headers,
            size,
        )
        payload: list[bytes | memoryview] = [head, *body]
        if size <= JOIN_LIMIT_BYTES:
            payload = [b"".join(payload)]
        return self._driver.client.send(address, payload, listener)


class PrefillListener:
    """Reads the prefill engine's answer and drops it; its status and time go to the core."""

    def __init__(self, driver: CoreDriver, request_id: str, attempt: int) -> None:
        self._driver = driver
        self._request_id = request_id
        self._attempt = attempt
        self._status = 0

    def head_received(self, status: int, headers: RawHeaders) -> None:
        self._status = status

    def body_received(self, data: bytes, is_last: bool) -> None:
        pass

    def ended(self) -> None:
        self._driver.tell(ev.PrefillAnswered(self._request_id, self._attempt, self._status))

    def failed(self, reason: str) -> None:
        self._driver.tell(ev.PrefillFailed(self._request_id, self._attempt, reason))


class DecodeAnswer:
    """The decode engine's answer of one attempt: held until it may go out, then passed on."""

    def __init__(self, driver: CoreDriver, exchange: Exchange, attempt: int) -> None:
        self.leg: Leg | None = None
        self.status = 0
        self.headers: RawHeaders = []
        self.is_event_stream = False
        self.is_between_events = True
        self._driver = driver
        self._exchange = exchange
        self._attempt = attempt
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._is_relaying = False

    def take(self) -> bytes:
        """What is held, once."""
        held, self._held, self._held_bytes = b"".join(self._held), [], 0
        return held

    def head_received(self, status: int, headers: RawHeaders) -> None:
        self.status, self.headers = status, headers
        content_type = next((v for n, v in headers if n == b"content-type"), b"")
        self.is_event_stream = status < 400 and content_type.startswith(b"text/event-stream")

    def body_received(self, data: bytes, is_last: bool) -> None:
        if self._is_relaying:
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
                self._start_relaying(None, is_last)

    def ended(self) -> None:
        if self._is_relaying:
            self._driver.tell(ev.DecodeEnded(self._exchange.id, self._attempt))
            self._exchange.finish_answer()
        elif self.status >= 400:
            self._driver.tell(ev.DecodeRefused(self._exchange.id, self._attempt, self.status))
        elif self.is_event_stream or not self._held_bytes:
            self.failed("the answer ended without any data")
        else:
            self._start_relaying(self._held_bytes, True)
            self._driver.tell(ev.DecodeEnded(self._exchange.id, self._attempt))
            self._exchange.finish_answer()

    def failed(self, reason: str) -> None:
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
            self._start_relaying(None, is_last)
            return
        self.status, body = refusal
        self._held, self._held_bytes = [body], len(body)
        self.headers = [(b"content-type", b"application/json")]
        self._stop()
        self._driver.tell(ev.DecodeRefused(self._exchange.id, self._attempt, self.status))

    def _start_relaying(self, body_bytes: int | None, is_last: bool) -> None:
        self._is_relaying = True
        self._driver.tell(ev.FirstDataArrived(self._exchange.id, self._attempt))
        self._exchange.send_answer_head(body_bytes)
        self._relay(self.take(), is_last)

    def _relay(self, data: bytes, is_last: bool) -> None:
        if self.is_event_stream:
            if len(data) >= 4:
                self.is_between_events = data.endswith((b"\n\n", b"\r\n\r\n"))
            else:
                self._tail = (self._tail + data)[-4:]
                self.is_between_events = self._tail.endswith((b"\n\n", b"\r\n\r\n"))
        self._exchange.send_answer_body(data, is_last)

    _tail = b""

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

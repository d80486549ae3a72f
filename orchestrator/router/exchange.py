"""One client's request in the shell: its two legs and the answer, as the core orders.

The answer goes out when the core knows of the first data: a status line that is sent is a promise.
A stream that may be continued elsewhere is asked for with its token ids; when its engine fails, the
next legs ask for what is left, and the client sees one answer (``sent_tokens``).
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

import orjson

from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.observe.trace_context import DECODE_LEG, PREFILL_LEG, traceparent_of
from splitserve.orchestrator.router import headers as header_policy
from splitserve.orchestrator.router.client_request import continued
from splitserve.orchestrator.router.endpoints import CHAT, MESSAGES, PATHS, RESPONSES
from splitserve.orchestrator.router.engine_answers import DecodeAnswer, PrefillListener
from splitserve.orchestrator.router.engine_client import EngineAddress, Leg, RawHeaders
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.prompt_marks import NO_MARKS, Marks
from splitserve.orchestrator.router.prompt_usage import (
    RESPONSE_LINE_LIMIT_BYTES,
    UNKNOWN,
    WAIT_LIMIT_S,
    Cached,
    WholeLines,
    figures_of,
)
from splitserve.orchestrator.router.sent_tokens import BrokenStreamError, SentTokens
from splitserve.orchestrator.router.token_counts import Tally, usage_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.agent.messages import NodeDescription
    from splitserve.orchestrator.core.effects import (
        AnswerError,
        DoubtLeg,
        StartAlone,
        StartDecode,
        StartPair,
        StartPrefill,
    )
    from splitserve.orchestrator.observe.trace_context import TraceContext
    from splitserve.orchestrator.router.client_request import ClientRequest
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.sink import Sink

JOIN_LIMIT_BYTES = 64 * 1024
"""Requests up to this size are written in one piece."""

CHAT_EVENTS = 2
"""Events of a streamed chat that bring no token: the first, with the role, and the last. Of a
completion only the last one does not.
"""


class LateEnd:
    """The end of an answer that waits."""

    __slots__ = ("data", "is_finished", "is_last", "is_whole", "timer")

    def __init__(self, data: bytes, is_last: bool, *, is_whole: bool) -> None:
        self.data = data
        self.is_last = is_last
        self.is_whole = is_whole
        self.is_finished = False
        """Nothing comes behind it."""
        self.timer: asyncio.TimerHandle


class Exchange:
    """A request, its legs and its answer. The driver calls the orders; the legs call back."""

    __slots__ = (
        "_answer",
        "_awaits_cached",
        "_cached",
        "_decode",
        "_driver",
        "_figures",
        "_is_answered",
        "_is_event_stream",
        "_is_over",
        "_is_paused",
        "_is_sent",
        "_last_bytes",
        "_late",
        "_marks",
        "_name_response",
        "_prefill",
        "_present_request",
        "_prompt_tokens",
        "_request",
        "_resumed_tokens",
        "_salt",
        "_sent",
        "_shared_headers",
        "_sink",
        "_tenant_tag",
        "_trace",
        "client_request_id",
        "id",
        "server_timing",
    )

    def __init__(
        self,
        driver: CoreDriver,
        request_id: str,
        request: ClientRequest,
        shared_headers: bytes,
        client_request_id: str,
        salt: str | None,
        sink: Sink,
        tenant_tag: str = "",
        marks: Marks = NO_MARKS,
        name_response: Callable[[str], str] | None = None,
        trace: TraceContext | None = None,
    ) -> None:
        """``name_response`` gives the id of a response that the engine of that incarnation is to
        make.
        """
        self.id = request_id
        self.client_request_id = client_request_id
        self.server_timing: Callable[[str], bytes] | None = None
        """The value of that header, for a client that wants it."""
        self._driver = driver
        self._request = request
        self._shared_headers = shared_headers
        self._present_request = request
        """What the next legs ask for: the client's request, or what is left of it."""
        self._resumed_tokens = 0
        self._salt = salt
        self._marks = marks
        self._sink = sink
        self._tenant_tag = tenant_tag
        self._name_response = name_response
        self._figures = figures_of(request.endpoint)
        self._trace = trace
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        self._answer: DecodeAnswer | None = None
        self._cached: Cached | None = None
        """How much of the client's prompt the prefill engine had, None when none computed it."""
        self._awaits_cached = False
        """It has not told yet."""
        self._late: LateEnd | None = None
        """The answer's end, while it waits for that."""
        self._prompt_tokens: int | None = None
        """As the prefill engine counts them."""
        self._is_answered = False
        """The client has its status line."""
        self._is_sent = False
        """And the last of the body."""
        self._is_over = False
        self._is_event_stream = False
        self._is_paused = False
        self._last_bytes = b""
        self._sent: SentTokens | None = None
        if request.can_continue:
            self._sent = SentTokens(has_usage=request.wants_usage)

    def tally(self) -> Tally:
        """What is known of the request's lengths by now."""
        sent = self._sent
        prompt, answered = self._prompt_tokens, None
        if sent is not None and sent.can_continue:
            prompt, answered = sent.prompt_tokens, sent.sent
        elif self._answer is not None:
            found = self._answer.counts(CHAT_EVENTS if self._request.endpoint == CHAT else 1)
            prompt, answered = found.prompt or prompt, found.answer
        limit = self._request.output_tokens
        return Tally(self.client_request_id, prompt, answered, limit, self._trace)

    # Orders of the core

    def start_pair(self, order: StartPair) -> None:
        """Send both legs."""
        if not self._begin(order.attempt):
            self._driver.tell(ev.PrefillAnswered(self.id, order.attempt, 200))
            return
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
            resumed_tokens=self._resumed_tokens,
            tenant=self._tenant_tag,
            marks=self._marks.joined,
            prompt_bytes=self._marks.prompt_bytes,
            traceparent=traceparent_of(self._trace, DECODE_LEG),
        )
        self._send_decode(order, self._params(for_decode))

    def start_prefill(self, order: StartPair | StartPrefill) -> None:
        """Send the prefill leg."""
        # Behind an answer's beginning the marks would not tell where in the tokens they lie
        marks = NO_MARKS if self._resumed_tokens else self._marks
        on_answer = None
        if not self._resumed_tokens:
            self._cached, on_answer = UNKNOWN, self._note_prefill
            self._awaits_cached = True
        for_prefill = TransferParams(
            transfer_id=order.transfer_id,
            role="prefill",
            attempt=order.attempt,
            peer_incarnation=order.decode.incarnation,
            tenant=self._tenant_tag,
            marks=marks.joined,
            prompt_bytes=marks.prompt_bytes,
            traceparent=traceparent_of(self._trace, PREFILL_LEG),
        )
        body = self._present_request.prefill_body(self._params(for_prefill), self._salt)
        listener = PrefillListener(self._driver, self.id, order.attempt, on_answer)
        self._prefill = self._send(order.prefill, [body], listener, PREFILL_LEG)

    def start_alone(self, order: StartAlone) -> None:
        """Send the whole request to the decode node."""
        if not self._begin(order.attempt):
            return
        params = None
        if not self._resumed_tokens:
            self._cached = None
        has_news = self._resumed_tokens or self._tenant_tag or self._marks.joined
        if has_news and self._request.needs_kv:
            alone = TransferParams(
                transfer_id=f"{self.id}.{order.attempt}",
                role="alone",
                attempt=order.attempt,
                peer_incarnation="",
                resumed_tokens=self._resumed_tokens,
                tenant=self._tenant_tag,
                marks=self._marks.joined,
                prompt_bytes=self._marks.prompt_bytes,
            )
            params = self._params(alone)
        self._send_decode(order, params)

    def doubt_decode(self, order: DoubtLeg) -> None:
        """The decode leg has failed if it should have brought something and did not."""
        answer = self._answer
        if answer is not None and not self._is_paused:
            answer.fail_if_silent(order.silence_limit_s)

    def cancel_leg(self, leg: str) -> None:
        """Close the leg's connection."""
        if leg == "prefill" and self._prefill is not None:
            self._prefill.cancel()
            self._send_late()
        if leg == "decode" and self._decode is not None:
            self._decode.cancel()

    def answer_error(self, order: AnswerError) -> None:
        """An error status, an error event in a stream, or a broken-off answer."""
        self._send_late()
        error = ApiError(order.status, order.message, retry_after_s=order.retry_after_s)
        error.endpoint = self._request.endpoint
        if not self._is_answered:
            self._answer_at_once(error.status, error.headers(self.client_request_id), error.body())
        elif self._is_sent:
            self.finish_answer()
        elif self._sent is not None and self._sent.is_finished:
            self._send_tail(self._sent)
        elif self._is_event_stream:
            start = b"" if self._is_between_events else b"\n\n"
            self.send_answer_body(start + error.event(), True)
            self.finish_answer()
        else:
            self._abort()

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
        self._abort()

    # The client's side

    def client_gone(self) -> None:
        """The client has closed its connection."""
        self._driver.tell(ev.ClientGone(self.id))

    def pause(self) -> None:
        """The client is slow: read no more from the decode engine, but for its first data, which
        tell that it works.
        """
        self._is_paused = True
        if self._decode is not None and self._answer is not None and self._answer.is_relaying:
            self._decode.pause()

    def resume(self) -> None:
        """The client has caught up."""
        self._is_paused = False
        if self._answer is not None:
            self._answer.heard_at = monotonic()
        if self._decode is not None:
            self._decode.resume()

    # The decode leg's side

    def send_answer_head(self, body_bytes: int | None) -> None:
        """The core knows of the first data: the client gets its status line."""
        assert self._answer is not None
        if self._is_paused:
            self.pause()
        if self._is_answered:
            return
        self._is_answered = True
        self._is_event_stream = self._answer.is_event_stream
        headers = header_policy.to_client(self._answer.headers, self.client_request_id)
        if self.server_timing is not None:
            headers.append((b"server-timing", self.server_timing(self.id)))
        self._sink.send_head(self._answer.status, headers, body_bytes)

    def send_answer_body(self, data: bytes, is_last: bool) -> None:
        if self._is_sent:
            return
        self._is_sent = is_last
        if self._is_event_stream and data:
            self._last_bytes = data if len(data) >= 4 else (self._last_bytes + data)[-4:]
        self._sink.send_body(data, is_last)

    @property
    def _is_between_events(self) -> bool:
        return not self._last_bytes or self._last_bytes.endswith((b"\n\n", b"\r\n\r\n"))

    def finish_answer(self) -> None:
        """The client has its whole answer, or gets it when its end need not wait; said once."""
        if self._late is not None:
            self._late.is_finished = True
        elif not self._is_over:
            self._is_over = True
            self._sink.finish()

    def finish_with_tail(self, attempt: int) -> None:
        """The engine has failed after its last token: the rest is known."""
        assert self._sent is not None
        self._driver.tell(ev.DecodeEnded(self.id, attempt))
        self._send_tail(self._sent)

    def lines_to_count(self) -> WholeLines | None:
        """For a stream in which a figure is another engine's to tell; None when there is none."""
        endpoint = self._request.endpoint
        if self._cached is None:
            return None
        if endpoint in (RESPONSES, MESSAGES):
            return WholeLines(RESPONSE_LINE_LIMIT_BYTES)
        return WholeLines() if self._request.wants_usage else None

    def relay(self, data: bytes, is_last: bool) -> None:
        """The decode engine's next bytes, with the prefill engine's count of cached tokens."""
        if self._late is not None:
            self._late.data += data
            self._late.is_last = is_last
        elif self._cached is None:
            self.send_answer_body(data, is_last)
        elif self._awaits_cached and self._figures.are_in(data):
            self._hold(LateEnd(data, is_last, is_whole=False))
        else:
            self.send_answer_body(self._figures.written(data, self._cached), is_last)

    def relay_whole(self, body: bytes) -> None:
        """The same with an answer that is not streamed, and its head."""
        if self._awaits_cached and self._figures.are_in(body):
            self._hold(LateEnd(body, is_last=True, is_whole=True))
            return
        if self._cached is not None:
            body = self._figures.written(body, self._cached)
        self.send_answer_head(len(body))
        self.send_answer_body(body, True)

    def _hold(self, late: LateEnd) -> None:
        late.timer = asyncio.get_running_loop().call_later(WAIT_LIMIT_S, self._send_late)
        self._late = late

    def _send_late(self) -> None:
        """What is known by now of the count has to do."""
        self._awaits_cached = False
        late, self._late = self._late, None
        if late is None:
            return
        late.timer.cancel()
        if late.is_whole:
            self.relay_whole(late.data)
        else:
            self.relay(late.data, late.is_last)
        if late.is_finished:
            self.finish_answer()

    def listens_to(self, answer: DecodeAnswer) -> bool:
        """Whether that is the answer that the client is to have, and has not had."""
        return self._answer is answer and not self._is_over

    def _note_prefill(self, answer: bytes) -> None:
        self._cached = self._figures.read(answer)
        self._prompt_tokens = usage_in(answer).prompt
        self._send_late()

    def _send_tail(self, sent: SentTokens) -> None:
        self._send_late()
        self.send_answer_body(b"" if sent.is_complete else sent.tail(), True)
        self.finish_answer()

    def _abort(self) -> None:
        self._is_sent = self._is_over = True
        self._sink.abort()

    def _begin(self, attempt: int) -> bool:
        """Both legs begin anew, behind what the client has. False when it has everything."""
        if not self._is_answered:
            return True
        assert self._sent is not None, "a stream without token ids is continued"
        if self._sent.is_finished:
            self._driver.tell(ev.FirstDataArrived(self.id, attempt))
            self.finish_with_tail(attempt)
            return False
        if not self._sent.can_continue:
            raise BrokenStreamError("the engine has not sent the prompt's token ids")
        self._sent.begin_anew()
        self._present_request = continued(self._request, self._sent)
        self._resumed_tokens = self._sent.sent
        return True

    def _params(self, params: TransferParams) -> bytes:
        """``kv_transfer_params`` as JSON; those of a chat that goes on bring its token ids."""
        sealed = orjson.dumps(seal(params, self._driver.secret))
        if self._present_request is self._request or self._request.endpoint != CHAT:
            return sealed
        assert self._sent is not None
        return sealed[:-1] + b',"prompt_token_ids":' + self._sent.ids() + b"}"

    def _answer_at_once(self, status: int, headers: RawHeaders, body: bytes) -> None:
        self._is_answered = True
        self._sink.send_head(status, headers, len(body))
        self.send_answer_body(body, True)
        self.finish_answer()

    def _send_decode(
        self, order: StartPair | StartDecode | StartAlone, params: bytes | None
    ) -> None:
        if self._is_answered and self._present_request is self._request:
            raise BrokenStreamError("the answer would begin again")
        self._answer = DecodeAnswer(self._driver, self, order.attempt, self._sent)
        with_ids = self._sent is not None and not self._resumed_tokens
        name = self._name_response
        response_id = name(order.decode.incarnation) if name is not None else ""
        body = self._present_request.decode_body(
            params, self._salt, with_ids=with_ids, response_id=response_id
        )
        self._decode = self._send(order.decode, body, self._answer, DECODE_LEG)
        self._answer.leg = self._decode

    def _send(
        self,
        node: NodeDescription,
        body: Sequence[bytes | memoryview],
        listener: PrefillListener | DecodeAnswer,
        span: str,
    ) -> Leg:
        address = EngineAddress.of(node.engine_url)
        size = sum(map(len, body))
        head = header_policy.request_head(
            self._request.target or PATHS[self._request.endpoint],
            f"{address.host}:{address.port}",
            node.engine_api_key,
            self._shared_headers + header_policy.trace_line(self._trace, span),
            size,
            self._request.method,
        )
        payload: list[bytes | memoryview] = [head, *body]
        if size <= JOIN_LIMIT_BYTES:
            payload = [b"".join(payload)]
        return self._driver.client.send(address, payload, listener)

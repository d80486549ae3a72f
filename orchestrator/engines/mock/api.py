"""The mock engine's HTTP server: vLLM's OpenAI surface as far as a router and its clients use it.

A client that closes its connection aborts its requests: aiohttp then cancels the handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.kv_transfer.transfer_params import resumed_tokens
from splitserve.orchestrator.engines.mock.engine import Answers, EngineDeadError, EngineFailed
from splitserve.orchestrator.engines.mock.faults import Faults
from splitserve.orchestrator.engines.mock.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    MockApiError,
    Prompt,
    Shapes,
    TextOf,
    limit_tokens,
    prompts_of,
    read_body,
    read_tokenize,
    usage_of,
)
from splitserve.orchestrator.engines.mock.scheduler import Request
from splitserve.orchestrator.engines.mock.tokenizer import decode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.orchestrator.engines.mock.engine import MockEngine
    from splitserve.orchestrator.engines.mock.faults import FaultBox

BODY_LIMIT_BYTES = 64 * 2**20
_EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class _Choice:
    """One answer of a request."""

    request: Request
    prompt: Prompt
    text: TextOf
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class _Piece:
    """What one new token adds to one choice."""

    choice: _Choice
    index: int
    text: str
    is_first: bool


class MockApi:
    """The routes. Nothing here decides; it translates between HTTP and the engine."""

    def __init__(
        self,
        engine: MockEngine,
        faults: FaultBox,
        *,
        model: str,
        max_model_len: int,
        api_key: str,
        secret: bytes,
        allow_faults: bool,
    ) -> None:
        self._engine = engine
        self._faults = faults
        self._model = model
        self._max_model_len = max_model_len
        self._api_key = api_key
        self._secret = secret
        self._allow_faults = allow_faults
        self._metrics = CollectorRegistry()
        self._metrics.register(_EngineMetrics(engine))

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(
            client_max_size=BODY_LIMIT_BYTES, middlewares=[self._authenticated, _errors_as_json]
        )
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/version", self._version)
        if self._allow_faults:
            app.router.add_get("/mock/faults", self._get_faults)
            app.router.add_put("/mock/faults", self._put_faults)
        return app

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_guarded = request.path.startswith(("/v1", "/mock"))
        if is_guarded and self._api_key:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.failure is None else 503)

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics), content_type="text/plain")

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "splitserve",
            "root": self._model,
            "max_model_len": self._max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = read_tokenize(await request.read())
        if body.model is not None and body.model != self._model:
            raise MockApiError(404, f"The model `{body.model}` does not exist.", "model")
        tokens = prompts_of(body)[0].tokens
        told = {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens}
        return _json(told)

    async def _detokenize(self, request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=DetokenizeBody)
        except msgspec.DecodeError as error:
            raise MockApiError(400, f"the request body is not valid: {error}") from error
        return _json({"prompt": decode(body.tokens)})

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": "mock"})

    async def _get_faults(self, request: web.Request) -> web.Response:
        return _json(msgspec.to_builtins(self._faults.now))

    async def _put_faults(self, request: web.Request) -> web.Response:
        try:
            self._faults.set(msgspec.json.decode(await request.read(), type=Faults))
        except msgspec.DecodeError as error:
            raise MockApiError(400, str(error)) from error
        return await self._get_faults(request)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_body(await request.read(), CompletionBody))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_body(await request.read(), ChatBody))

    async def _answer(
        self, request: web.Request, body: CompletionBody | ChatBody
    ) -> web.StreamResponse:
        if body.model is not None and body.model != self._model:
            raise MockApiError(404, f"The model `{body.model}` does not exist.", "model")
        if self._faults.take_refusal():
            raise MockApiError(500, "this request is refused, as a test has asked for")
        is_chat = isinstance(body, ChatBody)
        given = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{given}"
        choices = self._choices(body, request_id)
        shapes = Shapes(request_id, self._model, is_chat=is_chat)
        await self._faults.admit()
        answers: Answers = asyncio.Queue()
        try:
            for index, choice in enumerate(choices):
                self._engine.submit(choice.request, answers, index)
            pieces = self._pieces(choices, answers)
            if body.stream:
                response = web.StreamResponse(headers=_EVENT_STREAM)
                # a client that leaves between two tokens: nobody is left to be told
                with contextlib.suppress(ConnectionResetError):
                    await _stream(request, response, body, shapes, choices, pieces)
                return response
            async for _ in pieces:
                pass
            whole = shapes.whole(_whole_choices(body, shapes, choices), _usage(choices))
            return _json(whole)
        except EngineDeadError as error:
            raise MockApiError(500, str(error)) from error
        finally:
            for choice in choices:
                self._engine.abort(choice.request)

    def _choices(self, body: CompletionBody | ChatBody, request_id: str) -> list[_Choice]:
        """One per prompt and ``n``; a transfer belongs to the first."""
        found: list[_Choice] = []
        for prompt in prompts_of(body):
            tokens = prompt.tokens
            if prompt.text is not None and self._faults.now.tokenise_differently:
                tokens = (*tokens, ord(" "))
            answer_tokens = limit_tokens(body, len(tokens), self._max_model_len)
            for _ in range(body.n or 1):
                request = Request(
                    id=f"{request_id}-{len(found)}-{uuid.uuid4().hex[:8]}",
                    prompt=tokens,
                    max_tokens=answer_tokens,
                    min_tokens=body.min_tokens,
                    ignore_end=body.ignore_eos,
                    stop_ids=frozenset(body.stop_token_ids or ()),
                    salt=body.cache_salt or "",
                    kv_transfer_params=None if found else body.kv_transfer_params,
                )
                text = TextOf(body.stops)
                resumed = resumed_tokens(request.kv_transfer_params, self._secret)
                if resumed:
                    text.resume(decode(tokens[-resumed:]))
                found.append(_Choice(request, prompt, text))
        return found

    async def _pieces(self, choices: list[_Choice], answers: Answers) -> AsyncIterator[_Piece]:
        """Every new token, until all choices have ended. Raises ``EngineDeadError``."""
        open_choices = len(choices)
        while open_choices:
            new = await answers.get()
            if isinstance(new, EngineFailed):
                raise EngineDeadError(new.reason)
            choice = choices[new.index]
            if choice.finish_reason is not None:
                continue
            is_first = not choice.tokens
            choice.tokens.append(new.token)
            choice.finish_reason, choice.cached_tokens = new.finish_reason, new.cached_tokens
            is_last = new.finish_reason is not None
            text = choice.text.feed(decode([new.token]), is_last=is_last)
            if choice.text.stop_reason is not None:
                choice.finish_reason = "stop"
                self._engine.abort(choice.request)
            choice.pieces.append(text)
            open_choices -= choice.finish_reason is not None
            yield _Piece(choice, new.index, text, is_first)


async def _stream(
    request: web.Request,
    response: web.StreamResponse,
    body: CompletionBody | ChatBody,
    shapes: Shapes,
    choices: list[_Choice],
    pieces: AsyncIterator[_Piece],
) -> None:
    """Server-sent events; the status line goes out with the first token. Raises
    ``ConnectionResetError``.
    """
    try:
        async for piece in pieces:
            choice = piece.choice
            if not response.prepared:
                await response.prepare(request)
            ids = choice.tokens[-1:] if body.return_token_ids else None
            prompt_ids = None
            if body.return_token_ids and piece.is_first:
                prompt_ids = list(choice.request.prompt)
            if piece.is_first and shapes.is_chat:
                await _send(response, shapes.role_chunk(piece.index, prompt_ids))
            stop = choice.text.stop_reason
            chunk = shapes.chunk(
                piece.index, piece.text, choice.finish_reason, stop, ids=ids, prompt_ids=prompt_ids
            )
            await _send(response, chunk)
        if body.stream_options is not None and body.stream_options.include_usage:
            await _send(response, shapes.usage_chunk(_usage(choices)))
    except EngineDeadError as error:
        if not response.prepared:
            raise
        await _send(response, MockApiError(500, str(error)).body())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()


def _whole_choices(
    body: CompletionBody | ChatBody, shapes: Shapes, choices: list[_Choice]
) -> list[dict[str, Any]]:
    found = []
    for index, choice in enumerate(choices):
        text = "".join(choice.pieces)
        if isinstance(body, CompletionBody) and body.echo:
            text = (choice.prompt.text or decode(choice.prompt.tokens)) + text
        stop = choice.text.stop_reason
        whole = shapes.choice(index, text, choice.finish_reason, stop)
        if body.return_token_ids:
            whole |= {"token_ids": choice.tokens, "prompt_token_ids": list(choice.request.prompt)}
        found.append(whole)
    return found


def _usage(choices: list[_Choice]) -> dict[str, Any]:
    prompts = {id(choice.prompt): choice for choice in choices}.values()
    return usage_of(
        sum(len(choice.request.prompt) for choice in prompts),
        sum(len(choice.tokens) for choice in choices),
        sum(choice.cached_tokens for choice in prompts),
    )


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except MockApiError as error:
        return _json(error.body(), error.status)
    except web.HTTPNotFound:
        return _json({"detail": "Not Found"}, 404)


class _EngineMetrics(Collector):
    """The gauges of vLLM that say how full an engine is."""

    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        scheduler = self._engine.scheduler
        pool = scheduler.pool
        used = 1 - pool.free_blocks / max(1, pool.total_blocks - 1)
        for name, text, gauge in (
            ("num_requests_running", "Requests that are computed", scheduler.running_requests),
            ("num_requests_waiting", "Requests that are not", scheduler.waiting_requests),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all", used),
        ):
            yield GaugeMetricFamily(f"vllm:{name}", text, value=gauge)
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens answered", self._engine.prompt_tokens),
            ("generation_tokens", "Tokens generated", self._engine.generated_tokens),
        ):
            yield CounterMetricFamily(f"vllm:{name}", text, value=count)

"""The HTTP server of our own engines: vLLM's OpenAI surface as far as a router and its clients use
it.

A client that closes its connection aborts its requests: aiohttp then cancels the handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.kv_transfer.transfer_params import resumed_tokens
from splitserve.orchestrator.engines.serving import logprobs
from splitserve.orchestrator.engines.serving.engine import Answers, EngineDeadError, EngineFailed
from splitserve.orchestrator.engines.serving.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Prompt,
    Shapes,
    TextOf,
    limit_tokens,
    usage_of,
)
from splitserve.orchestrator.engines.serving.scheduler import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from splitserve.orchestrator.engines.serving.engine import Engine, Sampled
    from splitserve.orchestrator.engines.serving.front import Detokenizer, Front
    from splitserve.orchestrator.engines.serving.protocol import Request as Body

DEV_MODE_ENV = "VLLM_SERVER_DEV_MODE"
"""vLLM's own variable: routes for whoever develops and measures."""
BODY_LIMIT_BYTES = 64 * 2**20
_EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class _Choice:
    """One answer of a request."""

    request: Request
    prompt: Prompt
    text: TextOf
    detokenizer: Detokenizer
    pieces: list[str] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    seen_text: int = 0
    """Characters of the tokens so far, also of those that are held back."""
    finish_reason: str | None = None
    cached_tokens: int = 0

    @property
    def tokens(self) -> list[int]:
        """The answer's."""
        return [one.token for one in self.sampled]


@dataclass(frozen=True)
class _Piece:
    """What one new token adds to one choice."""

    choice: _Choice
    index: int
    text: str
    is_first: bool


@dataclass(frozen=True)
class Served:
    """What the server must know besides its engine."""

    model: str
    """The name that clients use."""
    max_model_len: int
    api_key: str
    """Empty: none is asked for."""
    secret: bytes
    """The cluster's, with which transfer parameters are sealed."""
    version: str


class EngineApi:
    """The routes. Nothing here decides; it translates between HTTP and the engine."""

    guarded: tuple[str, ...] = ("/v1",)
    """Beginnings of the paths for which the key is asked."""
    reads_in_thread = False
    """Whether turning text into tokens takes so long that it must not keep the loop."""

    def __init__(self, engine: Engine, front: Front, served: Served) -> None:
        self._engine = engine
        self._front = front
        self._served = served
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
        if os.environ.get(DEV_MODE_ENV) == "1":
            app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        return app

    async def _admit(self) -> None:
        """Returns when a request may reach the engine. Raises ``ApiError``."""

    def _prompts(self, body: Body) -> list[Prompt]:
        return self._front.prompts(body)

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_guarded = request.path.startswith(self.guarded)
        if is_guarded and self._served.api_key:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._served.api_key}".encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.failure is None else 503)

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics), content_type="text/plain")

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._served.model,
            "object": "model",
            "created": 0,
            "owned_by": "splitserve",
            "root": self._served.model,
            "max_model_len": self._served.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = self._front.read_tokenize(await request.read())
        if body.model is not None and body.model != self._served.model:
            raise ApiError(404, f"The model `{body.model}` does not exist.", "model")
        tokens = self._front.prompts(body)[0].tokens
        told = {"count": len(tokens), "max_model_len": self._served.max_model_len, "tokens": tokens}
        return _json(told)

    async def _detokenize(self, request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=DetokenizeBody)
        except msgspec.DecodeError as error:
            raise ApiError(400, f"the request body is not valid: {error}") from error
        return _json({"prompt": self._front.decode(body.tokens)})

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": self._served.version})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        """As vLLM's, for whoever measures: 200 when the engine's own prefix cache is empty."""
        return web.Response(status=200 if self._engine.scheduler.pool.forget() else 409)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._front.read(await request.read(), is_chat=False))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._front.read(await request.read(), is_chat=True))

    async def _answer(self, request: web.Request, body: Body) -> web.StreamResponse:
        if body.model is not None and body.model != self._served.model:
            raise ApiError(404, f"The model `{body.model}` does not exist.", "model")
        is_chat = isinstance(body, ChatBody)
        given = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{given}"
        if self.reads_in_thread:
            choices = await asyncio.to_thread(self._choices, body, request_id)
        else:
            choices = self._choices(body, request_id)
        shapes = Shapes(request_id, self._served.model, is_chat=is_chat)
        await self._admit()
        answers: Answers = asyncio.Queue()
        try:
            for index, choice in enumerate(choices):
                self._engine.submit(choice.request, answers, index)
            pieces = self._pieces(body, choices, answers)
            if body.stream:
                response = web.StreamResponse(headers=_EVENT_STREAM)
                # a client that leaves between two tokens: nobody is left to be told
                with contextlib.suppress(ConnectionResetError):
                    await self._stream(request, response, body, shapes, choices, pieces)
                return response
            async for _ in pieces:
                pass
            whole = shapes.whole(self._whole_choices(body, shapes, choices), _usage(choices))
            return _json(whole)
        except EngineDeadError as error:
            raise ApiError(500, str(error)) from error
        finally:
            for choice in choices:
                self._engine.abort(choice.request)

    def _choices(self, body: Body, request_id: str) -> list[_Choice]:
        """One per prompt and ``n``; a transfer belongs to the first."""
        found: list[_Choice] = []
        for prompt in self._prompts(body):
            tokens = prompt.tokens
            answer_tokens = limit_tokens(body, len(tokens), self._served.max_model_len)
            for _ in range(body.n or 1):
                request = Request(
                    id=f"{request_id}-{len(found)}-{uuid.uuid4().hex[:8]}",
                    prompt=tokens,
                    max_tokens=answer_tokens,
                    min_tokens=body.min_tokens,
                    end_ids=self._front.end_ids(body),
                    sampling=self._front.sampling(body, len(found)),
                    salt=body.cache_salt or "",
                    kv_transfer_params=None if found else body.kv_transfer_params,
                )
                resumed = resumed_tokens(request.kv_transfer_params, self._served.secret)
                asked, begun = tokens[: len(tokens) - resumed], tokens[len(tokens) - resumed :]
                detokenizer = self._front.detokenizer(body, asked)
                choice = _Choice(request, prompt, TextOf(body.stops), detokenizer)
                for token in begun:
                    choice.text.resume(choice.detokenizer.feed(token))
                found.append(choice)
        return found

    async def _pieces(
        self, body: Body, choices: list[_Choice], answers: Answers
    ) -> AsyncIterator[_Piece]:
        """Every new token, until all choices have ended. Raises ``EngineDeadError``."""
        open_choices = len(choices)
        while open_choices:
            new = await answers.get()
            if isinstance(new, EngineFailed):
                raise EngineDeadError(new.reason)
            choice = choices[new.index]
            if choice.finish_reason is not None:
                continue
            is_first = not choice.sampled
            choice.sampled.append(new.sampled)
            choice.finish_reason, choice.cached_tokens = new.finish_reason, new.cached_tokens
            text = choice.text.feed(
                _text_of_new(choice, body.stop_token_ids or ()),
                is_last=new.finish_reason is not None,
                may_stop=len(choice.sampled) > body.min_tokens,
            )
            if choice.text.stop_reason is not None and choice.finish_reason is None:
                choice.finish_reason = "stop"
                self._engine.abort(choice.request)
            choice.pieces.append(text)
            open_choices -= choice.finish_reason is not None
            yield _Piece(choice, new.index, text, is_first)

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: Body,
        shapes: Shapes,
        choices: list[_Choice],
        pieces: AsyncIterator[_Piece],
    ) -> None:
        """Server-sent events; the status line goes out with the first token. Raises
        ``ConnectionResetError``.
        """
        try:
            async for piece in pieces:
                if not response.prepared:
                    await response.prepare(request)
                for event in self._events(body, shapes, piece):
                    await _send(response, event)
            if body.stream_options is not None and body.stream_options.include_usage:
                await _send(response, shapes.usage_chunk(_usage(choices)))
        except EngineDeadError as error:
            if not response.prepared:
                raise
            await _send(response, ApiError(500, str(error)).body())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    def _events(self, body: Body, shapes: Shapes, piece: _Piece) -> Iterator[dict[str, Any]]:
        choice = piece.choice
        prompt_ids = None
        if body.return_token_ids and piece.is_first:
            prompt_ids = list(choice.request.prompt)
        if piece.is_first and shapes.is_chat:
            yield shapes.role_chunk(piece.index, prompt_ids)
        yield shapes.chunk(
            piece.index,
            piece.text,
            choice.finish_reason,
            choice.text.stop_reason,
            ids=[choice.sampled[-1].token] if body.return_token_ids else None,
            prompt_ids=prompt_ids,
            logprobs=self._logprobs(body, choice, choice.sampled[-1:]),
        )

    def _whole_choices(
        self, body: Body, shapes: Shapes, choices: list[_Choice]
    ) -> list[dict[str, Any]]:
        found = []
        for index, choice in enumerate(choices):
            text = "".join(choice.pieces)
            if isinstance(body, CompletionBody) and body.echo:
                prompt = choice.prompt
                told = self._front.decode(prompt.tokens) if prompt.text is None else prompt.text
                text = told + text
            choice.seen_text = 0
            likely = self._logprobs(body, choice, choice.sampled)
            stop = choice.text.stop_reason
            whole = shapes.choice(index, text, choice.finish_reason, stop, likely)
            if body.return_token_ids:
                whole |= {
                    "token_ids": choice.tokens, "prompt_token_ids": list(choice.request.prompt)
                }  # fmt: skip
            found.append(whole)
        return found

    def _logprobs(
        self, body: Body, choice: _Choice, sampled: list[Sampled]
    ) -> dict[str, Any] | None:
        """Of these tokens, the answer's next ones."""
        if self._front.top_logprobs(body) is None:
            return None
        name = partial(self._front.name_token, body)
        if isinstance(body, ChatBody):
            return logprobs.of_chat(sampled, name)
        shown = logprobs.of_completion(sampled, name, choice.seen_text)
        choice.seen_text += sum(len(text) for text in shown["tokens"])
        return shown


def _text_of_new(choice: _Choice, stop_token_ids: Sequence[int]) -> str:
    """What the newest token adds; a token that ended the answer has no text."""
    token = choice.sampled[-1].token
    if choice.finish_reason != "stop":
        return choice.detokenizer.feed(token)
    choice.text.stop_reason = token if token in stop_token_ids else None
    return ""


def _usage(choices: list[_Choice]) -> dict[str, Any]:
    prompts = {id(choice.prompt): choice for choice in choices}.values()
    return usage_of(
        sum(len(choice.request.prompt) for choice in prompts),
        sum(len(choice.sampled) for choice in choices),
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
    except ApiError as error:
        return _json(error.body(), error.status)
    except web.HTTPNotFound:
        return _json({"detail": "Not Found"}, 404)


class _EngineMetrics(Collector):
    """The gauges of vLLM that say how full an engine is."""

    def __init__(self, engine: Engine) -> None:
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
            ("prompt_tokens", "Prompt tokens answered", self._engine.totals.prompt_tokens),
            ("generation_tokens", "Tokens generated", self._engine.totals.generated_tokens),
        ):
            yield CounterMetricFamily(f"vllm:{name}", text, value=count)

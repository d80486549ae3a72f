"""The HTTP server that clients and agents talk to: routes, bodies, and answers as aiohttp sends
them.

aiohttp's low-level server is used, with the few routes in a dictionary: its Application costs about
15 microseconds more per request and gives nothing that is needed here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web
from multidict import CIMultiDict

from splitserve.orchestrator.agent.auth import is_agent_token
from splitserve.orchestrator.core.events import ClientGone, RequestArrived
from splitserve.orchestrator.router import headers as header_policy
from splitserve.orchestrator.router.client_request import CHAT, COMPLETIONS, read_client_request
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.exchange import Exchange, error_headers
from splitserve.orchestrator.router.status import models_of, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from splitserve.orchestrator.router.agents import AgentHub
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.engine_client import RawHeaders
    from splitserve.orchestrator.router.metrics import RouterMetrics
    from splitserve.orchestrator.router.request_log import RequestLog
    from splitserve.orchestrator.router.tenants import Tenants

    Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)

UNSENT_HIGH_BYTES = 256 * 1024
"""Bytes waiting for a slow client above which the decode engine is read no more."""
UNSENT_LOW_BYTES = 64 * 1024


class RouterServer:
    """Answers every request; holds nothing of a request that has ended."""

    def __init__(
        self,
        driver: CoreDriver,
        agents: AgentHub,
        tenants: Tenants,
        metrics: RouterMetrics,
        log: RequestLog,
        *,
        served_name: str,
        max_body_bytes: int,
        secret: bytes,
    ) -> None:
        self._driver = driver
        self._agents = agents
        self._tenants = tenants
        self._metrics = metrics
        self._request_log = log
        self._served_name = served_name
        self._models = frozenset({served_name})
        self._max_body_bytes = max_body_bytes
        self._secret = secret
        self._started_unix_s = int(time.time())
        self._life = secrets.token_hex(4)
        self._count = 0
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): lambda r: self._generate(r, CHAT),
            ("POST", "/v1/completions"): lambda r: self._generate(r, COMPLETIONS),
            ("GET", "/v1/models"): self._list_models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/internal/agents"): agents.serve,
            ("GET", "/internal/status"): self._show_status,
        }
        self._methods: dict[str, list[str]] = {}
        for method, path in self._routes:
            self._methods.setdefault(path, []).append(method)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request begins here."""
        handler = self._routes.get((request.method, request.path))
        try:
            if handler is not None:
                return await handler(request)
            if request.method == "GET" and request.path.startswith("/internal/timeline/"):
                return self._show_timeline(request)
            raise self._no_such_route(request)
        except ApiError as error:
            self._metrics.refused(error.status)
            return self._refusal(request, error)

    # OpenAI's routes

    async def _generate(self, request: web.BaseRequest, endpoint: str) -> web.StreamResponse:
        raw_headers = request.raw_headers
        authorization = content_type = request_id = None
        for name, value in raw_headers:
            match name.lower():
                case b"authorization":
                    authorization = value
                case b"content-type":
                    content_type = value
                case b"x-request-id":
                    request_id = value
        tenant = self._tenants.authenticate(authorization)
        if (content_type or b"").split(b";")[0].strip().lower() != b"application/json":
            raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")
        raw = await self._read_body(request)
        body = read_client_request(endpoint, raw, self._models)
        self._count += 1
        own_id = f"{self._life}-{self._count:x}"
        client_id = header_policy.request_id_of(request_id, own_id)
        answer = _Answer()
        exchange = Exchange(
            self._driver,
            own_id,
            body,
            header_policy.to_engines(raw_headers, client_id),
            client_id,
            self._tenants.salt(tenant, body.fields.get("cache_salt")),
            answer,
        )
        answer.exchange = exchange
        arrived = RequestArrived(
            own_id,
            endpoint,
            body.prompt_tokens,
            body.output_tokens,
            body.is_streaming,
            body.alone_because,
            tenant,
        )
        self._driver.admit(exchange, arrived)
        try:
            return await answer.send(request)
        except (asyncio.CancelledError, ConnectionError):
            self._driver.tell(ClientGone(own_id))
            raise

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        """The whole body. Raises ``ApiError`` 413 as soon as it is seen to be too large."""
        headers = request.headers
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "send the body without Content-Encoding")
        length = request.content_length
        if length is not None and length > self._max_body_bytes:
            raise self._too_large()
        if headers.get("Expect", "").lower() == "100-continue":
            transport = request.transport
            if transport is not None:
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        content = request.content
        first = await content.readany()
        if content.at_eof():
            if len(first) > self._max_body_bytes:
                raise self._too_large()
            return first
        pieces, size = [first], len(first)
        while piece := await content.readany():
            pieces.append(piece)
            size += len(piece)
            if size > self._max_body_bytes:
                raise self._too_large()
        return b"".join(pieces)

    def _too_large(self) -> ApiError:
        limit = self._max_body_bytes
        return ApiError(
            413, f"the request body is larger than {limit} bytes (router.max_body_bytes)"
        )

    async def _list_models(self, request: web.BaseRequest) -> web.StreamResponse:
        self._tenants.authenticate(_authorization(request))
        models = models_of(self._driver.core, self._served_name, self._started_unix_s)
        return _json(200, models)

    # For operators

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        membership = self._driver.core.membership
        ready = {role: len(membership.usable(role)) for role in ("prefill", "decode")}
        is_ready = bool(ready["decode"]) and not self._driver.core.is_stopping
        status = "ready" if is_ready else "no decode node is ready"
        return _json(200 if is_ready else 503, {"status": status, "ready_nodes": ready})

    async def _show_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(
            body=self._metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _show_status(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._tenants.are_required and not self._is_operator(request):
            raise ApiError(401, "the status is for those who know the cluster secret")
        status = status_of(self._driver.core, self._agents)
        status["timelines"] = list(self._request_log.timelines)[-32:]
        return _json(200, status)

    def _show_timeline(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request's timeline, to its tenant or to an operator."""
        is_operator = self._is_operator(request)
        tenant = "" if is_operator else self._tenants.authenticate(_authorization(request))
        record = self._request_log.find(request.path.rpartition("/")[2])
        if record is None or not (is_operator or record["tenant"] == tenant):
            raise ApiError(404, "no timeline of a request with that id is kept")
        return _json(200, record)

    def _is_operator(self, request: web.BaseRequest) -> bool:
        return is_agent_token(request.headers.get("Authorization"), self._secret)

    def _no_such_route(self, request: web.BaseRequest) -> ApiError:
        methods = self._methods.get(request.path)
        if methods:
            return ApiError(405, f"{request.path} takes {' and '.join(methods)} only")
        return ApiError(404, f"there is no {request.method} {request.path} here")

    def _refusal(self, request: web.BaseRequest, error: ApiError) -> web.StreamResponse:
        response = web.Response(
            status=error.status,
            body=error.body(),
            headers=_multidict(error_headers(error, request.headers.get("x-request-id", ""))),
        )
        if not request.content.at_eof():
            response.force_close()
        return response


class _Answer:
    """A ``Sink`` that hands the answer to the coroutine which sends it."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self._status = 0
        self._headers: RawHeaders = []
        self._body_bytes: int | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._is_finished = False
        self._is_aborted = False
        self._is_paused = False
        self._wake: asyncio.Future[None] | None = None

    def send_head(self, status: int, headers: RawHeaders, body_bytes: int | None) -> None:
        self._status, self._headers, self._body_bytes = status, headers, body_bytes

    def send_body(self, data: bytes) -> None:
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > UNSENT_HIGH_BYTES and not self._is_paused:
            assert self.exchange is not None
            self._is_paused = True
            self.exchange.pause()
        self._call()

    def finish(self) -> None:
        self._is_finished = True
        self._call()

    def abort(self) -> None:
        self._is_aborted = True
        self._call()

    def _call(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def send(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send everything as it comes; returns when the answer is complete or aborted."""
        await self._wait()
        headers = _multidict(self._headers)
        if self._is_finished and self._body_bytes is not None:
            body = b"".join(self._unsent)
            return web.Response(status=self._status, headers=headers, body=body)
        response = web.StreamResponse(status=self._status, headers=headers)
        if self._body_bytes is None:
            response.enable_chunked_encoding()
        else:
            response.content_length = self._body_bytes
        await response.prepare(request)
        while True:
            if self._is_aborted:
                response.force_close()
                if request.transport is not None:
                    request.transport.abort()
                return response
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._unsent_bytes = 0
            if data:
                await response.write(data)
                self._maybe_resume()
            elif self._is_finished:
                await response.write_eof()
                return response
            else:
                await self._wait()

    def _maybe_resume(self) -> None:
        if self._is_paused and self._unsent_bytes <= UNSENT_LOW_BYTES:
            assert self.exchange is not None
            self._is_paused = False
            self.exchange.resume()

    async def _wait(self) -> None:
        """Until there is something to send, or the end."""
        if self._unsent or self._is_finished or self._is_aborted:
            return
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake
        self._wake = None


def _authorization(request: web.BaseRequest) -> bytes | None:
    value = request.headers.get("Authorization")
    return None if value is None else value.encode("utf-8", "surrogateescape")


def _json(status: int, value: Any) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(value), headers={"Content-Type": "application/json"}
    )


def _multidict(headers: RawHeaders) -> CIMultiDict[str]:
    return CIMultiDict((name.decode(), value.decode("latin-1")) for name, value in headers)

"""The routes: OpenAI's for clients, and those for operators and agents. No route waits for
anything.

A route answers on the connection at once, or makes an ``Exchange`` that answers later. Errors are
``ApiError``.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import orjson

from splitserve.kv_transfer.prefix_marks import SPACING_BYTES
from splitserve.orchestrator.agent.auth import is_agent_token, is_operator_token
from splitserve.orchestrator.core.events import RequestArrived
from splitserve.orchestrator.router import headers as header_policy
from splitserve.orchestrator.router.cache_api import CACHE_PATH
from splitserve.orchestrator.router.client_request import CHAT, COMPLETIONS, read_client_request
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.exchange import PATHS, Exchange
from splitserve.orchestrator.router.node_orders import NODES_PATH, NodeOrders, ordered_node
from splitserve.orchestrator.router.probes import PROBE_PATH, Probes
from splitserve.orchestrator.router.prompt_marks import NO_MARKS, PromptMarks
from splitserve.orchestrator.router.recordings import RECORDING_PATH
from splitserve.orchestrator.router.status import audit_of, models_of, status_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.router.agents import AgentHub
    from splitserve.orchestrator.router.autotune import Autotune
    from splitserve.orchestrator.router.cache_api import CacheApi
    from splitserve.orchestrator.router.client_request import ClientRequest
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.engine_client import RawHeaders
    from splitserve.orchestrator.router.http_server import HttpConnection, HttpRequest
    from splitserve.orchestrator.router.metrics import RouterMetrics
    from splitserve.orchestrator.router.prompt_marks import Marks
    from splitserve.orchestrator.router.recordings import Recordings
    from splitserve.orchestrator.router.request_log import RequestLog
    from splitserve.orchestrator.router.tenants import Tenants

    Route = Callable[[HttpRequest, HttpConnection], None]

AGENTS_PATH = "/internal/agents"
AUDIT_PATH = "/internal/audit"
TIMELINE_PATH = "/internal/timeline/"
JSON = [(b"content-type", b"application/json")]
TIMELINES_IN_STATUS_LIMIT = 32


class Api:
    """Answers every request; holds nothing of a request that has ended."""

    def __init__(
        self,
        driver: CoreDriver,
        agents: AgentHub,
        tenants: Tenants,
        metrics: RouterMetrics,
        log: RequestLog,
        served_name: str,
        continuable: frozenset[str],
        cache: CacheApi | None,
        recordings: Recordings,
        autotune: Autotune | None = None,
        no_prompt_logprobs: str = "",
    ) -> None:
        """``no_prompt_logprobs``: why the engines must not be asked for them."""
        self._driver = driver
        self._no_prompt_logprobs = no_prompt_logprobs
        self._node_orders = NodeOrders(driver)
        self._probes = Probes(driver, served_name)
        self._agents = agents
        self._tenants = tenants
        self._metrics = metrics
        self._log = log
        self._served_name = served_name
        self._cache = cache
        self._recordings = recordings
        self._autotune = autotune
        self._continuable = continuable
        self._marks = PromptMarks(driver.secret)
        """Endpoints whose streams may be continued by another engine."""
        self._generating_paths = frozenset(PATHS.values())
        self._models = frozenset({served_name})
        self._started_unix_s = int(time.time())
        self._life = secrets.token_hex(4)
        self._count = 0
        self._routes: dict[tuple[str, str], Route] = {
            ("POST", PATHS[CHAT]): lambda r, c: self._generate(r, c, CHAT),
            ("POST", PATHS[COMPLETIONS]): lambda r, c: self._generate(r, c, COMPLETIONS),
            ("GET", "/v1/models"): self._list_models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", AGENTS_PATH): self._want_websocket,
            ("GET", "/internal/status"): self._show_status,
            ("GET", AUDIT_PATH): self._show_audit,
            ("POST", PROBE_PATH): self._probe,
            ("GET", RECORDING_PATH): self._record,
        }
        self._methods: dict[str, list[str]] = {}
        for method, path in self._routes:
            self._methods.setdefault(path, []).append(method)

    def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        """Every request begins here."""
        route = self._routes.get((request.method, request.path))
        try:
            if route is not None:
                route(request, connection)
            elif request.method == "GET" and request.path.startswith(TIMELINE_PATH):
                self._show_timeline(request, connection)
            elif request.method == "POST" and ordered_node(request.path):
                self._order_node(request, connection)
            elif _is_about_cache(request.path):
                self._manage_cache(request, connection)
            else:
                raise self._no_such_route(request)
        except ApiError as error:
            self._metrics.refused(error.status)
            request_id = header_policy.request_id_of(request.header(b"x-request-id"), "")
            connection.answer(error.status, error.headers(request_id), error.body())

    def admit(self, path: str, headers: RawHeaders) -> None:
        """Before a request's body is read. Raises ``ApiError`` for who must not send one."""
        is_for_agents = path == AGENTS_PATH
        is_for_operators = (
            path.startswith(NODES_PATH)
            or path in (PROBE_PATH, RECORDING_PATH)
            or _is_about_cache(path)
        )
        if not (is_for_agents or is_for_operators or self._tenants.are_required):
            return
        authorization = None
        for name, value in headers:
            if name == b"authorization":
                authorization = value
        try:
            if is_for_agents and not is_agent_token(_text(authorization), self._driver.secret):
                raise ApiError(401, "agents prove that they know the cluster secret")
            if is_for_operators:
                self._authenticate_operator(authorization)
            if path in self._generating_paths:
                self._tenants.authenticate(authorization)
        except ApiError as error:
            self._metrics.refused(error.status)
            raise

    # OpenAI's routes

    def _generate(self, request: HttpRequest, connection: HttpConnection, endpoint: str) -> None:
        authorization = content_type = client_request_id = None
        for name, value in request.headers:
            if name == b"authorization":
                authorization = value
            elif name == b"content-type":
                content_type = value
            elif name == b"x-request-id":
                client_request_id = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise ApiError(415, "send the body without Content-Encoding")
        tenant = self._tenants.authenticate(authorization)
        if content_type != b"application/json" and not _is_json(content_type):
            raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")
        body = read_client_request(endpoint, request.body, self._models)
        body.can_continue = body.can_continue and endpoint in self._continuable
        if body.alone_because and self._no_prompt_logprobs and body.wants_prompt_logprobs:
            raise ApiError(400, self._no_prompt_logprobs, param="prompt_logprobs")
        self._count += 1
        own_id = f"{self._life}-{self._count:x}"
        client_id = header_policy.request_id_of(
            client_request_id or _named_by(body.fields.get("request_id")), own_id
        )
        salt = self._tenants.salt(tenant, body.fields.get("cache_salt"))
        marks = recorded_marks = self._marks_of(body, salt)
        if not self._driver.core.wants_marks:
            marks = NO_MARKS
        exchange = Exchange(
            self._driver,
            own_id,
            body,
            header_policy.to_engines(request.headers, client_id),
            client_id,
            salt,
            connection,
            self._tenants.tag(tenant),
            marks,
        )
        connection.listener = exchange
        arrived = RequestArrived(
            own_id,
            endpoint,
            body.prompt_tokens,
            body.output_tokens,
            body.is_streaming,
            body.alone_because,
            tenant,
            body.can_continue,
            marks.digests,
            marks.prompt_bytes,
        )
        if self._recordings.are_on:
            self._recordings.arrived(own_id, recorded_marks)
        self._driver.admit(exchange, arrived)

    def _marks_of(self, body: ClientRequest, salt: str | None) -> Marks:
        """Those of the prompt, if somebody could use them."""
        if len(body.raw) < SPACING_BYTES:
            return NO_MARKS
        if not (self._driver.core.wants_marks or self._recordings.are_on):
            return NO_MARKS
        if salt is None:
            sent = body.fields.get("cache_salt")
            salt = sent if type(sent) is str else ""
        return self._marks.of(body.endpoint, body.fields, body.alone_because, salt)

    def _list_models(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._tenants.authenticate(request.header(b"authorization"))
        models = models_of(self._driver.core, self._served_name, self._started_unix_s)
        _send_json(connection, 200, models)

    # For operators and agents

    def _health(self, request: HttpRequest, connection: HttpConnection) -> None:
        membership = self._driver.core.membership
        ready = {role: len(membership.usable(role)) for role in ("prefill", "decode")}
        is_ready = bool(ready["decode"]) and not self._driver.core.is_stopping
        status = "ready" if is_ready else "no decode node is ready"
        _send_json(connection, 200 if is_ready else 503, {"status": status, "ready_nodes": ready})

    def _show_metrics(self, request: HttpRequest, connection: HttpConnection) -> None:
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        connection.answer(200, headers, self._metrics.render())

    def _show_status(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._only_for_operators(request)
        status = status_of(self._driver.core, self._agents)
        if self._autotune is not None:
            status["autotune"] = self._autotune.status()
        status["timelines"] = self._log.latest(TIMELINES_IN_STATUS_LIMIT)
        _send_json(connection, 200, status)

    def _show_audit(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._only_for_operators(request)
        _send_json(connection, 200, audit_of(self._driver.core, time.monotonic()))

    def _record(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._authenticate_operator(request.header(b"authorization"))
        self._recordings.begin(connection)

    def _only_for_operators(self, request: HttpRequest) -> None:
        """Raises ``ApiError`` 401 where keys are on and the caller has shown only one of those."""
        if self._tenants.are_required and not self._is_operator(request.header(b"authorization")):
            raise ApiError(401, "the status is for those who know the cluster secret")

    def _show_timeline(self, request: HttpRequest, connection: HttpConnection) -> None:
        """One request's timeline, to its tenant or to an operator."""
        authorization = request.header(b"authorization")
        is_operator = self._is_operator(authorization)
        tenant = "" if is_operator else self._tenants.authenticate(authorization)
        record = self._log.find(request.path.removeprefix(TIMELINE_PATH))
        if record is None or not (is_operator or record["tenant"] == tenant):
            raise ApiError(404, "no timeline of a request with that id is kept")
        _send_json(connection, 200, record)

    def _order_node(self, request: HttpRequest, connection: HttpConnection) -> None:
        """A node leaves, restarts or changes its role."""
        self._authenticate_operator(request.header(b"authorization"))

        def answer(status: int, told: dict[str, str]) -> None:
            _send_json(connection, status, told)

        self._node_orders.handle(request.path, request.body, answer)

    def _probe(self, request: HttpRequest, connection: HttpConnection) -> None:
        """A completion that measures certain nodes."""
        self._authenticate_operator(request.header(b"authorization"))
        self._probes.handle(request, connection)

    def _manage_cache(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._authenticate_operator(request.header(b"authorization"))
        if self._cache is None:
            raise ApiError(503, "this cluster has no cache; give its YAML a section `cache`")
        self._cache.handle(request, connection)

    def _want_websocket(self, request: HttpRequest, connection: HttpConnection) -> None:
        raise ApiError(400, "agents connect by WebSocket")

    def _is_operator(self, authorization: bytes | None) -> bool:
        given, secret = _text(authorization), self._driver.secret
        return is_operator_token(given, secret) or is_agent_token(given, secret)

    def _authenticate_operator(self, authorization: bytes | None) -> None:
        if not is_operator_token(_text(authorization), self._driver.secret):
            raise ApiError(401, "this is for operators, who have the token that `up` has left")

    def _no_such_route(self, request: HttpRequest) -> ApiError:
        methods = self._methods.get(request.path)
        if methods:
            return ApiError(405, f"{request.path} takes {' and '.join(methods)} only")
        return ApiError(404, f"there is no {request.method} {request.path} here")


def _is_about_cache(path: str) -> bool:
    return path == CACHE_PATH or path.startswith(f"{CACHE_PATH}/")


def _text(header: bytes | None) -> str:
    return (header or b"").decode("latin-1")


def _named_by(request_id: object) -> bytes | None:
    """vLLM's field beside the header of the same meaning."""
    return request_id.encode(errors="replace") if type(request_id) is str else None


def _is_json(content_type: bytes | None) -> bool:
    media_type = (content_type or b"").partition(b";")[0]
    return media_type.strip().lower() == b"application/json"


def _send_json(connection: HttpConnection, status: int, value: Any) -> None:
    connection.answer(status, JSON, orjson.dumps(value))

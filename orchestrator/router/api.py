"""The routes: OpenAI's for clients, and those for operators and agents. No route waits for
anything.

A route answers on the connection at once, or makes an ``Exchange`` that answers later. Errors are
``ApiError``.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from splitserve.kv_transfer.prefix_marks import SPACING_BYTES
from splitserve.orchestrator.agent.auth import is_agent_token, is_operator_token
from splitserve.orchestrator.core.events import RequestArrived
from splitserve.orchestrator.observe.dashboard import DASHBOARD_PATH, Dashboard
from splitserve.orchestrator.router import headers as header_policy
from splitserve.orchestrator.router.cache_api import CACHE_PATH
from splitserve.orchestrator.router.client_request import read_client_request
from splitserve.orchestrator.router.endpoints import (
    ASK_ELSEWHERE,
    FORWARDED,
    MESSAGES,
    PATHS,
    RESPONSE_PREFIX,
    RESPONSES,
)
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.event_stream import EVENTS_PATH
from splitserve.orchestrator.router.exchange import Exchange
from splitserve.orchestrator.router.forwarding import Forwarding, is_json, is_stored_response
from splitserve.orchestrator.router.node_orders import NODES_PATH, NodeOrders, ordered_node
from splitserve.orchestrator.router.openapi import OPENAPI_PATH, document
from splitserve.orchestrator.router.probes import PROBE_PATH, Probes
from splitserve.orchestrator.router.prompt_marks import NO_MARKS, PromptMarks
from splitserve.orchestrator.router.recordings import RECORDING_PATH
from splitserve.orchestrator.router.request_records import server_timing
from splitserve.orchestrator.router.response_ids import ResponseIds
from splitserve.orchestrator.router.service_discovery import HTTP_SD_PATH, targets_of
from splitserve.orchestrator.router.status import audit_of, models_of
from splitserve.orchestrator.router.strangers import Strangers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from splitserve.orchestrator.observe.trace_context import TraceIds
    from splitserve.orchestrator.router.cache_api import CacheApi
    from splitserve.orchestrator.router.client_request import ClientRequest
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.engine_client import RawHeaders
    from splitserve.orchestrator.router.event_stream import EventStreams
    from splitserve.orchestrator.router.http_request import HttpRequest
    from splitserve.orchestrator.router.http_server import HttpConnection
    from splitserve.orchestrator.router.incidents import Incidents
    from splitserve.orchestrator.router.metrics import RouterMetrics
    from splitserve.orchestrator.router.prompt_marks import Marks
    from splitserve.orchestrator.router.recordings import Recordings
    from splitserve.orchestrator.router.request_log import RequestLog
    from splitserve.orchestrator.router.scrapes import Scrapes
    from splitserve.orchestrator.router.tenants import Tenants
    from splitserve.orchestrator.router.transfer_facts import TransferBook

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
        tenants: Tenants,
        metrics: RouterMetrics,
        log: RequestLog,
        transfers: TransferBook,
        served_name: str,
        continuable: frozenset[str],
        cache: CacheApi | None,
        recordings: Recordings,
        snapshot: Callable[[], dict[str, Any]],
        incidents: Incidents,
        events: EventStreams,
        scrapes: Scrapes,
        adapters: frozenset[str] = frozenset(),
        scheme: str = "http",
        trace_ids: TraceIds | None = None,
        no_prompt_logprobs: str = "",
    ) -> None:
        """``adapters`` are those that decode nodes are configured to have, ``no_prompt_logprobs``
        why the engines must not be asked for them.
        """
        self._driver = driver
        self._no_prompt_logprobs = no_prompt_logprobs
        self._node_orders = NodeOrders(driver)
        self._probes = Probes(driver, served_name)
        self._tenants = tenants
        self._metrics = metrics
        self._log = log
        self._transfers = transfers
        self._served_name = served_name
        self._cache = cache
        self._recordings = recordings
        self._snapshot = snapshot
        self._incidents = incidents
        self._strangers = Strangers(incidents)
        self._events = events
        self._scrapes = scrapes
        self._trace_ids = trace_ids
        self._dashboard = Dashboard.read()
        self._continuable = continuable
        self._marks = PromptMarks(driver.secret)
        """Endpoints whose streams may be continued by another engine."""
        self._client_paths = frozenset(PATHS.values()) | {e.path for e in FORWARDED}
        self._models = (served_name,)
        self._adapters = adapters
        self._scheme = scheme
        self._response_ids = ResponseIds(driver.secret, driver.core.membership)
        self._forwarding = Forwarding(driver, tenants, self._response_ids, self._new_id, trace_ids)
        self._started_unix_s = int(time.time())
        self._count = 0
        self._document = document(has_cache=cache is not None, wants_keys=tenants.are_required)
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/v1/models"): self._list_models,
            ("GET", "/health"): self._health,
            ("GET", OPENAPI_PATH): self._describe,
            ("GET", "/ping"): self._ping,
            ("POST", "/ping"): self._ping,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", AGENTS_PATH): self._want_websocket,
            ("GET", DASHBOARD_PATH): self._show_dashboard,
            ("GET", "/internal/status"): self._show_status,
            ("GET", EVENTS_PATH): self._watch,
            ("GET", AUDIT_PATH): self._show_audit,
            ("GET", HTTP_SD_PATH): self._show_targets,
            ("POST", PROBE_PATH): self._probe,
            ("GET", RECORDING_PATH): self._record,
        }
        for name, path in PATHS.items():
            self._routes["POST", path] = partial(self._generate, endpoint=name)
        for endpoint in FORWARDED:
            forward = partial(self._forwarding.handle, endpoint=endpoint)
            self._routes[endpoint.method, endpoint.path] = forward
        self._methods: dict[str, list[str]] = {}
        for method, path in self._routes:
            self._methods.setdefault(path, []).append(method)

    def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        """Every request begins here."""
        route = self._routes.get((request.method, request.path))
        try:
            if route is not None:
                route(request, connection)
            elif is_stored_response(request.method, request.path):
                self._forwarding.handle_response(request, connection)
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
            error.endpoint = _endpoint_of(request.path)
            connection.answer(error.status, error.headers(request_id), error.body())

    @property
    def routes(self) -> list[tuple[str, str]]:
        """(method, path) of everything whose path names nothing."""
        return list(self._routes)

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
                self._strangers.tell(headers)
                raise ApiError(401, "agents prove that they know the cluster secret")
            if is_for_operators:
                self._authenticate_operator(authorization)
            if path in self._client_paths or path.startswith(RESPONSE_PREFIX):
                self._tenants.authenticate(authorization)
        except ApiError as error:
            error.endpoint = _endpoint_of(path)
            self._metrics.refused(error.status)
            raise

    # OpenAI's routes

    def _generate(self, request: HttpRequest, connection: HttpConnection, endpoint: str) -> None:
        authorization = content_type = client_request_id = traceparent = None
        wants_timing = False
        for name, value in request.headers:
            if name == b"authorization":
                authorization = value
            elif name == b"content-type":
                content_type = value
            elif name == b"x-request-id":
                client_request_id = value
            elif name == b"traceparent":
                traceparent = value
            elif name == b"x-splitserve-timing":
                wants_timing = value == b"1"
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise ApiError(415, "send the body without Content-Encoding")
        tenant = self._tenants.authenticate(authorization)
        if content_type != b"application/json" and not is_json(content_type):
            raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")
        adapters: Collection[str] = ()
        if (known := self._driver.core.membership.adapters) or self._adapters:
            adapters = known.keys() | self._adapters
        body = read_client_request(endpoint, request.body, self._models, adapters)
        body.can_continue = body.can_continue and endpoint in self._continuable
        if body.alone_because and self._no_prompt_logprobs and body.wants_prompt_logprobs:
            raise ApiError(400, self._no_prompt_logprobs, param="prompt_logprobs")
        adapter = body.fields.get("model") if adapters else None
        if type(adapter) is not str or adapter == self._served_name:
            adapter = ""
        own_id = self._new_id()
        client_id = header_policy.request_id_of(
            client_request_id or _named_by(body.fields.get("request_id")), own_id
        )
        salt = self._tenants.salt(tenant, body.fields.get("cache_salt"))
        name_response, holder = None, ""
        if endpoint == RESPONSES:
            name_response, holder = self._read_ids(body.fields, tenant)
        marks = recorded_marks = self._marks_of(body, salt)
        if not self._driver.core.wants_marks:
            marks = NO_MARKS
        trace = None if self._trace_ids is None else self._trace_ids.place_of(traceparent)
        exchange = Exchange(
            self._driver,
            own_id,
            body,
            header_policy.to_engines(request.headers, client_id, trace),
            client_id,
            salt,
            connection,
            self._tenants.tag(tenant),
            marks,
            name_response,
            trace,
        )
        if wants_timing:
            exchange.server_timing = self._server_timing
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
            adapter=adapter,
            bound_to=holder,
        )
        if self._recordings.are_on:
            self._recordings.arrived(own_id, recorded_marks)
        self._driver.admit(exchange, arrived)

    def _read_ids(
        self, fields: dict[str, Any], tenant: str
    ) -> tuple[Callable[[str], str] | None, str]:
        """(what names the response, unless the client does; the engine that holds the earlier one).
        Raises ``ApiError``.
        """
        chosen, previous = fields.get("request_id"), fields.get("previous_response_id")
        self._response_ids.refuse_chosen(chosen)
        holder = ""
        if type(previous) is str:
            holder = self._response_ids.holder(previous, tenant)
        return None if chosen is not None else partial(self._response_ids.new, tenant), holder

    def _new_id(self) -> str:
        self._count += 1
        return f"{self._driver.name}-{self._count:x}"

    def _server_timing(self, request_id: str) -> bytes:
        """That header's value when the answer begins: parts of the time until now."""
        request = self._driver.core.requests.get(request_id)
        if request is None:
            return b""
        known = self._transfers.find(request_id)
        return server_timing(request.timeline, known, time.monotonic())

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

    def _ping(self, request: HttpRequest, connection: HttpConnection) -> None:
        is_ready = self._driver.core.membership.usable("decode")
        connection.answer(200 if is_ready else 503, [], b"")

    def _describe(self, request: HttpRequest, connection: HttpConnection) -> None:
        connection.answer(200, JSON, self._document)

    def _show_metrics(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._scrapes.handle(connection)

    def _show_status(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._only_for_operators(request)
        status = self._snapshot()
        status["timelines"] = self._log.latest(TIMELINES_IN_STATUS_LIMIT)
        status["incidents"] = self._incidents.shown()
        _send_json(connection, 200, status)

    def _watch(self, request: HttpRequest, connection: HttpConnection) -> None:
        """The status as it changes, requests as they end and incidents, as events."""
        self._only_for_operators(request)
        self._events.begin(connection)

    def _show_dashboard(self, request: HttpRequest, connection: HttpConnection) -> None:
        """The page, which holds nothing; what it shows it asks for."""
        connection.answer(200, self._dashboard.headers, self._dashboard.body)

    def _show_audit(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._only_for_operators(request)
        _send_json(connection, 200, audit_of(self._driver.core, time.monotonic()))

    def _show_targets(self, request: HttpRequest, connection: HttpConnection) -> None:
        self._only_for_operators(request)
        targets = targets_of(self._driver.core, request.header(b"host"), self._scheme)
        _send_json(connection, 200, targets)

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
        tenant = None if is_operator else self._tenants.authenticate(authorization)
        record = self._log.find(request.path.removeprefix(TIMELINE_PATH), tenant)
        if record is None:
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
        path = request.path
        methods = self._methods.get(path) or _methods_of(path)
        if methods:
            message = f"{path} takes {' and '.join(methods)} only"
            return ApiError(405, message, allow=", ".join(methods))
        message = f"there is no {request.method} {path} here"
        hint = ASK_ELSEWHERE.get(path)
        return ApiError(404, f"{message}; {hint}" if hint else message)


def _endpoint_of(path: str) -> str:
    """Whose clients call that path, as far as they expect errors of another form."""
    return MESSAGES if path.startswith(PATHS[MESSAGES]) else ""


def _methods_of(path: str) -> list[str]:
    """What paths take that name something; none for a path that is not served."""
    if path.startswith(TIMELINE_PATH):
        return ["GET"]
    if ordered_node(path):
        return ["POST"]
    return [method for method in ("GET", "POST") if is_stored_response(method, path)]


def _is_about_cache(path: str) -> bool:
    return path == CACHE_PATH or path.startswith(f"{CACHE_PATH}/")


def _text(header: bytes | None) -> str:
    return (header or b"").decode("latin-1")


def _named_by(request_id: object) -> bytes | None:
    """vLLM's field beside the header of the same meaning."""
    return request_id.encode(errors="replace") if type(request_id) is str else None


def _send_json(connection: HttpConnection, status: int, value: Any) -> None:
    connection.answer(status, JSON, orjson.dumps(value))

"""The router's OpenAPI document (``/openapi.json``): what it serves, to clients and to operators,
and with which statuses.

Bodies of clients are described as far as the router reads them; everything else in them is for the
engine to judge, so every field that vLLM knows may stand in them. Operators' bodies are generated
from the structs that read them. Agents' WebSocket is no HTTP API and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import msgspec
import orjson

from splitserve.orchestrator.router.cache_bodies import ChunksBody, ClearBody, QuotaBody
from splitserve.orchestrator.router.endpoints import (
    CHAT,
    COMPLETIONS,
    FORWARDED,
    MESSAGES,
    PATHS,
    RESPONSES,
)
from splitserve.orchestrator.router.node_orders import DrainBody, FlipBody, ForgetBody

OPENAPI_PATH = "/openapi.json"

CLIENTS = "clients"
OPERATORS = "operators"
EVERYBODY = "everybody"

_JSON = "application/json"
_EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"
_TEXT = "text/plain"
_PAGE = "text/html"

_DOOR: Final = (400, 401, 404, 413, 415, 429, 431)
"""What the router, or an engine, may say of a client's request."""
_NODES: Final = (500, 501, 502, 503, 504)
"""What may be wrong with the nodes."""

_ERRORS: Final = {
    400: "The request is wrong; the message says where",
    401: "The key or token is missing or unknown",
    404: "There is no such model, response, node or path",
    405: "Another method is wanted",
    409: "Not in the cluster's present state",
    413: "The body is larger than router.max_body_bytes",
    415: "The body is compressed",
    422: "The engine has found the request wrong",
    429: "Too much waits already; Retry-After says when to come again",
    431: "The head is too large",
    500: "The engine has failed",
    501: "The model cannot do that",
    502: "An engine has failed",
    503: "No node has room or is ready, or what is asked for is not configured",
    504: "The engines were too slow",
}

_TEXTS: Final[dict[str, Any]] = {
    "oneOf": [{"type": "string"}, {"type": "array"}],
    "description": "Text, token ids, or a list of either",
}
_MESSAGES: Final[dict[str, Any]] = {"type": "array", "items": {"type": "object"}}
_COMMON: Final[dict[str, Any]] = {
    "model": {"type": ["string", "null"], "description": "The model, or one of its adapters"},
    "stream": {"type": ["boolean", "null"]},
    "cache_salt": {"type": ["string", "null"], "minLength": 1, "maxLength": 1024},
}
_TOKENS: Final[dict[str, Any]] = {"type": ["integer", "null"], "minimum": 0}


def _body(required: tuple[str, ...], **fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": fields,
        "additionalProperties": True,
    }


_BODIES: Final[dict[str, dict[str, Any]]] = {
    CHAT: _body(
        ("messages",),
        **_COMMON,
        messages=_MESSAGES,
        max_tokens=_TOKENS,
        max_completion_tokens=_TOKENS,
    ),
    COMPLETIONS: _body(("prompt",), **_COMMON, prompt=_TEXTS, max_tokens=_TOKENS),
    RESPONSES: _body(
        ("input",),
        **_COMMON,
        input={"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        max_output_tokens=_TOKENS,
        previous_response_id={"type": ["string", "null"]},
        background={"type": ["boolean", "null"]},
    ),
    MESSAGES: _body(
        ("model", "messages", "max_tokens"),
        **_COMMON,
        messages=_MESSAGES,
        max_tokens={"type": "integer", "minimum": 1},
    ),
}
_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    caller: str
    body: dict[str, Any] | None = None
    """Schema of the request's JSON."""
    is_body_required: bool = True
    good: tuple[int, ...] = (200,)
    answers: tuple[str, ...] = (_JSON,)
    """Content types of a good answer; none when it is empty."""
    errors: tuple[int, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()


def _in_path(name: str, what: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "description": what, "schema": schema}


def _in_query(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": kind}}


def _generated(body: type[msgspec.Struct]) -> dict[str, Any]:
    """The struct's own schema, without references."""
    (_, *_), components = msgspec.json.schema_components((body,))
    return dict(components[body.__name__])


def _client_operations() -> list[Operation]:
    summaries = {
        CHAT: "The next message of a conversation",
        COMPLETIONS: "What follows a text",
        RESPONSES: "A response, also in the background or behind an earlier one",
        MESSAGES: "The next message of a conversation, as Anthropic's API has it",
    }
    errors = (*_DOOR, 422, *_NODES)
    response_id = _in_path("response_id", "From an earlier answer")
    found = [
        Operation(
            "POST", path, summaries[name], CLIENTS, _BODIES[name], errors=errors,
            answers=(_JSON, _EVENTS),
        )
        for name, path in PATHS.items()
    ]  # fmt: skip
    found += [
        Operation(
            "GET", f"{PATHS[RESPONSES]}/{{response_id}}", "A stored response", CLIENTS,
            errors=errors, answers=(_JSON, _EVENTS),
            parameters=(
                response_id, _in_query("stream", "boolean"), _in_query("starting_after", "integer")
            ),
        ),
        Operation(
            "POST", f"{PATHS[RESPONSES]}/{{response_id}}/cancel", "Ends a background response",
            CLIENTS, errors=errors, parameters=(response_id,),
        ),
    ]  # fmt: skip
    found += [
        Operation(
            e.method, e.path, f"{e.summary}; a decode node's own answer", CLIENTS,
            _ANY_OBJECT if e.method == "POST" else None, errors=errors,
        )
        for e in FORWARDED
    ]  # fmt: skip
    return [*found, Operation("GET", "/v1/models", "The model and its adapters", CLIENTS)]


_FOR_EVERYBODY: Final = (
    Operation("GET", "/health", "Whether a decode node is ready", EVERYBODY, errors=(503,)),
    Operation("GET", "/ping", "The same without a body", EVERYBODY, answers=(), errors=(503,)),
    Operation("POST", "/ping", "The same without a body", EVERYBODY, answers=(), errors=(503,)),
    Operation("GET", "/metrics", "Prometheus metrics", EVERYBODY, answers=(_TEXT,), errors=(429,)),
    Operation("GET", OPENAPI_PATH, "This document", EVERYBODY),
    Operation("GET", "/dashboard", "The cluster as a page", EVERYBODY, answers=(_PAGE,)),
)


def _operator_operations() -> list[Operation]:
    node = _in_path("node", "Name of a node")
    request_id = _in_path("request_id", "The X-Request-Id of a finished request")
    ordered: tuple[int, ...] = (400, 401, 404, 409)
    return [
        Operation("GET", "/internal/status", "Nodes, load and the latest requests", OPERATORS),
        Operation(
            "GET", "/internal/events", "The same as it changes", OPERATORS, answers=(_EVENTS,),
            errors=(429,),
        ),
        Operation("GET", "/internal/audit", "What nodes hold that nobody owns", OPERATORS),
        Operation(
            "GET", "/internal/http_sd", "Where Prometheus finds router and engines", OPERATORS,
            errors=(400,),
        ),
        Operation(
            "GET", "/internal/timeline/{request_id}", "When what happened to a request", OPERATORS,
            errors=(404,), parameters=(request_id,),
        ),
        Operation(
            "GET", "/internal/recording", "One line for each request that comes and ends",
            OPERATORS, answers=(_LINES,), errors=(429,),
        ),
        Operation(
            "POST", "/internal/probe", "A completion that measures certain nodes", OPERATORS,
            _body(
                ("prompt", "nodes"), prompt={"type": "array", "items": {"type": "integer"}},
                nodes={
                    "type": "object", "required": ["decode"],
                    "properties": {"decode": {"type": "string"}, "prefill": {"type": "string"}},
                },
            ),
            answers=(_JSON, _EVENTS), errors=(400, 404, 413, 429, *_NODES),
        ),
        Operation(
            "POST", "/internal/nodes/{node}/drain", "The node leaves, or restarts", OPERATORS,
            _generated(DrainBody), is_body_required=False, good=(200, 202), errors=ordered,
            parameters=(node,),
        ),
        Operation(
            "POST", "/internal/nodes/{node}/flip", "The node changes its role", OPERATORS,
            _generated(FlipBody), good=(200, 202), errors=ordered, parameters=(node,),
        ),
        Operation(
            "POST", "/internal/nodes/{node}/forget", "The node is no part of the cluster any more",
            OPERATORS, _generated(ForgetBody), is_body_required=False, good=(200,),
            errors=(400, 401, 409), parameters=(node,),
        ),
    ]  # fmt: skip


def _cache_operations() -> list[Operation]:
    errors = (400, 404, 413, 429, 502, 503, 504)
    bodies: dict[str, type[msgspec.Struct]] = dict.fromkeys(
        ("lookup", "pin", "unpin", "prefetch", "move"), ChunksBody
    ) | {"clear": ClearBody, "quota": QuotaBody}
    return [
        Operation("GET", "/internal/cache", "The shared cache", OPERATORS, errors=errors),
        *(
            Operation(
                "POST", f"/internal/cache/{verb}", f"`splitserve cache {verb}`", OPERATORS,
                _generated(body), errors=errors,
            )
            for verb, body in bodies.items()
        ),
    ]  # fmt: skip


def operations(*, has_cache: bool) -> list[Operation]:
    """Everything that is served."""
    cache = _cache_operations() if has_cache else []
    return [*_client_operations(), *_FOR_EVERYBODY, *_operator_operations(), *cache]


def document(*, has_cache: bool, wants_keys: bool) -> bytes:
    """The document as JSON. ``wants_keys``: clients need a key."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations(has_cache=has_cache):
        described = _described(operation, wants_keys=wants_keys)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    bearer = {"type": "http", "scheme": "bearer"}
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "splitserve",
                "version": version("splitserve"),
                "description": "One LLM, served from a prefill pool and a decode pool.",
            },
            "paths": paths,
            "components": {
                "schemas": {"Error": _error_schema()},
                "securitySchemes": {"key": bearer, "token": bearer},
            },
        }
    )


def _described(operation: Operation, *, wants_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {kind: {"schema": {}} for kind in operation.answers}
    good = {"description": "The answer", **({"content": content} if content else {})}
    answers: dict[str, Any] = {str(status): good for status in operation.good}
    errors = set(operation.errors) | ({401} if operation.caller != EVERYBODY else set())
    for status in sorted(errors):
        answers[str(status)] = {"description": _ERRORS[status]}
        if operation.answers:
            schema = {"$ref": "#/components/schemas/Error"}
            answers[str(status)]["content"] = {_JSON: {"schema": schema}}
    described: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{operation.path}",
        "summary": operation.summary,
        "tags": [operation.caller],
        "responses": answers,
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.is_body_required,
            "content": {_JSON: {"schema": operation.body}},
        }
    if operation.caller == OPERATORS:
        described["security"] = [{"token": []}]
    elif operation.caller == CLIENTS and wants_keys:
        described["security"] = [{"key": []}]
    return described


def _error_schema() -> dict[str, Any]:
    """An engine that does not know a path answers in another form."""
    fields = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["integer", "string", "null"]},
    }
    error = {"type": "object", "required": ["message"], "properties": fields}
    return {"type": "object", "properties": {"error": error}}

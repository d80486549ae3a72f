"""What clients may call, as one table: the router's routes, its OpenAPI document and the tests come
from it.

An endpoint either *generates* (it is split over a pair where that is exact) or is *forwarded* to a
decode node as it came. Its name is the label in logs and metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CHAT: Final = "chat"
COMPLETIONS: Final = "completions"
RESPONSES: Final = "responses"
MESSAGES: Final = "messages"

PATHS: Final = {
    CHAT: "/v1/chat/completions",
    COMPLETIONS: "/v1/completions",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
}
"""Endpoints that generate; all take POST."""

STORED_RESPONSE: Final = "stored_response"
"""``GET`` and ``POST .../cancel`` below the path of responses: answered by the node that holds the
response.
"""
RESPONSE_PREFIX: Final = PATHS[RESPONSES] + "/"
CANCEL_SUFFIX: Final = "/cancel"


@dataclass(frozen=True, slots=True)
class Forwarded:
    """An endpoint whose requests go to a decode node as they came."""

    name: str
    method: str
    path: str
    summary: str


FORWARDED: Final = (
    Forwarded("tokenize", "POST", "/tokenize", "Tokens of a text or of a conversation"),
    Forwarded("detokenize", "POST", "/detokenize", "Text of tokens"),
    Forwarded(
        "count_tokens", "POST", "/v1/messages/count_tokens", "Tokens that a message would take"
    ),
    Forwarded("embeddings", "POST", "/v1/embeddings", "Embeddings of texts"),
    Forwarded("pooling", "POST", "/pooling", "Pooled hidden states of texts"),
    Forwarded("score", "POST", "/score", "Scores of pairs of texts"),
    Forwarded("score", "POST", "/v1/score", "Scores of pairs of texts"),
    Forwarded("rerank", "POST", "/rerank", "Documents in the order of their relevance"),
    Forwarded("rerank", "POST", "/v1/rerank", "Documents in the order of their relevance"),
    Forwarded("rerank", "POST", "/v2/rerank", "Documents in the order of their relevance"),
    Forwarded("classify", "POST", "/classify", "Classes of texts"),
    Forwarded("version", "GET", "/version", "The engines' version"),
)
FORWARDED_NAMES: Final = frozenset({e.name for e in FORWARDED} | {STORED_RESPONSE})

_ADAPTERS: Final = "adapters are named in the cluster's YAML (engine_args.lora_modules)"
ASK_ELSEWHERE: Final = {
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/reset_prefix_cache": "see `splitserve cache clear`",
    "/sleep": "nodes leave with `splitserve drain`",
    "/wake_up": "nodes come back with `splitserve restart`",
    "/start_profile": "ask the engine on its own host",
    "/stop_profile": "ask the engine on its own host",
    "/collective_rpc": "ask the engine on its own host",
    "/server_info": "see `splitserve status`",
    "/load": "see `splitserve status`",
    "/invocations": "call the endpoint itself, e.g. /v1/chat/completions",
    "/inference/v1/generate": "send token ids as the `prompt` of /v1/completions",
}
"""What vLLM's own server has and this one must not or need not: where to go instead."""

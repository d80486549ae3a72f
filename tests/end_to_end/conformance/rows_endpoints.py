"""Endpoints other than chat and completions, and adapters: what is asked, where it is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from end_to_end.conformance.row import CHAT, COMPLETIONS

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SPLIT = "split"
ALONE = "alone_not_splittable"
NO_PARTNER = "alone_adapter"
FORWARDED = "alone_other_endpoint"
BY_ROUTER = ""
WORDS = "Once upon a time there were two engines, and the first of them said to the other: "
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": WEATHER}
NAMED_TOOL = {"type": "function", "name": "weather"}


@dataclass(frozen=True)
class EndpointRow:
    """One request to both sides."""

    name: str
    path: str
    body: dict[str, Any] | bytes
    decision: str = SPLIT
    """The router's; ``BY_ROUTER`` when it answers itself."""
    status: int = 200
    method: str = "POST"

    @property
    def key(self) -> str:
        """Its name among all rows."""
        return f"{self.path}: {self.name}"


def _responses(name: str, decision: str = SPLIT, status: int = 200, **fields: Any) -> EndpointRow:
    text = f"[responses, {name}] {WORDS}"
    body = {"model": "m", "temperature": 0, "max_output_tokens": 8, "input": text} | fields
    return EndpointRow(name, RESPONSES, body, decision, status)


def _messages(name: str, decision: str = SPLIT, status: int = 200, **fields: Any) -> EndpointRow:
    said = [{"role": "user", "content": f"[messages, {name}] {WORDS}"}]
    body = {"model": "m", "temperature": 0, "max_tokens": 8, "messages": said} | fields
    return EndpointRow(name, MESSAGES, body, decision, status)


def _forwarded(
    name: str, path: str, body: dict[str, Any] | bytes, status: int = 200, method: str = "POST"
) -> EndpointRow:
    return EndpointRow(name, path, body, FORWARDED, status, method)


def _adapter(name: str, decision: str, status: int = 200) -> list[EndpointRow]:
    """A request for the adapter at every endpoint that generates."""
    text = f"[adapter {name}] {WORDS}"
    said = [{"role": "user", "content": text}]
    model = {"model": name, "temperature": 0}
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: model | {"prompt": text, "max_tokens": 8},
        CHAT: model | {"messages": said, "max_tokens": 8},
        RESPONSES: model | {"input": text, "max_output_tokens": 8},
        MESSAGES: model | {"messages": said, "max_tokens": 8},
    }
    return [
        EndpointRow(f"adapter {name}", path, body, decision, status)
        for path, body in bodies.items()
    ]


def _item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


_HISTORY = [
    _item("user", WORDS * 3),
    _item("assistant", "No."),
    {"role": "user", "content": "And then?"},
]
_CALLS = [
    {"role": "user", "content": WORDS},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
]
_PICTURE = {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"}
_SCHEMA = {"type": "json_schema", "name": "w", "schema": WEATHER}

_MESSAGE_SCHEMA = {"type": "json_schema", "schema": WEATHER}
_MESSAGE_TOOL = {"name": "weather", "input_schema": WEATHER}
_CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
_RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
_TOOL_TURNS = [
    {"role": "user", "content": WORDS},
    {"role": "assistant", "content": [_CALL]},
    {"role": "user", "content": [_RESULT]},
]

ROWS = [
    _responses("a text"),
    _responses("one token", max_output_tokens=1),
    _responses("instructions", instructions="Be brief."),
    _responses("a conversation", input=_HISTORY),
    _responses("a developer", input=[{"role": "developer", "content": "Be brief."}, _HISTORY[0]]),
    _responses("calls of tools", input=_CALLS, tools=[TOOL]),
    _responses("tools, auto", tools=[TOOL], tool_choice="auto"),
    _responses("tools, none", tools=[TOOL], tool_choice="none"),
    _responses("tools, required", tools=[TOOL], tool_choice="required", max_output_tokens=60),
    _responses("tools, named", tools=[TOOL], tool_choice=NAMED_TOOL, max_output_tokens=60),
    _responses("a schema", text={"format": _SCHEMA}, max_output_tokens=40),
    _responses("seeded", temperature=1, seed=7, top_p=0.9),
    _responses("logprobs", include=["message.output_text.logprobs"], top_logprobs=3),
    _responses("penalties", presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.1),
    _responses("a stop string", stop=["e"], max_output_tokens=30),
    _responses("reasoning effort", reasoning={"effort": "low"}),
    _responses("not stored", store=False, metadata={"a": "b"}, user="u"),
    _responses("truncation", ALONE, truncation="auto"),
    _responses("its messages", ALONE, enable_response_messages=True),
    _responses("other tools", ALONE, 200, tools=[{"type": "web_search_preview"}]),
    _responses("a picture", ALONE, 400, input=[{"role": "user", "content": [_PICTURE]}]),
    _responses("no input", ALONE, 400, input=None),
    _responses("input is a number", ALONE, 400, input=7),
    _responses("no tokens", ALONE, 400, max_output_tokens=-1),
    _responses("too long", SPLIT, 400, input=WORDS * 60),
    _responses("a wrong temperature", SPLIT, 400, temperature=-1),
    _responses("a template", ALONE, 400, prompt={"id": "x"}),
    _responses("in the background, not stored", ALONE, 400, background=True, store=False),
    _responses("behind an unknown one", BY_ROUTER, 404, previous_response_id="resp_unknown"),
    _responses("an unknown model", BY_ROUTER, 404, model="other"),
    _messages("a text"),
    _messages("one token", max_tokens=1),
    _messages("a system message", system="Be brief."),
    _messages("blocks", system=[{"type": "text", "text": "Be brief."}]),
    _messages("a stop sequence", stop_sequences=["e"], max_tokens=30),
    _messages("tools, auto", tools=[{"name": "weather", "input_schema": WEATHER}]),
    _messages(
        "tools, any",
        tools=[{"name": "weather", "input_schema": WEATHER}],
        tool_choice={"type": "any"},
        max_tokens=60,
    ),
    _messages("thinking is off", thinking={"type": "disabled"}),
    _messages(
        "thinking, which this engine has no parser for",
        status=400,
        thinking={"type": "enabled", "budget_tokens": 1024},
        max_tokens=1100,
        stop_sequences=list("aeio"),
    ),
    _messages("an effort", output_config={"effort": "low"}),
    _messages("a schema", output_config={"format": _MESSAGE_SCHEMA}, max_tokens=40),
    _messages("calls of tools", messages=_TOOL_TURNS, tools=[_MESSAGE_TOOL]),
    _messages("no tokens", ALONE, 400, max_tokens=0),
    _messages("no messages", ALONE, 400, messages=None),
    _messages("an unknown role", SPLIT, 400, messages=[{"role": "x", "content": WORDS}]),
    _forwarded("a text", "/tokenize", {"model": "m", "prompt": "héllo"}),
    _forwarded("strings", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
    _forwarded("a chat", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    _forwarded("an adapter", "/tokenize", {"model": "on-decode", "prompt": "x"}),
    _forwarded("an unknown model", "/tokenize", {"model": "other", "prompt": "x"}, 404),
    _forwarded("nothing", "/tokenize", {}, 400),
    _forwarded("no JSON", "/tokenize", b"{", 400),
    _forwarded("tokens", "/detokenize", {"model": "m", "tokens": [104, 105]}),
    _forwarded("texts", "/detokenize", {"model": "m", "tokens": "hi"}, 400),
    _forwarded(
        "a message",
        "/v1/messages/count_tokens",
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    ),
    _forwarded("no message", "/v1/messages/count_tokens", {"model": "m"}, 400),
    _forwarded("a text", "/v1/embeddings", {"model": "m", "input": "x"}, 404),
    _forwarded("a text", "/pooling", {"model": "m", "input": "x"}, 404),
    _forwarded("a pair", "/score", {"model": "m", "text_1": "x", "text_2": "y"}, 404),
    _forwarded("a pair", "/v1/score", {"model": "m", "text_1": "x", "text_2": "y"}, 404),
    _forwarded("documents", "/rerank", {"model": "m", "query": "x", "documents": ["y"]}, 404),
    _forwarded("documents", "/v1/rerank", {"model": "m", "query": "x", "documents": ["y"]}, 404),
    _forwarded("documents", "/v2/rerank", {"model": "m", "query": "x", "documents": ["y"]}, 404),
    _forwarded("a text", "/classify", {"model": "m", "input": "x"}, 404),
    _forwarded("it is told", "/version", b"", method="GET"),
    *_adapter("both", SPLIT),
    *_adapter("on-decode", NO_PARTNER),
    *_adapter("nowhere", BY_ROUTER, 404),
]

STREAMED = [
    row
    for row in ROWS
    if row.path in (RESPONSES, MESSAGES) and row.status == 200 and "background" not in row.body
]
"""These are asked for as streams too."""

"""Rows about answers of a given form: tools, grammars, characters of several bytes; and about
fields that are unknown or wrong.
"""

from __future__ import annotations

from typing import Any

from end_to_end.conformance.row import ABSENT, CHAT, COMPLETIONS, WHOLE, Row, both

TOOLS, FORMATS, BYTES, UNKNOWN, WRONG = (
    "tools", "structured outputs", "characters of several bytes", "other fields", "wrong requests",
)  # fmt: skip


def tool(name: str, *cities: str) -> dict[str, Any]:
    """A tool with one argument of few values, so that a call is short."""
    city = {"type": "string", "enum": list(cities)}
    parameters = {
        "type": "object", "properties": {"city": city}, "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER, TIME = tool("weather", "Paris", "Oslo"), tool("time", "Rome", "Lima")
NAMED: Any = {"type": "function", "function": {"name": "time"}}
CALL = (
    r'<tool_call>\{"name": "(weather|time)", "arguments": \{"city": "(Oslo|Rome)"\}\}</tool_call>'
)
SCHEMA = WEATHER["function"]["parameters"]
ANSWERED: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [{
        "id": "call-1", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
    {"role": "tool", "tool_call_id": "call-1", "content": "minus 3"},
]  # fmt: skip


def asked(question: str) -> list[dict[str, Any]]:
    """A chat in which the first tool has been called."""
    return [{"role": "user", "content": question}, *ANSWERED]


def tools(name: str, fields: dict[str, Any], **rest: Any) -> Row:
    """A chat with two tools and room for a call."""
    return Row(TOOLS, name, CHAT, {"tools": [WEATHER, TIME], "max_tokens": 120, **fields}, **rest)


def formats(name: str, fields: dict[str, Any], **rest: Any) -> list[Row]:
    """Both endpoints, with room for the whole."""
    return both(FORMATS, name, {"max_tokens": 60, **fields}, **rest)


def wrong(name: str, fields: dict[str, Any], **rest: Any) -> list[Row]:
    """Both endpoints, refused."""
    return both(WRONG, name, fields, **{"status": 400, **rest})


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
GRAMMAR = 'root ::= "yes" | "no" | "maybe " root'
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}
SCRIPTS = {"structured_outputs": {"choice": ["漢字 Grüße 😀é"]}, "max_tokens": 40}
ROWS = [
    tools("tool_choice none", {"tool_choice": "none", "max_tokens": 12}),
    tools("tool_choice auto, no call", {"tool_choice": "auto", "max_tokens": 12}),
    tools("tool_choice absent", {"max_tokens": 12}),
    tools("tool_choice null", {"tool_choice": None, "max_tokens": 12}),
    tools("tool_choice auto, a call",
          {"tool_choice": "auto", "structured_outputs": {"regex": CALL}}),
    tools("tool_choice auto, a call that is cut off",
          {"tool_choice": "auto", "structured_outputs": {"regex": CALL}, "max_tokens": 45}),
    tools("tool_choice required", {"tool_choice": "required"}),
    tools("tool_choice required, one tool", {"tool_choice": "required", "tools": [TIME]}),
    tools("tool_choice required, 1 token", {"tool_choice": "required", "max_tokens": 1}),
    tools("tool_choice required, 2 tokens", {"tool_choice": "required", "max_tokens": 2}),
    tools("tool_choice required, one call at a time",
          {"tool_choice": "required", "parallel_tool_calls": False}),
    tools("tool_choice required and usage",
          {"tool_choice": "required", "stream_options": {"include_usage": True}},
          forms=("streamed",)),
    tools("tool_choice named", {"tool_choice": NAMED}),
    tools("tool_choice named, 1 token", {"tool_choice": NAMED, "max_tokens": 1}),
    tools("tool_choice named, 2 tokens", {"tool_choice": NAMED, "max_tokens": 2}),
    tools("tool_choice named and response_format",
          {"tool_choice": NAMED, "response_format": {"type": "json_object"}}),
    tools("tool_choice auto and response_format",
          {"tool_choice": "auto", "response_format": JSON_SCHEMA}),
    tools("calls and results in the history",
          {"messages": asked("Is it cold in Oslo?"), "max_tokens": 12}),
    tools("the history, then required",
          {"messages": asked("How warm is it in Oslo?"), "tool_choice": "required"}),
    tools("tool_choice names an unknown tool",
          {"tool_choice": {"type": "function", "function": {"name": "other"}}}, status=400),
    tools("tool_choice is an unknown word", {"tool_choice": "some"}, status=400),
    tools("no tools", {"tools": []}, status=400),
    tools("tools null", {"tools": None, "tool_choice": ABSENT, "max_tokens": 12}),
    tools("tool_choice required without tools", {"tools": ABSENT, "tool_choice": "required"},
          status=400),
    tools("a tool without a name", {"tools": [{"type": "function", "function": {}}]}, status=400),
    *formats("json_object", {"response_format": {"type": "json_object"}, "max_tokens": 24}),
    *formats("json_schema", {"response_format": JSON_SCHEMA}),
    *formats("json_schema, 1 token", {"response_format": JSON_SCHEMA, "max_tokens": 1}),
    *formats("json_schema, 2 tokens", {"response_format": JSON_SCHEMA, "max_tokens": 2}),
    *formats("response_format text", {"response_format": {"type": "text"}, "max_tokens": 8}),
    *formats("structural_tag", {"response_format": TAG, "max_tokens": 16}),
    *formats("json", {"structured_outputs": {"json": SCHEMA}}),
    *formats("regex", {"structured_outputs": {"regex": "[a-d]{3}-[0-9]{2,4}"}}),
    *formats("regex, 1 token", {"structured_outputs": {"regex": "[a-d]{3}"}, "max_tokens": 1}),
    *formats("regex, 2 tokens", {"structured_outputs": {"regex": "[a-d]{3}"}, "max_tokens": 2}),
    *formats("choice", {"structured_outputs": {"choice": ["positive", "negative"]}}),
    *formats("grammar", {"structured_outputs": {"grammar": GRAMMAR}}),
    *formats("grammar, 1 token", {"structured_outputs": {"grammar": GRAMMAR}, "max_tokens": 1}),
    *formats("regex and a seed", {"structured_outputs": {"regex": "[a-z]{9}"}, "temperature": 1,
                                  "seed": 41}),
    *formats("regex and logprobs", {"structured_outputs": {"regex": "[a-z]{4}"}, "logprobs": 1}),
    *formats("choice and n", {"structured_outputs": {"choice": ["ab", "cd"]}, "n": 2,
                              "temperature": 1, "seed": 42}, alone="n"),
    *formats("a regex that is none", {"structured_outputs": {"regex": "[a"}}, status=400),
    *formats("a grammar that is none", {"structured_outputs": {"grammar": "root :="}}, status=400),
    *formats("a schema that is none", {"structured_outputs": {"json": {"type": "x"}}}, status=400),
    *formats("two kinds at once", {"structured_outputs": {"regex": "a", "choice": ["a"]}},
             status=400),
    *formats("no choices", {"structured_outputs": {"choice": []}}, status=400),
    *formats("json_schema without a schema", {"response_format": {"type": "json_schema"}},
             status=400),
    *formats("an unknown response_format", {"response_format": {"type": "x"}}, status=400),
    *formats("guided_json, which is no field any more", {"guided_json": SCHEMA, "max_tokens": 8}),
    *both(BYTES, "whole", SCRIPTS),
    *both(BYTES, "usage", {**SCRIPTS, "stream_options": {"include_usage": True}},
          forms=("streamed",)),
    *both(BYTES, "cut inside a character", {**SCRIPTS, "max_tokens": 5}),
    *both(BYTES, "cut inside the first character", {**SCRIPTS, "max_tokens": 1}),
    *both(BYTES, "a stop string of several bytes", {**SCRIPTS, "stop": ["😀"]}),
    *both(BYTES, "token ids", {**SCRIPTS, "return_token_ids": True}),
    *both(BYTES, "stray bytes", {"allowed_token_ids": [0xE6, 0xBC, 0xA2, 0xF0, 0x41]}),
    Row(BYTES, "logprobs", COMPLETIONS, {**SCRIPTS, "logprobs": 1}),
    Row(BYTES, "logprobs", CHAT, {**SCRIPTS, "logprobs": True, "top_logprobs": 1}),
    Row(BYTES, "echo", COMPLETIONS, {**SCRIPTS, "prompt": "你好, 😀!", "echo": True}, alone="echo"),
    *both(UNKNOWN, "unknown fields", {"no_such_field": {"a": [1, None]}, "x": 1.5}),
    *both(UNKNOWN, "fields of OpenAI that engines ignore",
          {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}),
    *both(UNKNOWN, "kv_transfer_params of a client",
          {"kv_transfer_params": {"do_remote_prefill": True, "splitserve": {"leg": "x"}}}),
    *both(UNKNOWN, "vllm_xargs", {"vllm_xargs": {"a": 1, "b": [1, "x"]}}),
    *both(UNKNOWN, "cache_salt", {"cache_salt": "salt"}),
    *both(UNKNOWN, "an empty cache_salt", {"cache_salt": ""}, status=400),
    *both(UNKNOWN, "a cache_salt with a slash", {"cache_salt": "a/b"}, status=400),
    *both(UNKNOWN, "session_id", {"session_id": "s"}),
    *both(UNKNOWN, "priority 0", {"priority": 0}),
    *both(UNKNOWN, "priority 1", {"priority": 1}),
    *both(UNKNOWN, "priority is text", {"priority": "high"}, status=400),
    *both(UNKNOWN, "skip_special_tokens false",
          {"skip_special_tokens": False, "logit_bias": {"257": 100}}),
    *both(UNKNOWN, "no model", {"model": ABSENT}),
    *both(UNKNOWN, "model null", {"model": None}),
    *both(UNKNOWN, "an empty model", {"model": ""}),
    Row(UNKNOWN, "suffix", COMPLETIONS, {"suffix": "x"}, alone="suffix", status=400),
    Row(UNKNOWN, "suffix, which is no field here", CHAT, {"suffix": "x"}, alone="suffix"),
    *wrong("an unknown model", {"model": "other"}, status=404, by_router=True),
    *wrong("a model that is a number", {"model": 7}, alone="model"),
    *wrong("max_tokens is text", {"max_tokens": "many"}, alone="max_tokens"),
    *wrong("max_tokens is a fraction", {"max_tokens": 1.5}, alone="max_tokens"),
    *wrong("max_tokens is a list", {"max_tokens": [1]}, alone="max_tokens"),
    *both(WRONG, "max_tokens is a number as text", {"max_tokens": "5"}, alone="max_tokens"),
    *both(WRONG, "max_tokens is a whole fraction", {"max_tokens": 5.0}),
    *both(WRONG, "max_tokens is true", {"max_tokens": True}, alone="max_tokens"),
    *wrong("stream is a word", {"stream": "maybe"}, alone="stream", forms=WHOLE),
    *both(WRONG, "stream is 1", {"stream": 1}, alone="stream", forms=WHOLE),
    *both(WRONG, "stream is a word for true", {"stream": "yes"}, alone="stream", forms=WHOLE),
    *wrong("a seed that is text", {"seed": "x"}),
    *wrong("logit_bias is text", {"logit_bias": "x"}),
    *wrong("bad_words is a number", {"bad_words": 1}),
    *wrong("ignore_eos is a word", {"ignore_eos": "perhaps"}),
    Row(WRONG, "no prompt", COMPLETIONS, {"prompt": ABSENT}, alone="prompt", status=400),
    Row(WRONG, "prompt null", COMPLETIONS, {"prompt": None}, alone="prompt", status=400),
    Row(WRONG, "prompt is a number", COMPLETIONS, {"prompt": 7}, alone="prompt", status=400),
    Row(WRONG, "prompt is an object", COMPLETIONS, {"prompt": {"a": 1}}, alone="prompt",
        status=400),
    Row(WRONG, "prompt is mixed", COMPLETIONS, {"prompt": ["a", 1]}, alone="prompt", status=400),
    Row(WRONG, "prompt holds fractions", COMPLETIONS, {"prompt": [1, 2.5]}, alone="prompt",
        status=400),
    Row(WRONG, "prompt holds true", COMPLETIONS, {"prompt": [True, 65]}, alone="prompt"),
    Row(WRONG, "prompt holds lists of text", COMPLETIONS, {"prompt": [[1], ["a"]]}, alone="prompt",
        status=400),
    Row(WRONG, "no messages", CHAT, {"messages": ABSENT}, alone="messages", status=400),
    Row(WRONG, "messages is text", CHAT, {"messages": "hello"}, alone="messages", status=400),
    Row(WRONG, "messages is an object", CHAT, {"messages": {"role": "user"}}, alone="messages",
        status=400),
    Row(WRONG, "messages holds text", CHAT, {"messages": ["hello"]}, alone="messages", status=400),
]  # fmt: skip

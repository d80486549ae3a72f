"""The bodies of ``/v1/responses`` and ``/v1/messages``, as far as the router must understand them:
whether a request can be split, and what of it shapes the prompt.

Everything that is not what these endpoints' texts look like goes to a decode node alone, whose
engine is the judge of it. Whatever this overlooks costs time only: before pages are written the two
engines' prompts are compared, and the decode node computes a prompt that differs itself.
"""

from __future__ import annotations

from typing import Any, Final

from splitserve.orchestrator.router.endpoints import MESSAGES, RESPONSES

_TEXT_PARTS: Final = frozenset(
    {"text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"}
)
_TEXT_ITEMS: Final = frozenset(
    {None, "message", "function_call", "function_call_output", "reasoning"}
    | {"custom_tool_call", "custom_tool_call_output"}
)
"""Items of a response's input that are text alone."""
_TEXT_BLOCKS: Final = frozenset({"text", "tool_use", "tool_result", "thinking"})
"""Blocks of a message's content."""
_LOCAL_TOOLS: Final = frozenset({"function", "custom"})
"""Tools that the client calls; others the engine calls itself, with another prompt each time."""

_NEVER_SPLIT: Final[dict[str, dict[str, tuple[object, ...]]]] = {
    RESPONSES: {
        "previous_response_id": (None,),
        "background": (None, False),
        "truncation": (None, "disabled"),
        "prompt": (None,),
        "previous_input_messages": (None,),
        "enable_response_messages": (None, False),
        "ec_transfer_params": (None,),
    },
    MESSAGES: {"ec_transfer_params": (None,)},
}
"""Fields with the only values that a split request may have."""

_NOT_ON_PREFILL: Final = {
    RESPONSES: frozenset(
        {
            "background",
            "frequency_penalty",
            "ignore_eos",
            "include",
            "include_reasoning",
            "include_stop_str_in_output",
            "kv_transfer_params",
            "logit_bias",
            "max_tool_calls",
            "min_p",
            "presence_penalty",
            "repetition_penalty",
            "request_id",
            "seed",
            "stop",
            "stop_token_ids",
            "structured_outputs",
            "text",
            "top_k",
            "top_logprobs",
            "top_p",
        }
    ),
    MESSAGES: frozenset({"kv_transfer_params", "stop_sequences", "top_k", "top_p"}),
}
"""Fields that matter only for sampling or for the answer's form."""


def why_alone(endpoint: str, fields: dict[str, Any]) -> str:
    """Why the request must not be split; empty when it may be."""
    for name, allowed in _NEVER_SPLIT[endpoint].items():
        if not is_one_of(fields.get(name), allowed):
            return name
    tools = fields.get("tools")
    if tools is not None and type(tools) is not list:
        return "tools"
    if endpoint == MESSAGES:
        if type(fields.get("messages")) is not list or not fields["messages"]:
            return "messages"
        contents = [m.get("content") if type(m) is dict else None for m in fields["messages"]]
        is_text = all(map(_is_text_content, contents))
        return "" if is_text and _is_text_content(fields.get("system") or "") else "multimodal"
    if any(type(t) is not dict or t.get("type") not in _LOCAL_TOOLS for t in tools or ()):
        return "tools"
    return "" if _is_text_input(fields.get("input")) else "input"


def prefill_fields(endpoint: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The prefill leg's body without its transfer: the fields that shape the prompt, one greedy
    token, no stream, nothing stored.
    """
    kept = {k: v for k, v in fields.items() if k not in _NOT_ON_PREFILL[endpoint]}
    kept |= {"stream": False, "temperature": 0}
    if endpoint == RESPONSES:
        kept |= {"max_output_tokens": 1, "store": False}
        forced: object = "none"
    else:
        kept["max_tokens"] = 1
        forced = {"type": "none"}
        if type(kept.get("thinking")) is dict and kept["thinking"].get("type") == "enabled":
            del kept["thinking"]  # A budget, of which one token has no room
        if type(kept.get("output_config")) is dict:
            kept["output_config"] = {
                k: v for k, v in kept["output_config"].items() if k != "format"
            }
    kept.pop("tool_choice", None)
    if kept.get("tools"):
        kept["tool_choice"] = forced
    return kept


def is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Whether the value is one of these, and of the same type."""
    return any(value is a or (type(value) is type(a) and value == a) for a in allowed)


def _is_text_input(value: object) -> bool:
    """Whether a response's input is text, or items of text."""
    if type(value) is str:
        return bool(value)
    if type(value) is not list or not value:
        return False
    for item in value:
        if type(item) is not dict or item.get("type") not in _TEXT_ITEMS:
            return False
        if not all(_is_text(item.get(name)) for name in ("content", "output", "summary")):
            return False
    return True


def _is_text(value: object) -> bool:
    if value is None or type(value) is str:
        return True
    return type(value) is list and all(
        type(part) is dict and part.get("type") in _TEXT_PARTS for part in value
    )


def _is_text_content(value: object) -> bool:
    """Whether a message's content is text, calls of tools and their results."""
    if type(value) is str:
        return True
    return type(value) is list and all(
        type(block) is dict and block.get("type") in _TEXT_BLOCKS and _is_text(block.get("content"))
        for block in value
    )

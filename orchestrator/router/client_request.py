"""A client's request body: checked as far as the router must understand it, and rewritten for the
two legs.

The engine is the judge; its 4xx answers are passed on. A field that the router reads and that has
not the type it expects makes the request one for a decode node alone, which refuses it, or takes it
(``"max_tokens": "5"``), as one engine does. The router itself refuses bodies that are no JSON
object, in which it could not find what it must replace, and models that are not served.

Decode leg: the client's own bytes, with the router's fields spliced in before the last brace;
encoded again only when the client sent those fields itself. Prefill leg: the fields that shape the
prompt, one greedy token, no stream. ``tools`` stay, since they are part of the rendered prompt; a
forced ``tool_choice`` becomes ``none``, because parsing a tool call out of one token fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from splitserve.orchestrator.router.conversation_bodies import (
    is_one_of,
    prefill_fields,
    why_alone,
)
from splitserve.orchestrator.router.endpoints import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Collection

    from splitserve.orchestrator.router.sent_tokens import SentTokens

KV_TRANSFER_PARAMS = "kv_transfer_params"
"""The field that steers transfers; not the client's to send."""

BYTES_PER_TOKEN = 3
"""Estimate for text; low on purpose, so that blocks are rather over- than underestimated."""

COMPLETION_TOKENS = 16
"""What a completion gets that names no limit."""

NESTING_SAFE_LEVELS = 200
"""So many levels can be written again (orjson reads more than it writes)."""

COPY_LIMIT_BYTES = 64 * 1024
"""Larger bodies are not copied to change their end."""

_NOT_ON_PREFILL: Final = frozenset(
    {
        "n",
        "best_of",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_prompt_text",
        "max_completion_tokens",
        "min_tokens",
        "ignore_eos",
        "stream_options",
        "stream_interval",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "seed",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "repetition_detection",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "thinking_token_budget",
        "suffix",
        KV_TRANSFER_PARAMS,
    }
)
"""Fields that matter only for sampling or for the answer's form."""

_NEVER_SPLIT: Final[dict[str, tuple[object, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "truncate_prompt_tokens": (None,),
    "suffix": (None, ""),
}
"""Fields with the only values that a split request may have; all others go to a decode node alone.
"""


_INTEGER: Final = (int,)
_READ_AS: Final[dict[str, tuple[type, ...]]] = {
    "model": (str,),
    "stream": (bool,),
    "max_tokens": _INTEGER,
    "max_completion_tokens": _INTEGER,
    "max_output_tokens": _INTEGER,
}
"""Fields that the router reads, with their types; a number without a fraction is an integer too."""


_EXACT_WHEN_CONTINUED: Final = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "cache_salt",
        "priority",
        "user",
        "metadata",
        "store",
    }
)
"""Fields whose effect depends on the tokens before alone, not on which of them are prompt and which
are answer: another engine that is given both as a prompt goes on as the first one would have.
"""

_CONTINUED_WITH: Final[dict[str, tuple[object, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "seed": (None,),
    "tools": (None,),
    "tool_choice": (None, "none"),
    "response_format": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "bad_words": (None,),
    "return_token_ids": (None, False),
}
"""Further fields, with the only values that leave it so."""


@dataclass(slots=True)
class ClientRequest:
    """What the router knows of a request's body."""

    endpoint: str
    raw: bytes
    fields: dict[str, Any]
    is_streaming: bool
    prompt_tokens: int
    """Exact for token ids, else an estimate."""
    output_tokens: int | None
    alone_because: str
    can_continue: bool = False
    """A stream that another engine may go on with, with the result that one engine would give."""
    method: str = "POST"
    target: str = ""
    """Path and query at the engine; empty for the endpoint's own."""
    needs_kv: bool = True
    """False for what is forwarded as it came."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The engine is to tell how likely the prompt was."""
        fields = self.fields
        if fields.get("prompt_logprobs") is not None:
            return True
        wants_logprobs = self.endpoint == CHAT or fields.get("logprobs") is not None
        return bool(fields.get("echo")) and wants_logprobs

    @property
    def wants_usage(self) -> bool:
        """The stream is to end with a count of tokens."""
        options = self.fields.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def decode_body(
        self,
        kv_transfer_params: bytes | None,
        salt: str | None,
        *,
        with_ids: bool = False,
        response_id: str = "",
    ) -> list[bytes | memoryview]:
        """The decode leg's body in pieces; ``kv_transfer_params`` is JSON, None for a request that
        is not split. ``with_ids`` asks the engine for the ids of what it sends; ``response_id``
        names a response to be.
        """
        if not self.needs_kv:
            return [self.raw]
        if (
            not self.fields
            or KV_TRANSFER_PARAMS in self.fields
            or (salt is not None and "cache_salt" in self.fields)
        ):
            fields = {k: v for k, v in self.fields.items() if k != KV_TRANSFER_PARAMS}
            if salt is not None:
                fields["cache_salt"] = salt
                salt = None
            if not fields:
                return [b"{}"]  # Nothing to splice behind; the engine refuses it.
            raw = orjson.dumps(fields)
        else:
            raw = self.raw
        if salt is None and kv_transfer_params is None and not (with_ids or response_id):
            return [raw]
        end = raw.rindex(b"}")
        start = raw[:end] if end < COPY_LIMIT_BYTES else memoryview(raw)[:end]
        pieces: list[bytes | memoryview] = [start]
        if salt is not None:
            pieces += (b',"cache_salt":', orjson.dumps(salt))
        if with_ids:
            pieces.append(b',"return_token_ids":true')
        if response_id:
            pieces += (b',"request_id":', orjson.dumps(response_id))
        if kv_transfer_params is not None:
            pieces += (b',"kv_transfer_params":', kv_transfer_params)
        pieces.append(b"}")
        return pieces

    def prefill_body(self, kv_transfer_params: bytes, salt: str | None) -> bytes:
        """The prefill leg's body."""
        if self.endpoint in (RESPONSES, MESSAGES):
            fields = prefill_fields(self.endpoint, self.fields)
        else:
            fields = self._prefill_fields()
        if salt is not None:
            fields["cache_salt"] = salt
        return orjson.dumps(fields)[:-1] + b',"kv_transfer_params":' + kv_transfer_params + b"}"

    def _prefill_fields(self) -> dict[str, Any]:
        fields = {k: v for k, v in self.fields.items() if k not in _NOT_ON_PREFILL}
        fields["max_tokens"] = 1
        fields["stream"] = False
        fields["temperature"] = 0
        if "tools" in fields:
            fields["tool_choice"] = "none"
        else:
            fields.pop("tool_choice", None)
        return fields


def read_client_request(
    endpoint: str, raw: bytes, models: Collection[str], adapters: Collection[str] = ()
) -> ClientRequest:
    """The request of that body. Raises ``ApiError`` 400 or, for a model that is not served, 404."""
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the request body must be a JSON object")
    if raw.count(b"[") + raw.count(b"{") > NESTING_SAFE_LEVELS:
        try:
            orjson.dumps(fields)
        except TypeError:
            raise ApiError(400, "the request body is nested too deeply") from None
    extra = fields.get("vllm_xargs")
    if isinstance(extra, dict) and KV_TRANSFER_PARAMS in extra:
        # vLLM takes them from there too; this field has every leg written anew, without either.
        fields["vllm_xargs"] = {k: v for k, v in extra.items() if k != KV_TRANSFER_PARAMS}
        fields[KV_TRANSFER_PARAMS] = None
    model = fields.get("model")
    if type(model) is str and model and model not in models and model not in adapters:
        served = ", ".join(sorted(models)) or "none yet"
        message = f"The model `{model}` does not exist. Valid aliases: {served}."
        raise ApiError(404, message, param="model")
    is_streaming = fields.get("stream")
    odd = _odd_type(fields)
    output_tokens = _limit(fields, "max_tokens")
    if endpoint == CHAT:
        more = _limit(fields, "max_completion_tokens")
        output_tokens = output_tokens if more is None else more
        prompt_tokens, alone_because = _read_messages(fields, len(raw))
    elif endpoint != COMPLETIONS:
        if endpoint == RESPONSES:
            output_tokens = _limit(fields, "max_output_tokens")
        prompt_tokens = len(raw) // BYTES_PER_TOKEN + 1
        alone_because = why_alone(endpoint, fields)
    else:
        if output_tokens is None and fields.get("max_tokens") is None:
            output_tokens = COMPLETION_TOKENS
        prompt_tokens, alone_because = _read_prompt(fields, len(raw))
    alone_because = alone_because or odd or _why_alone(fields, output_tokens)
    return ClientRequest(
        endpoint,
        raw,
        fields,
        is_streaming is True,
        prompt_tokens,
        output_tokens,
        alone_because,
        is_streaming is True and not alone_because and _can_continue(fields),
    )


def continued(request: ClientRequest, sent: SentTokens) -> ClientRequest:
    """The request for what is left of the answer, behind what was sent. A chat's messages stay; the
    token ids that count come with the transfer parameters.
    """
    fields = {k: v for k, v in request.fields.items() if k != KV_TRANSFER_PARAMS}
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if fields.get(name) is not None:
            fields[name] = max(0, int(fields[name]) - sent.sent)
    if request.endpoint == COMPLETIONS:
        if "max_tokens" not in fields:
            fields["max_tokens"] = COMPLETION_TOKENS - sent.sent
        fields["prompt"] = orjson.Fragment(sent.ids())
    fields["return_token_ids"] = True
    return ClientRequest(
        request.endpoint,
        orjson.dumps(fields),
        fields,
        request.is_streaming,
        request.prompt_tokens + sent.sent,
        request.output_tokens,
        request.alone_because,
    )


def _can_continue(fields: dict[str, Any]) -> bool:
    for name in fields.keys() - _EXACT_WHEN_CONTINUED:
        if name == "seed" and fields.get("temperature") == 0:
            continue
        if name == KV_TRANSFER_PARAMS:  # Taken out on every leg.
            continue
        if name == "min_tokens" and type(fields[name]) is int:
            continue
        allowed = _CONTINUED_WITH.get(name)
        if allowed is None or not is_one_of(fields[name], allowed):
            return False
    return True


def _odd_type(fields: dict[str, Any]) -> str:
    """The first field that the router reads and that has another type than it expects."""
    for name, types in _READ_AS.items():
        value = fields.get(name)
        if value is None or type(value) in types:
            continue
        if types is not _INTEGER or type(value) is not float or not value.is_integer():
            return name
    return ""


def _limit(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if type(value) is int or (type(value) is float and value.is_integer()):
        return int(value)
    return None


def _read_messages(fields: dict[str, Any], raw_bytes: int) -> tuple[int, str]:
    """(estimate of the prompt's tokens, why not to split)."""
    messages = fields.get("messages")
    alone_because = "" if messages and isinstance(messages, list) else "messages"
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            alone_because = "messages"
            break
        content = message.get("content")
        if type(content) is list and any(
            isinstance(part, dict) and part.get("type") not in ("text", "refusal")
            for part in content
        ):
            alone_because = "multimodal"
    return raw_bytes // BYTES_PER_TOKEN + 1, alone_because


def _read_prompt(fields: dict[str, Any], raw_bytes: int) -> tuple[int, str]:
    """(the prompt's tokens, exact or estimated; why not to split)."""
    prompt = fields.get("prompt")
    estimate = raw_bytes // BYTES_PER_TOKEN + 1
    if type(prompt) is str:
        return estimate, "" if prompt else "empty prompt"
    if prompt is None and fields.get("prompt_embeds") is not None:
        return estimate, "prompt_embeds"
    if not isinstance(prompt, list):
        return estimate, "prompt"
    kinds = {type(item) for item in prompt}
    if not kinds:
        return 1, "empty prompt"
    if kinds == {int}:
        return len(prompt), ""
    if kinds == {str}:
        return estimate, "" if len(prompt) == 1 and prompt[0] else "several prompts"
    if kinds == {list} and all(type(token) is int for tokens in prompt for token in tokens):
        tokens = sum(map(len, prompt))
        return tokens, "" if len(prompt) == 1 and prompt[0] else "several prompts"
    return estimate, "prompt"


def _why_alone(fields: dict[str, Any], output_tokens: int | None) -> str:
    for name, allowed in _NEVER_SPLIT.items():
        if name in fields and not is_one_of(fields[name], allowed):
            return name
    if output_tokens is not None and output_tokens < 1:
        return "max_tokens"
    return ""

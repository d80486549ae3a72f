"""The OpenAI requests that our own engines read, and the JSON they answer with, in the shapes of
vLLM 0.32.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Kind = TypeVar("Kind")

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """The request ends with this status and message; ``param`` names the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """vLLM's error object."""
        error = {
            "message": self.message,
            "type": _TYPES[self.status],
            "param": self.param,
            "code": self.status,
        }
        return {"error": error}


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream holds besides its choices."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints of every engine read; other fields are ignored, as by vLLM, where an
    engine does not say otherwise.
    """

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    temperature: float | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(Body, frozen=True, kw_only=True):
    """``/v1/completions``."""

    prompt: Any = None
    echo: bool | None = False


class ChatBody(Body, frozen=True, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[Any]
    tools: list[Any] | None = None
    max_completion_tokens: int | None = None


class DetokenizeBody(msgspec.Struct):
    """The request of ``/detokenize``."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


Request = CompletionBody | ChatBody


def read_fields(raw: bytes) -> dict[str, Any]:
    """The body as it came. Raises ``ApiError`` 400 when it is no JSON object."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the request body is not valid: {error}") from error


def read_body(raw: bytes, kind: type[Kind]) -> Kind:
    """The request. Raises ``ApiError`` 400."""
    try:
        return msgspec.json.decode(raw, type=kind, strict=False)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the request body is not valid: {error}") from error


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    text: str | None
    """None when it came as token ids."""
    tokens: tuple[int, ...]


def prompts_in(
    prompt: object, encode: Callable[[str], Sequence[int]], vocabulary_tokens: int
) -> list[Prompt]:
    """Every prompt of a completion, none of them empty. Raises ``ApiError`` 400."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    parts = prompt if isinstance(prompt, list) and several else [prompt]
    return [prompt_of(part, encode, vocabulary_tokens) for part in parts]


def prompt_of(
    prompt: object, encode: Callable[[str], Sequence[int]], vocabulary_tokens: int
) -> Prompt:
    """A single one, of text or of token ids. Raises ``ApiError`` 400."""
    if isinstance(prompt, str):
        tokens, text = tuple(encode(prompt)), prompt
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens, text = tuple(prompt), None
    else:
        raise ApiError(400, "'prompt' must be text or token ids", "prompt")
    if not tokens:
        raise ApiError(400, "The decoder prompt cannot be empty", "prompt")
    wrong = next((token for token in tokens if not 0 <= token < vocabulary_tokens), None)
    if wrong is not None:
        raise ApiError(400, f"Token id {wrong} is out of vocabulary", "prompt")
    return Prompt(text, tokens)


def limit_tokens(body: Request, prompt_tokens: int, max_model_len: int) -> int:
    """How long the answer may be. Raises ``ApiError`` 400 for a prompt that is too long."""
    if prompt_tokens >= max_model_len:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {prompt_tokens} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    room = max_model_len - prompt_tokens
    if isinstance(body, ChatBody):
        wanted = body.max_completion_tokens or body.max_tokens
    else:
        wanted = 16 if body.max_tokens is None else body.max_tokens
    if wanted is not None and wanted < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {wanted}.", "max_tokens")
    if wanted is not None and wanted > max_model_len:
        raise ApiError(
            400,
            f"max_tokens={wanted} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
        )
    return room if wanted is None else min(room, wanted)


class TextOf:
    """The text of one answer as its tokens come, with stop strings cut off.

    Text that may be the beginning of a stop string is held back until it is not.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stop_reason: str | int | None = None
        """The stop string, or the token of ``stop_token_ids``, that ended the answer."""
        self._stops = stops
        self._held = ""

    def resume(self, text: str) -> None:
        """Another engine has sent the answer's beginning, as far as it could go out."""
        self.feed(text, is_last=False)

    def feed(self, text: str, *, is_last: bool, may_stop: bool = True) -> str:
        """What may go out; ``stop_reason`` is set when a stop string has come. Where the answer
        must not stop yet, stop strings are text like any other.
        """
        self._held += text
        if not may_stop:
            self._held, out = "", self._held
            return out
        places = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if places:
            at, stop = min(places)
            self.stop_reason = stop
            return self._held[:at]
        keep = 0 if is_last else max((len(stop) for stop in self._stops), default=1) - 1
        out = self._held[: max(0, len(self._held) - keep)]
        self._held = self._held[len(out) :]
        return out


class Shapes:
    """The answer's JSON objects for one request."""

    def __init__(self, request_id: str, model: str, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self._head = {"id": request_id, "created": int(time.time()), "model": model}

    def role_chunk(self, index: int, prompt_ids: list[int] | None) -> dict[str, Any]:
        """A chat stream's first chunk; with the prompt's ids if they were asked for."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice]) | {"prompt_token_ids": prompt_ids}

    def chunk(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        stop_reason: str | int | None,
        *,
        ids: list[int] | None = None,
        prompt_ids: list[int] | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The next text of one choice; with what else was asked for."""
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        choice |= {"logprobs": logprobs, "finish_reason": finish_reason}
        if not self.is_chat or finish_reason is not None:
            choice["stop_reason"] = stop_reason
        if not self.is_chat:
            choice["prompt_token_ids"] = prompt_ids
        choice["token_ids"] = ids
        return self._chunk([choice])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, when asked for."""
        return self._chunk([]) | {"usage": usage}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def choice(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        stop_reason: str | int | None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One complete choice."""
        content = (
            {"message": {"role": "assistant", "content": text, "tool_calls": []}}
            if self.is_chat
            else {"text": text}
        )
        end = {"logprobs": logprobs, "finish_reason": finish_reason, "stop_reason": stop_reason}
        return {"index": index, **content, **end}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's count of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }

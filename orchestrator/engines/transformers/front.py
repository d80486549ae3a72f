"""What the transformers engine makes of requests: vLLM's fields as far as it has them, and a 400 in
words for what it has not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import structs

from splitserve.orchestrator.engines.serving.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    Prompt,
    Request,
    prompt_of,
    prompts_in,
    read_body,
    read_fields,
)
from splitserve.orchestrator.engines.transformers.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from splitserve.orchestrator.engines.transformers.text import IncrementalText, Text

LOGPROBS_LIMIT = 20
"""vLLM's default."""
ANSWERS_LIMIT = 128
"""To one prompt."""
_NO_GRAMMAR = "answers of a given form (grammar, JSON schema) need vLLM"
_NO_TOOLS = "tool calls need vLLM"
_NO_PICTURES = "this engine takes and gives text only"
CANNOT: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((None, []), _NO_TOOLS),
    "tool_choice": ((None, "none", "auto"), _NO_TOOLS),
    "function_call": ((None, "none", "auto"), _NO_TOOLS),
    "response_format": ((None, {"type": "text"}), _NO_GRAMMAR),
    "structured_outputs": ((None,), _NO_GRAMMAR),
    "guided_json": ((None,), _NO_GRAMMAR),
    "guided_regex": ((None,), _NO_GRAMMAR),
    "guided_choice": ((None,), _NO_GRAMMAR),
    "guided_grammar": ((None,), _NO_GRAMMAR),
    "logit_bias": ((None, {}), "tokens cannot be made likelier one by one: use vLLM"),
    "bad_words": ((None, []), "words cannot be forbidden: use vLLM"),
    "allowed_token_ids": ((None,), "tokens cannot be forbidden: use vLLM"),
    "prompt_logprobs": ((None, 0), "likelihoods of the prompt need vLLM"),
    "use_beam_search": ((None, False), "beams need vLLM"),
    "best_of": ((None, 1), "it gives as many answers as are asked for (n)"),
    "suffix": ((None, ""), "text is continued, never filled in"),
    "include_stop_str_in_output": ((None, False), "stop strings are always cut off"),
    "truncate_prompt_tokens": ((None,), "prompts are taken whole: shorten it"),
    "continue_final_message": ((None, False), "the last message cannot be continued"),
    "documents": ((None, []), "documents need vLLM"),
    "chat_template": ((None,), "the template is the model's own"),
    "modalities": ((None, ["text"]), _NO_PICTURES),
    "audio": ((None,), _NO_PICTURES),
    "prompt_embeds": ((None,), "prompts are text or token ids"),
}
"""Fields of OpenAI and vLLM that change the answer: values that ask for nothing, and why no other
can be had.
"""

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, in both endpoints; None: as the model's `generation_config` says."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Positive | None = None
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class Completion(CompletionBody, frozen=True, kw_only=True):
    """``/v1/completions``."""

    chosen: Chosen = Chosen()
    """Filled in from the same body."""

    logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_LIMIT)] | None = None


class Chat(ChatBody, frozen=True, kw_only=True):
    """``/v1/chat/completions``."""

    chosen: Chosen = Chosen()
    """Filled in from the same body."""

    logprobs: bool | None = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_LIMIT)] | None = 0
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TransformersFront:
    """See ``serving.front.Front``. ``defaults`` are the model's own, where a request says nothing;
    ``end_ids`` end an answer.
    """

    def __init__(
        self,
        text: Text,
        *,
        defaults: Mapping[str, float],
        end_ids: frozenset[int],
        vocabulary_tokens: int,
    ) -> None:
        self._text = text
        self._defaults = defaults
        self._end_ids = end_ids
        self._vocabulary_tokens = vocabulary_tokens

    def read(self, raw: bytes, *, is_chat: bool) -> Request:
        """Fields that neither OpenAI nor vLLM give a meaning are ignored, as by vLLM."""
        refuse_what_it_cannot(read_fields(raw))
        body: Completion | Chat = read_body(raw, Chat) if is_chat else read_body(raw, Completion)
        body = structs.replace(body, chosen=read_body(raw, Chosen))
        if isinstance(body, Completion) and body.echo and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs: likelihoods of the prompt need vLLM", "echo")
        if isinstance(body, Chat) and body.top_logprobs and not body.logprobs:
            raise ApiError(400, "when using `top_logprobs`, `logprobs` must be true", "logprobs")
        if not 1 <= (body.n or 1) <= ANSWERS_LIMIT or body.n == 0:
            raise ApiError(400, f"n must be from 1 to {ANSWERS_LIMIT}, got {body.n}", "n")
        if "" in body.stops:
            raise ApiError(400, "stop cannot contain an empty string", "stop")
        return body

    def read_tokenize(self, raw: bytes) -> Request:
        """Told apart by their field."""
        return self.read(raw, is_chat="messages" in read_fields(raw))

    def prompts(self, body: Request) -> list[Prompt]:
        """Of text or ids; a chat as the model's template writes it."""
        assert isinstance(body, Completion | Chat)
        adds = body.chosen.add_special_tokens

        def encode(text: str) -> list[int]:
            # a template writes them itself
            special = isinstance(body, Completion) if adds is None else adds
            return self._text.encode(text, add_special_tokens=special)

        if isinstance(body, Completion):
            return prompts_in(body.prompt, encode, self._vocabulary_tokens)
        ids = (body.kv_transfer_params or {}).get("prompt_token_ids")
        if ids is not None:
            return [prompt_of(ids, encode, self._vocabulary_tokens)]
        text = self._text.chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            options={"tools": body.tools or None} | (body.chat_template_kwargs or {}),
        )
        return [prompt_of(text, encode, self._vocabulary_tokens)]

    def end_ids(self, body: Request) -> frozenset[int]:
        """The model's, and the request's own."""
        own = frozenset(body.stop_token_ids or ())
        return own if body.ignore_eos else own | self._end_ids

    def sampling(self, body: Request, choice: int) -> Sampling:
        """Every answer of a seeded request has a seed of its own, as in vLLM."""
        assert isinstance(body, Completion | Chat)
        given = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if (value := getattr(body.chosen, name)) is not None
        }
        asked, chosen = body.chosen, dict(self._defaults) | given
        return Sampling(
            temperature=chosen.get("temperature", 1.0),
            top_p=chosen.get("top_p", 1.0),
            top_k=max(0, int(chosen.get("top_k", 0))),
            min_p=chosen.get("min_p", 0.0),
            repetition_penalty=chosen.get("repetition_penalty", 1.0),
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            seed=None if asked.seed is None else asked.seed + choice,
            top_logprobs=self.top_logprobs(body),
        )

    def top_logprobs(self, body: Request) -> int | None:
        """As the endpoint asks for them."""
        if isinstance(body, Completion):
            return body.logprobs
        assert isinstance(body, Chat)
        return (body.top_logprobs or 0) if body.logprobs else None

    def name_token(self, body: Request, token: int) -> str:
        """Its text, or its number where the request wants that."""
        assert isinstance(body, Completion | Chat)
        if body.chosen.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._text.decode([token])

    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens included."""
        return self._text.decode(tokens)

    def detokenizer(self, body: Request, prompt: Sequence[int]) -> IncrementalText:
        """Special tokens are left out unless the request wants them."""
        assert isinstance(body, Completion | Chat)
        return self._text.detokenizer(prompt, skip_special_tokens=body.chosen.skip_special_tokens)


def refuse_what_it_cannot(fields: Mapping[str, Any]) -> None:
    """Raise ``ApiError`` 400 for a field that asks for what only vLLM can do.

    Tools that must not be called are part of the prompt, as in vLLM: so is the prefill leg of a
    request whose answer another engine parses.
    """
    if fields.get("tools") and fields.get("tool_choice") != "none":
        raise _refused("tools", _NO_TOOLS)
    for name, (neutral, why) in CANNOT.items():
        if name in fields and fields[name] not in neutral:
            raise _refused(name, why)


def _refused(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name}: the transformers engine does not have it; {why}", name)

"""Text and tokens, by the model's own tokenizer and chat template, as vLLM uses them."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from splitserve.orchestrator.engines.serving.protocol import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerFast

_OUT_OF_STEP = "Invalid prefix encountered"
"""What `tokenizers` says when a token changes text that was given out."""


class Text:
    """The tokenizer. Raises ``ValueError`` for one that is not of Rust's `tokenizers`: text could
    not be given out token by token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("the model has no tokenizer.json; convert its tokenizer to a fast one")
        self._tokenizer = tokenizer
        self._template_arguments = set(signature(tokenizer.apply_chat_template).parameters)
        """What a client must not decide: the template itself, and the form of what comes back."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def chat(
        self, messages: Sequence[Any], *, add_generation_prompt: bool, options: dict[str, Any]
    ) -> str:
        """A conversation as the model's template writes it. Raises ``ApiError`` 400."""
        if self._tokenizer.chat_template is None:
            raise ApiError(400, "the model has no chat template: use /v1/completions", "messages")
        if not messages:
            raise ApiError(400, "'messages' must not be empty", "messages")
        conversation = [_message(message) for message in messages]
        own = sorted(options.keys() & self._template_arguments - {"tools"})
        if own:
            raise ApiError(
                400, f"chat_template_kwargs: {', '.join(own)} cannot be set", "chat_template_kwargs"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except Exception as error:  # a template may raise anything, of a client's messages
            raise ApiError(400, f"the chat template refuses this: {error}", "messages") from error
        return text

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> IncrementalText:
        """For an answer to ``prompt``."""
        return IncrementalText(self._tokenizer, prompt, skip_special_tokens=skip_special_tokens)


class IncrementalText:
    """See ``serving.front.Detokenizer``. Bytes that are no whole character yet are held back."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._skips = skip_special_tokens
        # some tokenizers write a word's first token otherwise at a text's beginning
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=skip_special_tokens)

    def feed(self, token: int) -> str:
        """What is certain of the text now and was not before."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except OverflowError:
            return ""  # an id that the tokenizer does not have, as vLLM takes it
        except Exception as error:  # `tokenizers` raises nothing more exact
            if not str(error).startswith(_OUT_OF_STEP):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skips)
            return self._stream.step(self._tokenizer, token) or ""


def _message(message: Any) -> dict[str, Any]:
    """A message whose content is a string. Raises ``ApiError`` 400."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, "each message needs a 'role'", "messages")
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise ApiError(400, "'content' must be a string or a list of parts", "messages")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
            raise ApiError(400, "this engine takes text only, no pictures or sound", "messages")
        parts.append(str(part.get("text", "")))
    return {**message, "content": "\n".join(parts)}

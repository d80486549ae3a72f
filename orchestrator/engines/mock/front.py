"""What the mock engine makes of requests: one token per byte, greedy, everything else ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.engines.mock.tokenizer import (
    END,
    VOCABULARY,
    PromptError,
    chat_prompt,
    decode,
    encode,
)
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

if TYPE_CHECKING:
    from collections.abc import Sequence


class MockFront:
    """See ``serving.front.Front``."""

    def read(self, raw: bytes, *, is_chat: bool) -> Request:
        """Fields that the mock engine does not know are ignored."""
        return read_body(raw, ChatBody) if is_chat else read_body(raw, CompletionBody)

    def read_tokenize(self, raw: bytes) -> Request:
        """Told apart by their field."""
        return self.read(raw, is_chat="messages" in read_fields(raw))

    def prompts(self, body: Request) -> list[Prompt]:
        """Of text or ids; a chat as ``chat_prompt`` renders it."""
        if isinstance(body, CompletionBody):
            return prompts_in(body.prompt, encode, VOCABULARY)
        ids = (body.kv_transfer_params or {}).get("prompt_token_ids")
        if ids is not None:
            return [prompt_of(ids, encode, VOCABULARY)]
        try:
            text = chat_prompt(body.messages, body.tools)
        except PromptError as error:
            raise ApiError(400, str(error), "messages") from error
        return [Prompt(text, tuple(encode(text)))]

    def end_ids(self, body: Request) -> frozenset[int]:
        """The end token, and the request's own."""
        own = frozenset(body.stop_token_ids or ())
        return own if body.ignore_eos else own | {END}

    def sampling(self, body: Request, choice: int) -> object:
        """There is one way."""
        return None

    def top_logprobs(self, body: Request) -> int | None:
        """There are none."""
        return None

    def name_token(self, body: Request, token: int) -> str:
        """Its text."""
        return decode([token])

    def decode(self, tokens: Sequence[int]) -> str:
        """The end token has no text."""
        return decode(tokens)

    def detokenizer(self, body: Request, prompt: Sequence[int]) -> MockDetokenizer:
        """Tokens are bytes."""
        return MockDetokenizer()


class MockDetokenizer:
    """See ``serving.front.Detokenizer``."""

    def feed(self, token: int) -> str:
        """Answers are ASCII."""
        return decode([token])

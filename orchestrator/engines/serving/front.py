"""What the HTTP server asks its engine about requests and text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.engines.serving.protocol import Prompt, Request


class Detokenizer(Protocol):
    """The text of one answer, token by token."""

    def feed(self, token: int) -> str:
        """What is certain of the text now and was not before; what never becomes a whole character
        is never given out.
        """


class Front(Protocol):
    """One per engine; no call changes anything."""

    def read(self, raw: bytes, *, is_chat: bool) -> Request:
        """A request's body. Raises ``ApiError`` 400 for what is malformed, and for what this engine
        cannot do.
        """

    def read_tokenize(self, raw: bytes) -> Request:
        """The body of ``/tokenize``: a prompt or messages. Raises ``ApiError`` 400."""

    def prompts(self, body: Request) -> list[Prompt]:
        """Every prompt of the request, not empty. Raises ``ApiError`` 400."""

    def end_ids(self, body: Request) -> frozenset[int]:
        """The tokens that end an answer."""

    def sampling(self, body: Request, choice: int) -> object:
        """How tokens are chosen for the request's answer number ``choice``."""

    def top_logprobs(self, body: Request) -> int | None:
        """How many likely tokens are shown at each place, 0 for none but the chosen one; None when
        no likelihoods were asked for.
        """

    def name_token(self, body: Request, token: int) -> str:
        """How a token is shown beside its likelihood."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, special tokens included."""

    def detokenizer(self, body: Request, prompt: Sequence[int]) -> Detokenizer:
        """A new one, for an answer to ``prompt``."""

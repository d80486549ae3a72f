"""One row of the suite: what is asked, and how the cluster is to serve it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Form = Literal["whole", "streamed"]
BOTH: tuple[Form, ...] = ("whole", "streamed")
WHOLE: tuple[Form, ...] = ("whole",)
STREAMED: tuple[Form, ...] = ("streamed",)
ANSWER_TOKENS = 8
SUBJECT = "The quick brown fox jumps over the lazy dog, and then it"


@dataclass(frozen=True)
class Row:
    """A request in one or several forms, sent one after the other to each side."""

    area: str
    """Heading in the documentation's table."""
    name: str
    """What is special about it; unique in its area and endpoint."""
    path: str
    fields: dict[str, Any]
    """The body, but for the defaults and ``stream``; ABSENT fields are left out of the defaults."""
    alone: str = ""
    """Why the router does not split it, as it says itself; empty for a request that is split."""
    by_router: bool = False
    """The router refuses it itself, in the engine's words."""
    scores_prompt: bool = False
    """It wants logprobs of the prompt, which end an engine with adapters on CPU: asked of the real
    model only, and refused by the router otherwise.
    """
    by_itself: bool = False
    """It must not be computed together with others, whose answers it would change in vLLM 0.32."""
    status: int = 200
    streamed_status: int | None = None
    """Where it differs."""
    forms: tuple[Form, ...] = BOTH

    @property
    def key(self) -> str:
        """Its name among all rows."""
        endpoint = "chat" if self.path == CHAT else "completions"
        return f"{self.area}, {endpoint}: {self.name}"

    def status_of(self, form: Form) -> int:
        """What the plain engine answers."""
        if form == "streamed" and self.streamed_status is not None:
            return self.streamed_status
        return self.status

    def body(self, form: Form) -> dict[str, Any]:
        """What is sent. No two rows have a prompt with the same first block."""
        body: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": ANSWER_TOKENS}
        opening = blake2b(self.key.encode(), digest_size=8).hexdigest()
        text = f"[{opening}] {SUBJECT}"
        if self.path == CHAT:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        body |= self.fields
        if form == "streamed" and "stream" not in body:
            body["stream"] = True
        return {name: value for name, value in body.items() if value is not ABSENT}


ABSENT = object()
"""A field that is not sent."""


def both(area: str, name: str, fields: dict[str, Any], **rest: Any) -> list[Row]:
    """The same fields for completions and for chats."""
    return [Row(area, name, path, fields, **rest) for path in (COMPLETIONS, CHAT)]

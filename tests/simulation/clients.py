"""What clients ask a router, and the legs that it makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.engine import Engine


@dataclass
class Client:
    """What a client asked and got."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    streaming: bool = True
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """What it was told instead of an answer."""
    outcome: str = ""
    """Empty while the request is under way."""
    asked_at: float = 0.0
    is_misfit: bool = False
    """The prefill node's tokenizer makes other tokens of its prompt."""
    can_continue: bool = False
    tenant: str = ""
    marks: tuple[bytes, int] = (b"", 0)
    """(digests, bytes) of its prompt."""
    failed_on: set[str] = field(default_factory=set)
    """Incarnations of decode engines whose leg broke."""

    def prompt_for(self, kind: str) -> tuple[int, ...]:
        """What the engine of that leg makes of it."""
        if self.is_misfit and kind == "prefill":
            return (self.prompt[0] + 1, *self.prompt[1:])
        return self.prompt


@dataclass
class Leg:
    """One request of the router to an engine."""

    request_id: str
    attempt: int
    kind: str
    node: str
    incarnation: str
    """Of the engine that the core has chosen."""
    engine: Engine | None = None
    is_closing: bool = False
    """The core has cancelled it; what had come just before is told all the same."""
    is_over: bool = False
    has_lost_bytes: bool = False
    """The connection was cut in the middle of an answer: nothing more comes on it."""
    has_data: bool = False
    heard_at: float = 0.0
    sent_before: tuple[int, ...] = ()
    """What the client had when the leg began."""

    @property
    def engine_id(self) -> str:
        """The request's name in the engine."""
        return f"{self.request_id}.{self.attempt}.{self.kind}"

"""How many tokens a request's prompt and answer had, as far as the router can tell without parsing
answers.

Exact are the figures of an engine's ``usage``, and the ids of a stream that could have been
continued (``sent_tokens``). Of other streams the events are counted: engines send one for each
token, as a rule.
"""

from __future__ import annotations

from typing import NamedTuple

from splitserve.orchestrator.observe.trace_context import (
    TraceContext,  # noqa: TC001 (msgspec resolves it)
)

_PROMPT = b'"prompt_tokens":'
_ANSWER = b'"completion_tokens":'
_INPUT = b'"input_tokens":'
_OUTPUT = b'"output_tokens":'
_EVENT_END = b"\n\n"
_DIGITS = b"0123456789"


class TokenCounts(NamedTuple):
    """What is known; None for what is not."""

    prompt: int | None = None
    answer: int | None = None


UNKNOWN_COUNTS = TokenCounts()


class Tally(NamedTuple):
    """What the shell knows of a request that has ended, beside its timeline."""

    client_request_id: str
    prompt_tokens: int | None = None
    """As an engine counted them; None when none has told."""
    output_tokens: int | None = None
    """Of the answer that the client was sent; None without an answer."""
    output_limit_tokens: int | None = None
    """What the client allowed."""
    trace: TraceContext | None = None
    """Its place in a trace, where traces are made."""

    @property
    def is_traced(self) -> bool:
        """Whether spans are made of it."""
        return self.trace is not None and self.trace.is_sampled


class AnswerCounter:
    """Counts the tokens of one answer from the bytes that pass."""

    __slots__ = ("_before", "_events", "_last")

    def __init__(self) -> None:
        self._events = 0
        self._before = b""
        self._last = b""

    def feed(self, data: bytes) -> None:
        """The next bytes of a stream, or a whole answer."""
        if data:
            self._events += data.count(_EVENT_END)
            self._before, self._last = self._last, data

    def counts(self, *, is_stream: bool, other_events: int) -> TokenCounts:
        """What is known at the end; ``other_events`` of a stream carry no token."""
        # The figures come last, maybe before a last event of their own
        found = usage_in(self._before[-_TAIL_BYTES:] + self._last)
        if found.answer is not None or not is_stream or not self._events:
            return found
        return TokenCounts(found.prompt, max(0, self._events - other_events))


_TAIL_BYTES = 2048


def usage_in(answer: bytes) -> TokenCounts:
    """The last figures in an engine's answer. In JSON they cannot be part of a text, whose quotes
    are escaped.
    """
    counts = TokenCounts(_figure(answer, _PROMPT), _figure(answer, _ANSWER))
    if counts.answer is None:
        return TokenCounts(_figure(answer, _INPUT), _figure(answer, _OUTPUT))
    return counts


def _figure(answer: bytes, name: bytes) -> int | None:
    at = answer.rfind(name) + len(name)
    if at < len(name):
        return None
    end = at
    while end < len(answer) and answer[end] in _DIGITS:
        end += 1
    return int(answer[at:end]) if 0 < end - at < 12 else None

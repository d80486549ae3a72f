"""The count of cached tokens in the ``usage`` of a split request
(``prompt_tokens_details.cached_tokens`` and its like).

A decode engine counts all of a prompt that it was sent as cached. What nobody had to compute is the
prefill engine's to know: its figure is put in the place of the other one. When it is not known (the
prefill engine has not answered yet or does not tell), the figure is null, as in an engine that does
not count.

Only these bytes are looked for: in JSON they cannot be part of a text, whose quotes are escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from splitserve.orchestrator.router.endpoints import MESSAGES, RESPONSES

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENDS = b",}"
UNKNOWN = b"null"
LINE_LIMIT_BYTES = 64 * 1024
"""Most of an unfinished line of a stream that is held back; no count of tokens is so long."""
RESPONSE_LINE_LIMIT_BYTES = 16 * 2**20
"""The same where the line with the count brings the whole answer once more."""


class CachedFigure(Protocol):
    """How one endpoint's answers say how much of the prompt was cached."""

    def read(self, answer: bytes) -> bytes:
        """The last such figure in a prefill engine's answer, as it wrote it, or ``UNKNOWN``."""

    def written(self, data: bytes, cached: bytes) -> bytes:
        """The last such figure in ``data``, whole lines or a whole body, is ``cached``."""


@dataclass(frozen=True)
class _Field:
    """A figure behind a name."""

    name: bytes
    unknown: bytes
    """What stands for a figure that is not known."""

    def read(self, answer: bytes) -> bytes:
        at = answer.rfind(self.name) + len(self.name)
        return UNKNOWN if at < len(self.name) else answer[at : _end(answer, at)]

    def written(self, data: bytes, cached: bytes) -> bytes:
        at = data.rfind(self.name) + len(self.name)
        if at < len(self.name):
            return data
        cached = self.unknown if cached == UNKNOWN else cached
        return data[:at] + cached + data[_end(data, at) :]


class _ReadInput:
    """Anthropic's: what was cached (``cache_read_input_tokens``) is not part of ``input_tokens``;
    where it is not known it is left out.
    """

    _usage: Final = re.compile(
        rb'"usage":\{"input_tokens":(\d+),"output_tokens":(\d+)(?:,"cache_creation_input_tokens":'
        rb'(\d+))?,"cache_read_input_tokens":(\d+)'
    )

    def read(self, answer: bytes) -> bytes:
        found = self._last(answer)
        return UNKNOWN if found is None else found[4]

    def written(self, data: bytes, cached: bytes) -> bytes:
        found = self._last(data)
        if found is None:
            return data
        prompt = int(found[1]) + int(found[3] or 0) + int(found[4])
        usage = b'"usage":{"input_tokens":%d,"output_tokens":%b' % (prompt, found[2])
        if cached != UNKNOWN:
            read = min(int(cached), prompt)
            usage = b'"usage":{"input_tokens":%d,"output_tokens":%b,"cache_read_input_tokens":%d'
            usage = usage % (prompt - read, found[2], read)
        return data[: found.start()] + usage + data[found.end() :]

    def _last(self, data: bytes) -> re.Match[bytes] | None:
        at = data.rfind(b'"usage":{"input_tokens":')
        return self._usage.match(data, at) if at >= 0 else None


_PROMPT_DETAILS: Final = _Field(b'"prompt_tokens_details":{"cached_tokens":', UNKNOWN)
_OTHERS: Final[Mapping[str, CachedFigure]] = {
    RESPONSES: _Field(b'"input_tokens_details":{"cached_tokens":', b"0"),
    MESSAGES: _ReadInput(),
}


def figure_of(endpoint: str) -> CachedFigure:
    """How answers of that endpoint say it."""
    return _OTHERS.get(endpoint, _PROMPT_DETAILS)


def _end(data: bytes, at: int) -> int:
    """Where the figure at this place ends."""
    while at < len(data) and data[at] not in _ENDS:
        at += 1
    return at


class WholeLines:
    """Cuts a stream into pieces that end where a line does."""

    __slots__ = ("_limit_bytes", "_rest")

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._rest = b""
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> bytes:
        """What is complete by now."""
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > self._limit_bytes:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What is left at the stream's end, once."""
        rest, self._rest = self._rest, b""
        return rest

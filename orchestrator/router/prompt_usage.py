"""The count of cached tokens in the ``usage`` of a split request: ``prompt_tokens_details`` and its
like at the other endpoints.

A decode engine counts all of a prompt that it was sent as cached, and nothing as put into its
cache. What nobody had to compute is the prefill engine's to know: its figures are put in the place
of the others. An answer that is complete before the prefill engine's is held back for it, at most
``WAIT_LIMIT_S``. When the figures are not known by then, or the prefill engine does not tell, they
are null, as in an engine that does not count.

Only these bytes are looked for: in JSON they cannot be part of a text, whose quotes are escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from splitserve.orchestrator.router.endpoints import MESSAGES, RESPONSES

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENDS = b",}"
WAIT_LIMIT_S = 5.0
"""Longest that the end of an answer waits for the prefill engine's figures."""
LINE_LIMIT_BYTES = 64 * 1024
"""Most of an unfinished line of a stream that is held back; no count of tokens is so long."""
RESPONSE_LINE_LIMIT_BYTES = 16 * 2**20
"""The same where the line with the count brings the whole answer once more."""


class Cached(NamedTuple):
    """An engine's figures, as it wrote them."""

    cached: bytes
    created: bytes


UNKNOWN = Cached(b"null", b"null")


class CachedFigures(Protocol):
    """How the answers of one endpoint tell these figures."""

    def are_in(self, data: bytes) -> bool:
        """Whether there are such figures in these bytes."""

    def read(self, answer: bytes) -> Cached:
        """The last such figures in a prefill engine's answer, or ``UNKNOWN``."""

    def written(self, data: bytes, figures: Cached) -> bytes:
        """The last such figures in ``data``, whole lines or a whole body, are those."""


@dataclass(frozen=True)
class _Details:
    """Figures of their own behind a name."""

    name: bytes
    created: bytes
    """Name of the second one, if it follows at once."""
    unknown: bytes
    """What stands for a figure that is not known."""

    def are_in(self, data: bytes) -> bool:
        return self.name in data

    def read(self, answer: bytes) -> Cached:
        at = answer.rfind(self.name) + len(self.name)
        if at < len(self.name):
            return UNKNOWN
        end = _end(answer, at)
        created = UNKNOWN.created
        if answer.startswith(self.created, end):
            begin = end + len(self.created)
            created = answer[begin : _end(answer, begin)]
        return Cached(answer[at:end], created)

    def written(self, data: bytes, figures: Cached) -> bytes:
        at = data.rfind(self.name) + len(self.name)
        if at < len(self.name):
            return data
        end = _end(data, at)
        told = self._or_unknown(figures.cached)
        if data.startswith(self.created, end):
            told += self.created + self._or_unknown(figures.created)
            end = _end(data, end + len(self.created))
        return data[:at] + told + data[end:]

    def _or_unknown(self, figure: bytes) -> bytes:
        return self.unknown if figure == b"null" else figure


class _InputTokens:
    """Anthropic's: what was cached or created is not part of ``input_tokens``; figures that are not
    known are left out, and then it is.
    """

    _start: Final = b'"usage":{"input_tokens":'
    _usage: Final = re.compile(
        rb'"usage":\{"input_tokens":(\d+),"output_tokens":(\d+)'
        rb'(?:,"cache_creation_input_tokens":(\d+))?(?:,"cache_read_input_tokens":(\d+))?'
    )

    def are_in(self, data: bytes) -> bool:
        return self._last(data) is not None

    def read(self, answer: bytes) -> Cached:
        found = self._last(answer)
        return UNKNOWN if found is None else Cached(found[4] or b"null", found[3] or b"null")

    def written(self, data: bytes, figures: Cached) -> bytes:
        found = self._last(data)
        if found is None:
            return data
        tokens = sum(int(found[place] or 0) for place in (1, 3, 4))
        others = b""
        for figure, name in ((figures.created, b"creation"), (figures.cached, b"read")):
            if figure != b"null":
                tokens -= int(figure)
                others += b',"cache_%b_input_tokens":%b' % (name, figure)
        told = b'%b%d,"output_tokens":%b%b' % (self._start, max(0, tokens), found[2], others)
        return data[: found.start()] + told + data[found.end() :]

    def _last(self, data: bytes) -> re.Match[bytes] | None:
        """The last usage that tells them."""
        at = data.rfind(self._start)
        found = self._usage.match(data, at) if at >= 0 else None
        return found if found is not None and (found[3] or found[4]) else None


_PROMPT_DETAILS: Final = _Details(
    b'"prompt_tokens_details":{"cached_tokens":', b',"created_cache_tokens":', b"null"
)
_OTHERS: Final[Mapping[str, CachedFigures]] = {
    RESPONSES: _Details(
        b'"input_tokens_details":{"cached_tokens":', b',"cache_write_tokens":', b"0"
    ),
    MESSAGES: _InputTokens(),
}


def figures_of(endpoint: str) -> CachedFigures:
    """How answers of that endpoint tell them."""
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

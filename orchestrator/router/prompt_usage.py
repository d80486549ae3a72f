"""``usage.prompt_tokens_details.cached_tokens`` of a split request.

A decode engine counts all of a prompt that it was sent as cached. What nobody had to compute is the
prefill engine's to know: its figure is put in the place of the other one. When it is not known (the
prefill engine has not answered yet or does not tell), the figure is null, as in an engine that does
not count.

Only these bytes are looked for: in JSON they cannot be part of a text, whose quotes are escaped.
"""

from __future__ import annotations

_FIELD = b'"prompt_tokens_details":{"cached_tokens":'
_ENDS = b",}"
UNKNOWN = b"null"
LINE_LIMIT_BYTES = 64 * 1024
"""Most of an unfinished line of a stream that is held back; no count of tokens is so long."""


def cached_in(answer: bytes) -> bytes:
    """The last such figure in a prefill engine's answer, as it wrote it."""
    at = answer.rfind(_FIELD) + len(_FIELD)
    return UNKNOWN if at < len(_FIELD) else answer[at : _end(answer, at)]


def with_cached(data: bytes, cached: bytes) -> bytes:
    """The last such figure in ``data``, whole lines or a whole body, is ``cached``."""
    at = data.rfind(_FIELD) + len(_FIELD)
    return data if at < len(_FIELD) else data[:at] + cached + data[_end(data, at) :]


def _end(data: bytes, at: int) -> int:
    """Where the figure at this place ends."""
    while at < len(data) and data[at] not in _ENDS:
        at += 1
    return at


class WholeLines:
    """Cuts a stream into pieces that end where a line does."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """What is complete by now."""
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > LINE_LIMIT_BYTES:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What is left at the stream's end, once."""
        rest, self._rest = self._rest, b""
        return rest

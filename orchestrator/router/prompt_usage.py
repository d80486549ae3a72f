"""``usage.prompt_tokens_details`` of a split request.

A decode engine counts all of a prompt that it was sent as cached, and nothing as put into its
cache. What nobody had to compute is the prefill engine's to know: its figures are put in the place
of the others. An answer that is complete before the prefill engine's is held back for it, at most
``WAIT_LIMIT_S``. When the figures are not known by then, or the prefill engine does not tell, they
are null, as in an engine that does not count.

Only these bytes are looked for: in JSON they cannot be part of a text, whose quotes are escaped.
"""

from __future__ import annotations

from typing import NamedTuple

_FIELD = b'"prompt_tokens_details":{"cached_tokens":'
_CREATED = b',"created_cache_tokens":'
_ENDS = b",}"
WAIT_LIMIT_S = 1.0
"""Longest that the end of an answer waits for the prefill engine's figures."""
LINE_LIMIT_BYTES = 64 * 1024
"""Most of an unfinished line of a stream that is held back; no count of tokens is so long."""


class Cached(NamedTuple):
    """An engine's figures, as it wrote them."""

    cached: bytes
    created: bytes


UNKNOWN = Cached(b"null", b"null")


def has_cached(data: bytes) -> bool:
    """Whether there are such figures in these bytes."""
    return _FIELD in data


def cached_in(answer: bytes) -> Cached:
    """The last such figures in a prefill engine's answer."""
    at = answer.rfind(_FIELD) + len(_FIELD)
    if at < len(_FIELD):
        return UNKNOWN
    end = _end(answer, at)
    created = UNKNOWN.created
    if answer.startswith(_CREATED, end):
        begin = end + len(_CREATED)
        created = answer[begin : _end(answer, begin)]
    return Cached(answer[at:end], created)


def with_cached(data: bytes, figures: Cached) -> bytes:
    """The last such figures in ``data``, whole lines or a whole body, are those."""
    at = data.rfind(_FIELD) + len(_FIELD)
    if at < len(_FIELD):
        return data
    end = _end(data, at)
    told = figures.cached
    if data.startswith(_CREATED, end):
        told += _CREATED + figures.created
        end = _end(data, end + len(_CREATED))
    return data[:at] + told + data[end:]


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

"""What a stream has sent, in token ids, so that another engine can go on behind it.

The engine is asked for the ids (``return_token_ids``); they are cut out of its events, which then
are, byte for byte, what it would have sent unasked: vLLM writes ``"token_ids":null`` in every chunk
when it was not asked. The ids are kept as the engine wrote them and never parsed.

Events of an engine that goes on are rewritten to be the same answer's: id and time of the first
engine, no second role, counts of tokens over all engines.

Only whole events are passed on, so what the ids say and what the client has are always the same. A
stream that does not begin with the prompt's ids is passed on as it comes and cannot be continued.
"""

from __future__ import annotations

from typing import Any

import orjson

_IDS = b'"token_ids":['
_PROMPT_IDS = b'"prompt_token_ids":['
_FINISHED = b'"finish_reason":"'
_ERROR = b'data: {"error"'
_DONE = b"[DONE]"
_DONE_EVENT = b"data: [DONE]\n\n"
_IDENTITY = frozenset({"id", "object", "created", "model"})
EVENT_LIMIT_BYTES = 16 * 2**20
"""Most of one event that is waited for; the first one holds the prompt's ids."""


class BrokenStreamError(Exception):
    """The engine's stream cannot be passed on any further; the message says why."""


class SentTokens:
    """One client's stream over all its engines."""

    __slots__ = (
        "_before",
        "_first",
        "_has_sent_usage",
        "_has_usage",
        "_ids",
        "_is_later",
        "_prompt",
        "_rest",
        "is_complete",
        "is_finished",
        "is_followed",
        "sent",
    )

    def __init__(self, *, has_usage: bool) -> None:
        self.sent = 0
        """Tokens whose events were passed on."""
        self.is_finished = False
        """The event with the finish reason was passed on."""
        self.is_followed = True
        """The engine sends its ids; if not, only its bytes are known."""
        self.is_complete = False
        """The stream's last event was passed on."""
        self._has_usage = has_usage
        """The client has asked for the count of tokens."""
        self._has_sent_usage = False
        self._prompt = b""
        self._ids: list[bytes] = []
        self._rest = b""
        self._first: dict[str, Any] | None = None
        """The first event, from which later engines' events take their identity."""
        self._is_later = False
        """The present engine goes on behind another one."""
        self._before = 0
        """Tokens that engines before the present one have sent."""

    @property
    def can_continue(self) -> bool:
        """Whether enough is known to go on."""
        return self.is_followed and bool(self._prompt)

    @property
    def prompt_tokens(self) -> int:
        """Length of the client's prompt."""
        return self._prompt.count(b",") + 1

    def ids(self) -> bytes:
        """Prompt and answer so far, as a JSON array."""
        return b"[" + b",".join((self._prompt, *self._ids)) + b"]"

    def begin_anew(self) -> None:
        """Another engine goes on: what was not passed on is forgotten."""
        self._rest = b""
        self._is_later, self._before = True, self.sent

    def feed(self, data: bytes) -> bytes:
        """What of the engine's bytes goes to the client; the first call brings a whole event.

        Raises ``BrokenStreamError``.
        """
        if self._first is None and self.is_followed:
            self._note_first(data)
        if not self.is_followed:
            return data
        if self._rest:
            data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        self._rest = data[end:] if end > 1 else data
        if end == 1:
            if len(data) > EVENT_LIMIT_BYTES:
                raise BrokenStreamError("an event of its stream is too long")
            return b""
        events = data[:end]
        if events.startswith(_ERROR) or b"\n\n" + _ERROR in events:
            at = events.index(_ERROR) + len(b"data: ")
            raise BrokenStreamError(f"it sent an error: {events[at : at + 500]!r}")
        try:
            passed = self._rewritten(events) if self._is_later else self._without_ids(events)
        except ValueError as error:
            raise BrokenStreamError(f"its stream cannot be read: {error}") from error
        self.is_complete = events.endswith(_DONE_EVENT)
        return passed

    def tail(self) -> bytes:
        """The rest of a finished answer whose engine has failed after its last token."""
        events = b""
        if self._has_usage and not self._has_sent_usage and self._first is not None:
            prompt = self.prompt_tokens
            usage = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + self.sent,
                "completion_tokens": self.sent,
            }
            head = {k: v for k, v in self._first.items() if k in _IDENTITY}
            events = b"data: " + orjson.dumps(head | {"choices": [], "usage": usage}) + b"\n\n"
        return events + _DONE_EVENT

    # -- the first engine's events -------------------------------------------------------------

    def _without_ids(self, events: bytes) -> bytes:
        if not self._prompt:
            events, self._prompt = _cut(events, _PROMPT_IDS, 0)[:2]
        at = 0
        while True:
            events, ids, at = _cut(events, _IDS, at)
            if not at:
                break
            self._note(ids)
        self.is_finished = self.is_finished or _FINISHED in events
        if self.is_finished and self._has_usage:
            self._has_sent_usage = self._has_sent_usage or b'"choices":[]' in events
        return events

    def _note_first(self, data: bytes) -> None:
        start = data.find(b"data:") + len(b"data:")
        end = data.find(b"\n\n", start)
        self.is_followed = end >= 0 and data.find(_PROMPT_IDS, start, end) >= 0
        if not self.is_followed:
            return
        try:
            self._first = orjson.loads(data[start:end])
        except orjson.JSONDecodeError:
            self.is_followed = False
        else:
            self.is_followed = isinstance(self._first, dict) and self._first.keys() >= _IDENTITY

    def _note(self, ids: bytes) -> None:
        if ids:
            self._ids.append(ids)
            self.sent += ids.count(b",") + 1

    # -- a later engine's events ---------------------------------------------------------------

    def _rewritten(self, events: bytes) -> bytes:
        """Raises ``ValueError``; then no token of these events counts as sent."""
        passed = []
        for chunk in [_chunk_of(event) for event in events.split(b"\n\n")[:-1]]:
            if isinstance(chunk, bytes):
                passed.append(chunk + b"\n\n")
            elif (shown := self._continued(chunk)) is not None:
                passed.append(b"data: " + orjson.dumps(shown) + b"\n\n")
        return b"".join(passed)

    def _continued(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk as the first engine's, None when the client has had it."""
        assert self._first is not None
        chunk |= {"id": self._first["id"], "created": self._first["created"]}
        if "prompt_token_ids" in chunk:
            chunk["prompt_token_ids"] = None
        if isinstance(chunk.get("usage"), dict):
            self._count(chunk["usage"])
            self._has_sent_usage = self._has_sent_usage or not chunk["choices"]
        for choice in chunk["choices"]:
            if (choice.get("delta") or {}).get("role") and not choice.get("token_ids"):
                return None
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
            self._note(b",".join(b"%d" % token for token in choice.get("token_ids") or ()))
            if "token_ids" in choice:
                choice["token_ids"] = None
            self.is_finished = self.is_finished or choice.get("finish_reason") is not None
        return chunk

    def _count(self, usage: dict[str, Any]) -> None:
        """Count as one engine would: what was sent before is answer, not prompt."""
        usage["prompt_tokens"] -= self._before
        usage["completion_tokens"] += self._before
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])


def _chunk_of(event: bytes) -> dict[str, Any] | bytes:
    """The event's object; a comment or the stream's end as it came. Raises ``ValueError``."""
    text = event.removeprefix(b"data:").strip()
    if not event.startswith(b"data:") or text == _DONE:
        return event
    chunk = orjson.loads(text)
    if not (isinstance(chunk, dict) and isinstance(chunk.get("choices"), list)):
        raise ValueError(f"{text[:200]!r} is no chunk of an answer")
    return chunk


def _cut(events: bytes, key: bytes, start: int) -> tuple[bytes, bytes, int]:
    """(events with null for the array behind ``key``, the array's inside, place behind it); the
    place is 0 when there is none. Inside a JSON string the key's quotes would be escaped.
    """
    at = events.find(key, start)
    if at < 0:
        return events, b"", 0
    begin = at + len(key)
    end = events.index(b"]", begin)
    return events[: begin - 1] + b"null" + events[end + 1 :], events[begin:end], begin + 3

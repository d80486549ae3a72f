"""What counts as the same answer: status, content type, and every field of the body or of every
event of the stream.

Aside are names that are new in every answer (``id``, of tool calls too), times (``created``) and
``system_fingerprint``, which tells how an engine was started. Numbers that a model has computed
(logprobs) may differ by what the order of additions changes; an order is not promised for events of
different choices of one stream. A stream of vLLM that begins with an error has status 200; the
router gives it the error's own status, and that is what is expected of it here.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ABSOLUTE_TOLERANCE = 2e-3
RELATIVE_TOLERANCE = 1e-3
DONE = "[DONE]"
CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\]")
"""The time of day in the words of an engine's grammar library."""
EVENTS = "events: "
"""How differences in the number of events begin: engines send what is ready together as one."""


@dataclass(frozen=True)
class Reply:
    """One HTTP answer."""

    status: int
    content_type: str
    raw: bytes

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        return self.content_type.startswith("text/event-stream")

    @property
    def body(self) -> Any:
        """Its JSON."""
        return json.loads(self.raw)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The objects of a stream's events."""
        return [json.loads(event) for event in self.events if event != DONE]

    @property
    def events(self) -> list[str]:
        """The data of a stream's events, comments left out."""
        lines = (event.strip() for event in self.raw.decode().split("\n\n"))
        return [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]


def differences(found: Reply, right: Reply) -> list[str]:
    """One sentence for each difference; none when ``found`` is what it should be."""
    right = with_status(right)
    if found.status != right.status:
        return [f"status {found.status}, not {right.status}: {found.raw[:400]!r}"]
    if found.content_type != right.content_type:
        return [f"content type {found.content_type!r}, not {right.content_type!r}"]
    if found.is_stream:
        return [*broken_promises(found), *_stream_differences(found, right)]
    return list(_value_differences(found.body, right.body, ""))


def with_status(reply: Reply) -> Reply:
    """A stream that begins with an error, as an answer with the error's status."""
    if not reply.is_stream:
        return reply
    chunks = reply.chunks
    if not chunks or "error" not in chunks[0]:
        return reply
    return Reply(chunks[0]["error"]["code"], "application/json", json.dumps(chunks[0]).encode())


def broken_promises(stream: Reply) -> list[str]:
    """What every stream must keep, and this one does not: one end, one finish reason a choice, one
    id.
    """
    problems = []
    events = stream.events
    if events.count(DONE) != 1 or events[-1] != DONE:
        problems.append(f"{events.count(DONE)} times {DONE}, or something behind it")
    chunks = stream.chunks
    if any("error" in chunk for chunk in chunks):
        return [*problems, f"an error event: {chunks}"]
    reasons: dict[int, int] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ends = choice.get("finish_reason") is not None
            reasons[choice["index"]] = reasons.get(choice["index"], 0) + ends
    problems += [
        f"choice {index} has {count} finish reasons"
        for index, count in reasons.items()
        if count != 1
    ]
    if len({(chunk["id"], chunk["created"]) for chunk in chunks}) != 1:
        problems.append("its events have several ids or times")
    return problems


def texts(reply: Reply) -> dict[int, Any]:
    """By choice: everything that was said, whether streamed or not."""
    if reply.is_stream:
        merged = {index: _merged(parts) for index, parts in _by_choice(reply.chunks).items()}
        choices = [part["choices"][0] for index, part in merged.items() if index is not None]
    else:
        choices = reply.body["choices"]
    return {choice["index"]: _said(choice) for choice in choices}


def _said(choice: dict[str, Any]) -> Any:
    message = choice.get("message") or choice.get("delta") or {}
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return [choice.get("text") or message.get("content") or "", calls]


# -- values ----------------------------------------------------------------------------------------


def _value_differences(found: Any, right: Any, path: str) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(right, dict):
        for key in sorted({*found, *right}):
            at = f"{path}.{key}" if path else key
            if key not in found or key not in right:
                yield f"{at} is {'missing' if key in right else 'too much'}"
            elif key in ("created", "system_fingerprint"):
                if type(found[key]) is not type(right[key]):
                    yield f"{at} is {found[key]!r}, not like {right[key]!r}"
            elif key == "id":
                if _kind_of_id(found[key]) != _kind_of_id(right[key]):
                    yield f"{at} is {found[key]!r}, not like {right[key]!r}"
            else:
                yield from _value_differences(found[key], right[key], at)
    elif isinstance(found, list) and isinstance(right, list):
        if len(found) != len(right):
            yield f"{path} has {len(found)} items, not {len(right)}: {found!r}, not {right!r}"
        for number, (one, other) in enumerate(zip(found, right, strict=False)):
            yield from _value_differences(one, other, f"{path}[{number}]")
    elif not _are_equal(found, right):
        yield f"{path} is {found!r}, not {right!r}"


def _kind_of_id(value: Any) -> Any:
    """What engines begin such a name with; None stays None."""
    return value.split("-")[0] if isinstance(value, str) else value


def _are_equal(found: Any, right: Any) -> bool:
    if isinstance(found, float) and isinstance(right, float):
        return math.isclose(
            found, right, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE
        ) or (found != found and right != right)
    if isinstance(found, str) and isinstance(right, str):
        return CLOCK.sub("[]", found) == CLOCK.sub("[]", right)
    return type(found) is type(right) and bool(found == right)


# -- streams ---------------------------------------------------------------------------------------


def _stream_differences(found: Reply, right: Reply) -> Iterator[str]:
    ours, theirs = _by_choice(found.chunks), _by_choice(right.chunks)
    for index in sorted({*ours, *theirs}, key=str):
        name = "the usage" if index is None else f"choice {index}"
        one, other = ours.get(index, []), theirs.get(index, [])
        if len(one) == len(other):
            apart = [
                f"event {number} of {name}: {told}"
                for number, (chunk, expected) in enumerate(zip(one, other, strict=True))
                for told in _value_differences(chunk, expected, "")
            ]
            if apart and not list(_value_differences(_merged(one), _merged(other), "")):
                yield f"{EVENTS}{len(one)} of {name}, joined at other places"
            else:
                yield from apart
            continue
        yield f"{EVENTS}{len(one)} of {name}, not {len(other)}"
        if one and other:
            for told in _value_differences(_merged(one), _merged(other), ""):
                yield f"{name}, all events together: {told}"


def _by_choice(chunks: list[dict[str, Any]]) -> dict[int | None, list[dict[str, Any]]]:
    """A stream's events by the choice that each is about; None for those about none."""
    sorted_chunks: dict[int | None, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices") or [None]:
            index = None if choice is None else choice["index"]
            part = {**chunk, "choices": [] if choice is None else [choice]}
            sorted_chunks.setdefault(index, []).append(part)
    return sorted_chunks


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """All events of one choice as one: texts and lists joined, everything else as told last."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged = _joined(merged, part)
    return merged


def _joined(before: Any, after: Any, key: str = "") -> Any:
    if before is None or after is None:
        return before if after is None else after
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return {key: _joined(before.get(key), after.get(key), key) for key in keys}
    if key in ("choices", "tool_calls") and isinstance(before, list):
        return _joined_by_index(before, after)
    if isinstance(before, list) and isinstance(after, list):
        return before + after
    if key in ("text", "content", "arguments"):
        return before + after
    return after


def _joined_by_index(before: list[Any], after: list[Any]) -> list[Any]:
    by_index = {item["index"]: item for item in before}
    for item in after:
        by_index[item["index"]] = _joined(by_index.get(item["index"]), item)
    return list(by_index.values())

"""One request's timeline as a waterfall of bars: what ``splitserve trace`` shows.

The record is the router's (``router/request_records.py``): times in milliseconds after arrival,
None for what did not happen or is not known. Parts that a record does not name are made from the
times that it has.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.text import Text

from splitserve.orchestrator.cli.cache_tables import size
from splitserve.orchestrator.cli.figures import UNKNOWN, bar, count, duration, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

LABEL_WIDTH = 19
FIGURE_WIDTH = 20
LEAST_BAR_WIDTH = 16
LONG_DECODE = 2.0
"""A decode that takes so many times as long as all before it is cut off at the right edge, so that
the parts before it stay readable."""
CUT_MARK = "»"
_STYLES = {
    "queue": "yellow",
    "reserve": "yellow",
    "prefill": "blue",
    "transfer_exposed": "red",
    "first_step": "magenta",
    "decode": "green",
}
_WORDS = {"transfer_exposed": "exposed transfer", "first_step": "first step"}
_ALONE = "alone_"


@dataclass(frozen=True)
class Part:
    """A stretch of a request's time, in milliseconds after its arrival."""

    name: str
    begin: float
    end: float


def waterfall(record: dict[str, Any], width: int) -> Text:
    """All that is known of a request."""
    lines = [*_about(record), Text(), *_bars(record, width)]
    story = list(_transfer(record))
    if story:
        lines += [Text(), *story]
    return Text("\n").join(lines)


def parts_of(record: dict[str, Any]) -> list[Part]:
    """The parts in order, each beginning where the last one ended."""
    told = record.get("parts")
    if not told:
        return _guessed(record)
    parts = []
    at = 0.0
    for name, took in told.items():
        if took is not None:
            parts.append(Part(str(name), at, at + took))
            at += took
    return parts


def _guessed(record: dict[str, Any]) -> list[Part]:
    """From a record without parts."""
    sent, first, last = (
        record.get(key) for key in ("dispatched_ms", "first_data_ms", "last_data_ms")
    )
    parts = []
    if sent is not None:
        parts.append(Part("queue", 0.0, sent))
        if first is not None:
            parts.append(Part("until first data", sent, first))
    if first is not None and last is not None:
        parts.append(Part("decode", first, last))
    return parts


def _about(record: dict[str, Any]) -> Iterator[Text]:
    head = Text(printable(record.get("request_id", "")), "bold")
    own = record.get("id")
    if own and own != record.get("request_id"):
        head.append(f"  (the router's own id: {printable(own)})", "not bold dim")
    yield head
    outcome, status = record.get("outcome") or "?", record.get("status")
    verdict = Text(f"{printable(outcome)}, status {status}", "green" if outcome == "ok" else "red")
    if record.get("reason"):
        verdict.append(f": {printable(record['reason'])}")
    yield verdict
    kind = "streamed" if record.get("streaming") else "in one piece"
    words = [f"{printable(record.get('endpoint', '?'))}, {kind}, arrived {_arrival(record)}"]
    if record.get("tenant"):
        words.append(f"tenant {printable(record['tenant'])}")
    yield Text(", ".join(words))
    yield Text(_tokens(record))
    yield Text(_route(record))
    if record.get("traceparent"):
        yield Text(f"traceparent {printable(record['traceparent'])}")


def _arrival(record: dict[str, Any]) -> str:
    received = record.get("received_unix_s")
    if received is None:
        return "at an unknown time"
    moment = datetime.fromtimestamp(received, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} UTC"


def _tokens(record: dict[str, Any]) -> str:
    exact, about = record.get("prompt_tokens"), record.get("prompt_tokens_estimate")
    prompt = f"about {about}" if exact is None else str(exact)
    words = [f"prompt {prompt} tokens"]
    if record.get("expected_cached_tokens"):
        words.append(f"{record['expected_cached_tokens']} of them expected in a cache")
    output, limit = record.get("output_tokens"), record.get("output_limit_tokens")
    allowed = "" if limit is None else f" of at most {limit}"
    words.append(f"answer {UNKNOWN if output is None else output}{allowed} tokens")
    return ", ".join(words)


def _route(record: dict[str, Any]) -> str:
    decision = printable(record.get("decision") or "")
    prefill, decode = (
        printable(record.get(f"{role}_node") or "") for role in ("prefill", "decode")
    )
    if prefill:
        words = [f"{decision or 'split'}: {prefill} → {decode or UNKNOWN}"]
    elif decode:
        why = decision.removeprefix(_ALONE).replace("_", " ")
        words = [f"{decode} alone{f' ({why})' if why and why != decision else ''}"]
    else:
        words = ["sent to no node"]
    if (record.get("prefill_status") or 0) >= 400:
        words.append(f"the prefill leg was answered {record['prefill_status']}")
    if (attempts := record.get("attempts") or 0) > 1:
        words.append(f"{attempts} attempts")
    if continuations := record.get("continuations"):
        words.append(f"continued on another decode node {continuations}x")
    return ", ".join(words)


def _bars(record: dict[str, Any], width: int) -> Iterator[Text]:
    parts = parts_of(record)
    if not parts:
        yield Text("it ended before anything was sent to a node")
        return
    end = _edge(parts)
    room = max(LEAST_BAR_WIDTH, width - LABEL_WIDTH - FIGURE_WIDTH)
    yield Text(f"{'':{LABEL_WIDTH}}{'at':>10}{'took':>9} ", "dim").append(_scale(end, room))
    for part in parts:
        yield _line(part, end, room)
        if part.name == "prefill":
            yield from _layer_writes(record, end, room)
    if all(part.name != "prefill" for part in parts):
        yield from _layer_writes(record, end, room)
    yield from _marks(record, end, room)
    yield Text(f"{'total':{LABEL_WIDTH}}{'':10}{duration(parts[-1].end):>9}", "bold")


def _edge(parts: list[Part]) -> float:
    """Where the bars' right edge lies."""
    last = parts[-1]
    if last.name == "decode" and last.begin > 0 and last.end > (1 + LONG_DECODE) * last.begin:
        return last.begin * 1.25
    return max(part.end for part in parts)


def _line(part: Part, end: float, room: int) -> Text:
    line = Text(f"{_WORDS.get(part.name, printable(part.name)):{LABEL_WIDTH}.{LABEL_WIDTH}}")
    line.append(f"{duration(part.begin):>10}{duration(part.end - part.begin):>9} ")
    drawn = bar(part.begin / end, part.end / end, room).rstrip() if end else ""
    if part.end > end * (1 + 1e-9):
        drawn = drawn[:-1] + CUT_MARK.rjust(room - len(drawn) + 1, "█")
    return line.append(drawn, _STYLES.get(part.name, "cyan"))


def _layer_writes(record: dict[str, Any], end: float, room: int) -> Iterator[Text]:
    """When each group of layers was complete in the decode node's pages."""
    for write in record.get("layer_writes") or ():
        at = write.get("ms")
        if at is None:
            continue
        first, last = (write.get("layers") or ["?", "?"])[:2]
        line = Text(f"  layers {first}-{last}".ljust(LABEL_WIDTH)[:LABEL_WIDTH], "dim")
        line.append(f"{duration(at):>10}{size(write.get('bytes')):>9} ")
        yield line.append(_tick(at, end, room), "cyan")


_MARKS = {
    "redispatched_ms": "sent again",
    "reserved_ms": "reserved",
    "granted_ms": "granted",
    "delivered_ms": "delivered",
    "landed_ms": "landed",
    "prefill_answered_ms": "prefill answered",
    "first_data_ms": "first data",
}


def _marks(record: dict[str, Any], end: float, room: int) -> Iterator[Text]:
    """Moments, in their order."""
    moments = [(record[key], name) for key, name in _MARKS.items() if record.get(key) is not None]
    for at, name in sorted(moments, key=lambda moment: moment[0]):
        line = Text(f"{name:{LABEL_WIDTH}}{duration(at):>10}{'':9} ", "dim")
        yield line.append(_tick(at, end, room))


def _tick(at: float, end: float, room: int) -> str:
    """A mark at a moment."""
    place = int(at / end * room) if end else 0
    return CUT_MARK.rjust(room) if place > room else " " * min(place, room - 1) + "|"


def _scale(end: float, room: int) -> str:
    return f"0{duration(end):>{room - 1}}"


def _transfer(record: dict[str, Any]) -> Iterator[Text]:
    pages, sent = record.get("transfer_pages"), record.get("transfer_bytes")
    hidden, exposed = record.get("transfer_hidden_ms"), record.get("transfer_exposed_ms")
    if pages is None and sent is None and hidden is None and exposed is None:
        return
    line = Text(f"transfer: {UNKNOWN if pages is None else count(pages)} pages, {size(sent)}")
    if hidden is not None:
        line.append(f", {duration(hidden)} hidden behind the prefill")
    if exposed is not None:
        line.append(f", {duration(exposed)} exposed after it")
    yield line

"""What ``splitserve top`` shows: one frame from one answer of ``GET /internal/status``.

Rates and times to the first token come from the timelines that the router sends along, its latest
ones: a request counts when it ends. Nothing is kept between frames, so the first one says as much
as any other.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from splitserve.orchestrator.cli.cache_tables import size
from splitserve.orchestrator.cli.figures import (
    UNKNOWN,
    age,
    count,
    duration,
    fitted,
    gauge,
    percentile,
    printable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RATE_WINDOW_S = 10.0
"""Requests that ended so long ago at most make the rates."""
LEAST_WINDOW_S = 0.1
LATEST = 32
"""Timelines in a status of a router that has that many."""
LEAST_WIDTH = 60
NAME_WIDTH = 11
GAUGE_WIDTH = 9
INCIDENTS_SHOWN = 4
LEAST_REQUESTS_SHOWN = 3
PROBE = "probe"
_GOOD, _BAD, _DULL = "green", "bold red", "dim"


@dataclass(frozen=True)
class Cluster:
    """What the router does not know of itself."""

    name: str
    url: str
    phase: str
    started_unix_s: float


@dataclass(frozen=True)
class Size:
    """Of the terminal, in characters."""

    width: int
    height: int | None = None
    """None: as many lines as there are."""


def frame(cluster: Cluster, status: dict[str, Any], now_unix_s: float, size: Size) -> Text:
    """The whole frame, lines of at most ``size.width`` characters."""
    timelines = [t for t in status.get("timelines", ()) if t.get("endpoint") != PROBE]
    width = max(size.width, LEAST_WIDTH)
    lines = [
        _heading(cluster, status, now_unix_s, width),
        *_load(status, timelines, now_unix_s, width),
        Text(),
        *_nodes(status, width),
    ]
    news = [*_cache(status, width), *_autotune(status, width)]
    news += [*_troubles(status, width), *_incidents(status, width)]
    if news:
        lines += [Text(), *news]
    room = len(timelines)
    if size.height is not None:
        room = max(LEAST_REQUESTS_SHOWN, size.height - len(lines) - 2)
    lines += [Text(), *_requests(timelines[: -room - 1 : -1], now_unix_s, width)]
    return joined(lines if size.height is None else lines[: size.height], size.width)


def absence(cluster: Cluster, why: str, since_s: float, size: Size) -> Text:
    """A frame for as long as the router does not answer."""
    width = max(size.width, LEAST_WIDTH)
    told = f"the router does not answer (for {age(since_s)}); looking for it"
    lines = [
        Text(fitted(f"{printable(cluster.name)}  {cluster.url}/v1", width).rstrip(), "bold"),
        Text(told, _BAD),
        Text(printable(why), _DULL),
    ]
    return joined(lines, size.width)


def joined(lines: Sequence[Text], width: int) -> Text:
    """One text of these lines, cut at the terminal's edge."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for number, line in enumerate(lines):
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
        text.append_text(line)
        if number < len(lines) - 1:
            text.append("\n")
    return text


def ended_unix_s(timeline: dict[str, Any]) -> float:
    """When a request was over, as far as its timeline says."""
    received: float = timeline.get("received_unix_s") or 0.0
    moments = (timeline.get("last_data_ms"), timeline.get("first_data_ms"))
    return received + next((ms for ms in moments if ms is not None), 0.0) / 1000


def _heading(cluster: Cluster, status: dict[str, Any], now: float, width: int) -> Text:
    phase = "stopping" if status.get("is_stopping") else cluster.phase
    up = age(now - cluster.started_unix_s)
    left = f"{printable(cluster.name)}  {phase}  {cluster.url}/v1"
    return Text(fitted(left, width - len(up) - 3) + f"up {up}", "bold")


def _load(
    status: dict[str, Any], timelines: Sequence[dict[str, Any]], now: float, width: int
) -> Iterator[Text]:
    requests = status.get("requests", {})
    waiting, limit = requests.get("waiting", 0), requests.get("queue_limit_requests", 0)
    line = Text(f"requests     running {requests.get('running', 0)}, ")
    line.append(f"waiting {waiting} of {limit}", _BAD if limit and waiting >= limit else "")
    tenants = requests.get("waiting_by_tenant") or {}
    named = [f"{printable(name)} {held}" for name, held in tenants.items() if name and held]
    yield line.append(f" ({', '.join(named)})" if named else "")
    yield Text(f"in {RATE_WINDOW_S:.0f} s      {_rates(timelines, now)}")
    times = [
        timeline["first_data_ms"]
        for timeline in timelines
        if timeline.get("streaming") and timeline.get("first_data_ms") is not None
    ]
    shown = [
        f"{name} {duration(percentile(times, p))}" for name, p in (("p50", 0.5), ("p95", 0.95))
    ]
    shown.append(f"max {duration(max(times, default=None))}")
    yield Text(f"first token  {', '.join(shown)} (latest {len(times)} streams)")


def _rates(timelines: Sequence[dict[str, Any]], now: float) -> str:
    """Requests and known tokens per second. The latest timelines may not reach back for the whole
    window: then they are taken for as long as they do.
    """
    recent = [t for t in timelines if now - ended_unix_s(t) <= RATE_WINDOW_S]
    window = RATE_WINDOW_S
    if len(recent) == len(timelines) >= LATEST:
        window = max(LEAST_WINDOW_S, min(window, now - min(map(ended_unix_s, recent))))
    prompt, answer = (
        sum(t.get(key) or 0 for t in recent) / window for key in ("prompt_tokens", "output_tokens")
    )
    failed = sum(t.get("outcome") in ("error", "refused") for t in recent)
    said = f"{count(len(recent) / window)} requests/s, "
    said += f"{count(prompt)} prompt and {count(answer)} answer tokens/s"
    return said + (f", {failed} failed" if failed else "")


def _nodes(status: dict[str, Any], width: int) -> Iterator[Text]:
    gauge_width = GAUGE_WIDTH + max(0, min(width - 80, 20))
    head = f"{'node':{NAME_WIDTH}} {'role':8} {'state':12} {'legs':>5} {'run+wait':>8}  "
    yield Text(head + f"{'KV blocks used':{gauge_width + 11}} {'transfers':>9}", _DULL)
    nodes = status.get("nodes", {})
    for name in sorted(nodes, key=lambda name: (nodes[name].get("role") != "prefill", name)):
        yield _node(name, nodes[name], gauge_width)
    for name, progress in status.get("loading", {}).items():
        if name not in nodes:
            seconds = f"{progress.get('elapsed_s') or 0:.0f} s"
            yield _other_node(name, f"loading ({seconds}): {progress.get('stage', '')}")
    for name in status.get("returning", ()):
        if name not in nodes and name not in status.get("loading", {}):
            yield _other_node(name, "restarting")


def _node(name: str, node: dict[str, Any], gauge_width: int) -> Text:
    state, style = _state(node)
    line = Text(f"{fitted(printable(name), NAME_WIDTH)} {node.get('role', ''):8} ")
    line.append(fitted(state, 12), style)
    legs = (node.get("prefill_legs") or 0) + (node.get("decode_legs") or 0)
    load = UNKNOWN
    if node.get("running") is not None:
        load = f"{node['running']}+{node['waiting']}"
    line.append(f" {legs:>5} {load:>8}  ")
    total, free = node.get("total_blocks") or 0, node.get("free_blocks")
    if total and free is not None:
        share = min(max((total - free) / total, 0.0), 1.0)
        line.append(gauge(share, gauge_width), _BAD if share > 0.95 else _GOOD)
        line.append(f" {share:4.0%} {count(total):>5}")
    else:
        line.append(" " * (gauge_width + 11))
    transfers = node.get("open_transfers")
    return line.append(f" {UNKNOWN if transfers is None else transfers:>9}")


def _state(node: dict[str, Any]) -> tuple[str, str]:
    """A node's state in a word, and how to show it."""
    opened = [
        leg
        for leg, breaker in (node.get("breakers") or {}).items()
        if breaker.get("state") not in (None, "closed")
    ]
    for is_so, word, style in (
        (not node.get("is_connected", True), "disconnected", _BAD),
        (node.get("is_silent"), "silent", _BAD),
        (node.get("is_draining"), "draining", "yellow"),
        (opened, "breaker open", _BAD),
        (node.get("is_flipping"), "flipping", "yellow"),
        (node.get("is_usable"), "ready", _GOOD),
    ):
        if is_so:
            return word, style
    return printable(node.get("phase", "?")), "yellow"


def _other_node(name: str, what: str) -> Text:
    return Text(f"{fitted(printable(name), NAME_WIDTH)} ").append(printable(what), "yellow")


def _cache(status: dict[str, Any], width: int) -> Iterator[Text]:
    told = status.get("cache")
    if not told:
        return
    if told.get("trouble"):
        yield Text(fitted(f"cache        {printable(told['trouble'])}", width), _BAD)
        return
    words = []
    for tier in told.get("tiers") or ():
        capacity = tier.get("capacity_bytes")
        used = tier.get("used_bytes") or 0
        full = f"{used / capacity:.0%} full" if capacity else size(used)
        hits, misses = tier.get("hits") or 0, tier.get("misses") or 0
        hit = f", {hits / (hits + misses):.0%} of {hits + misses} hit" if hits + misses else ""
        words.append(f"{printable(tier.get('name', '?'))} {full}{hit}")
    yield Text(fitted(f"cache        {'; '.join(words)}", width))


def _autotune(status: dict[str, Any], width: int) -> Iterator[Text]:
    told = status.get("autotune")
    if told:
        latest: dict[str, Any] = next(iter(told.get("decisions") or ()), {})
        why = latest.get("why") or "has decided nothing yet"
        advises = "advises: " if latest.get("node") and told.get("mode") == "advise" else ""
        yield Text(fitted(f"autotune     {told.get('mode')}; {advises}{printable(why)}", width))


def _troubles(status: dict[str, Any], width: int) -> Iterator[Text]:
    """What keeps nodes from taking part, and blocks from being used."""
    for name, why in status.get("refused", {}).items():
        yield Text(fitted(f"refused      {printable(name)}: {printable(why)}", width), _BAD)
    for name, node in status.get("nodes", {}).items():
        if transfers := node.get("quarantined_transfers"):
            blocks = node.get("quarantined_blocks") or 0
            held = f"{blocks} blocks of {transfers} transfers wait for a fence"
            yield Text(fitted(f"quarantine   {printable(name)}: {held}", width), _BAD)
    if status.get("incidents"):
        return  # Deaths are among them
    for name, death in status.get("last_death", {}).items():
        why = printable(death.get("likely_cause") or f"exit status {death.get('exit_status')}")
        yield Text(fitted(f"last death   {printable(name)}: {why}", width), _DULL)


def _incidents(status: dict[str, Any], width: int) -> Iterator[Text]:
    """The latest first."""
    incidents = [item for item in status.get("incidents") or () if isinstance(item, dict)]
    for item in incidents[: -INCIDENTS_SHOWN - 1 : -1]:
        yield Text(fitted(f"incident     {_incident(item)}", width), "yellow")


def _incident(item: dict[str, Any]) -> str:
    """When it happened last, what, where and how often."""
    at = item.get("at_unix_s")
    words = [clock(at)] if isinstance(at, int | float) else []
    words.append(str(item.get("kind", "")).replace("_", " "))
    words += [str(item["node"])] if item.get("node") else []
    often = f" ({item['count']}x)" if (item.get("count") or 1) > 1 else ""
    return printable(f"{' '.join(words)}: {item.get('text', '')}{often}")


def clock(unix_s: float) -> str:
    """The time of day, UTC as in the logs: ``04:11:02``."""
    seconds = int(unix_s) % 86400
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _requests(timelines: Sequence[dict[str, Any]], now: float, width: int) -> Iterator[Text]:
    id_width = 18 + max(0, min(width - 80, 20))
    where_width = 19 + max(0, min(width - 100, 10))
    head = f"{'age':4} {'latest requests':{id_width}} {'on':{where_width}} "
    yield Text(head + f"{'ttft':>7} {'total':>7} {'tokens':>8} outcome", _DULL)
    for timeline in timelines:
        line = Text(f"{age(now - ended_unix_s(timeline)):>4} ")
        line.append(fitted(printable(timeline.get("request_id", "")), id_width), "cyan")
        line.append(f" {fitted(_where(timeline), where_width)}")
        line.append(f" {duration(timeline.get('first_data_ms')):>7}")
        line.append(f" {duration(timeline.get('last_data_ms')):>7}")
        tokens = f"{_tokens(timeline)}+{count(timeline.get('output_tokens'))}"
        line.append(f" {tokens:>8} ")
        yield line.append(*_outcome(timeline))


def _where(timeline: dict[str, Any]) -> str:
    prefill, decode = timeline.get("prefill_node"), timeline.get("decode_node")
    return printable(f"{prefill}→{decode}" if prefill else decode or UNKNOWN)


def _tokens(timeline: dict[str, Any]) -> str:
    exact = timeline.get("prompt_tokens")
    return count(timeline.get("prompt_tokens_estimate") if exact is None else exact)


def _outcome(timeline: dict[str, Any]) -> tuple[str, str]:
    outcome = printable(timeline.get("outcome", ""))
    if outcome == "ok":
        return outcome, _GOOD
    style = _BAD if outcome == "error" else "yellow"
    return f"{timeline.get('status') or ''} {outcome}".strip(), style

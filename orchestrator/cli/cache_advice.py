"""``splitserve cache advise``: what a cache of each size would save, before memory is bought."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from splitserve.kv_transfer.cache import advice
from splitserve.kv_transfer.cache.eviction import POLICIES
from splitserve.kv_transfer.cache.truncation import Truncated, find_truncated
from splitserve.orchestrator.cli.advice_picture import Curve, svg
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.config.fields import parse_bytes
from splitserve.orchestrator.models.errors import ModelError
from splitserve.orchestrator.models.kv_size import kv_bytes_per_token
from splitserve.orchestrator.models.resolve import resolve_model
from splitserve.orchestrator.traces import TraceError, TraceRequest, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = 12
SMALLEST_SHARE = 512
"""The smallest size shown is this part of what a cache without bound would hold."""
BAR_CELLS = 20
EXAMPLES = 3
USERS_FACTOR_LIMIT = 16


@dataclass(frozen=True)
class Point:
    """One size of cache."""

    saving: advice.Saving
    crowded: advice.Saving | None
    """With more users."""


@dataclass(frozen=True)
class TierAdvice:
    """What one tier adds to those above it; a larger tier holds what a smaller one does."""

    name: str
    saving: advice.Saving
    """Of this tier and those above it."""
    adds_share: float
    """Of prefill, 0 to 1."""
    doubled_adds_share: float
    """What twice this tier's size would add to that."""


@dataclass(frozen=True)
class Findings:
    """Everything that is told about a trace."""

    trace: str
    requests: int
    policy: str
    chunk_tokens: int
    bytes_per_token: int | None
    users_factor: int
    ceiling: advice.Saving
    points: tuple[Point, ...]
    tiers: tuple[TierAdvice, ...]
    blocks: int
    truncated: tuple[Truncated, ...] | None
    """None when the trace cannot tell."""

    def size_text(self, chunks: float) -> str:
        """A size in bytes, or in tokens when their size is not known."""
        tokens = chunks * self.chunk_tokens
        if self.bytes_per_token is None:
            return f"{_scaled(tokens)} tokens"
        return f"{_scaled(tokens * self.bytes_per_token)}B"


@click.command()
@click.option(
    "--trace",
    "path",
    required=True,
    type=click.Path(path_type=Path),
    help="Recorded requests: Mooncake's JSON lines, also packed (.gz).",
)
@click.option(
    "--block-tokens",
    default=512,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens of a block in the trace; chunks are taken to be as large.",
)
@click.option(
    "--bytes-per-token", type=click.IntRange(min=1), help="KV of one token in all layers."
)
@click.option("--model", "model_spec", help="Model (folder or prepared) whose KV is stored.")
@click.option(
    "--tier", "tiers", multiple=True, metavar="NAME=SIZE", help="A tier, such as cpu=64GB."
)
@click.option("--policy", default="s3fifo", show_default=True, type=click.Choice(sorted(POLICIES)))
@click.option(
    "--users-factor",
    default=1,
    show_default=True,
    type=click.IntRange(1, USERS_FACTOR_LIMIT),
    help="Also show as many times the users, who share nothing with each other.",
)
@click.option(
    "--picture", type=click.Path(path_type=Path), help="Write the curve to this file (.svg)."
)
@click.option(
    "--truncated-blocks",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Blocks in a row that a prompt has to repeat to count as cut off at its beginning.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def advise(
    path: Path,
    block_tokens: int,
    bytes_per_token: int | None,
    model_spec: str | None,
    tiers: tuple[str, ...],
    policy: str,
    users_factor: int,
    picture: Path | None,
    truncated_blocks: int,
    as_json: bool,
) -> None:
    """Show what a cache would save for recorded requests, by its size.

    The requests are replayed, in their order, against the cache's own index. A prompt's last
    partial block is not stored. The hit rate at a size falls as users grow: --users-factor shows
    how far.

    \b
    Prompts whose beginning was cut off (a chat that drops its oldest turns)
    cannot hit. They are reported when the trace has "content_ids": beside
    the chained hash_ids one number per block that stands for the block's
    content alone. Cuts of whole blocks are seen.
    """
    if picture is not None and picture.suffix != ".svg":
        raise RefusedError(f"--picture {picture}: the picture is an SVG; name a file.svg")
    if model_spec is not None and bytes_per_token is not None:
        raise RefusedError("give --model or --bytes-per-token, not both")
    if model_spec is not None:
        bytes_per_token = _bytes_per_token(model_spec)
    chunk_bytes = None if bytes_per_token is None else bytes_per_token * block_tokens
    sizes = {}
    for text in tiers:
        name, chunks = _tier(text, chunk_bytes)
        sizes[name] = chunks
    try:
        requests = list(read_trace(path, block_tokens))
    except TraceError as error:
        raise RefusedError(str(error)) from error
    prompts = _prompts(requests, block_tokens)
    ceiling = advice.ceiling(prompts, block_tokens)
    replays = _Replays(prompts, policy, block_tokens)
    points = _points(replays, ceiling, users_factor)
    contents = [request.content for request in requests]
    findings = Findings(
        trace=path.name,
        requests=len(requests),
        policy=policy,
        chunk_tokens=block_tokens,
        bytes_per_token=bytes_per_token,
        users_factor=users_factor,
        ceiling=ceiling,
        points=tuple(points),
        tiers=tuple(_tier_advice(sizes, replays)),
        blocks=sum(len(request.blocks) for request in requests),
        truncated=tuple(find_truncated(contents, truncated_blocks)) if any(contents) else None,
    )
    if picture is not None:
        picture.write_text(_picture(findings), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(_as_json(findings), indent=1))
    else:
        _show(findings, picture)


# What goes in


def _bytes_per_token(spec: str) -> int:
    try:
        folder = resolve_model(spec).folder
        if folder is None:
            raise ModelError(f"{spec} is not on this machine; give its folder or --bytes-per-token")
        return kv_bytes_per_token(folder)
    except ModelError as error:
        raise RefusedError(f"--model: {error}") from error


def _tier(text: str, chunk_bytes: int | None) -> tuple[str, int]:
    """(name, chunks) of ``cpu=64GB``."""
    name, _, size = text.partition("=")
    if chunk_bytes is None:
        raise RefusedError(
            f"--tier {text}: how many tokens that holds needs --model or --bytes-per-token"
        )
    try:
        found = parse_bytes(size)
    except ValueError as error:
        raise RefusedError(f"--tier {text}: {error}; write a tier as NAME=SIZE") from error
    assert isinstance(found, int)
    if not name or found < chunk_bytes:
        raise RefusedError(
            f"--tier {text}: a tier has a name and room for a chunk of {_scaled(chunk_bytes)}B"
        )
    return name, found // chunk_bytes


def _prompts(requests: Sequence[TraceRequest], block_tokens: int) -> list[advice.Prompt]:
    """Whole chunks of each prompt; equal keys are one object."""
    keys: dict[int, bytes] = {}
    return [
        advice.Prompt(
            tuple(
                [
                    keys.setdefault(block, advice.key_of(block))
                    for block in request.blocks[: request.input_tokens // block_tokens]
                ]
            ),
            request.input_tokens,
        )
        for request in requests
    ]


# What is found


class _Replays:
    """Replays of one trace, each size once."""

    def __init__(self, prompts: Sequence[advice.Prompt], policy: str, chunk_tokens: int) -> None:
        self.prompts = prompts
        self.policy = policy
        self.chunk_tokens = chunk_tokens
        self._known: dict[int, advice.Saving] = {}

    def at(self, chunks: int) -> advice.Saving:
        """What a cache of that size saves."""
        if chunks not in self._known:
            self._known[chunks] = advice.replay(
                self.prompts, chunks, self.policy, self.chunk_tokens
            )
        return self._known[chunks]


def _points(replays: _Replays, ceiling: advice.Saving, users_factor: int) -> list[Point]:
    most = ceiling.capacity_chunks
    if not most:
        raise RefusedError("no prompt of this trace is as long as a chunk: nothing can be saved")
    sizes = advice.log_spaced(max(1, most // SMALLEST_SHARE), most, SIZES)
    crowd = None
    if users_factor > 1:
        more = advice.with_more_users(replays.prompts, users_factor)
        crowd = _Replays(more, replays.policy, replays.chunk_tokens)
    console = Console(stderr=True)
    shown = track(
        sizes, "replaying", console=console, transient=True, disable=not console.is_terminal
    )
    return [
        Point(replays.at(size), crowd.at(size) if crowd is not None else None) for size in shown
    ]


def _tier_advice(sizes: dict[str, int], replays: _Replays) -> list[TierAdvice]:
    found = []
    largest, before = 0, 0.0
    for name, size in sizes.items():
        largest = max(largest, size)
        saving = replays.at(largest)
        doubled = replays.at(max(largest, 2 * size))
        found.append(
            TierAdvice(
                name,
                saving,
                saving.saved_share - before,
                doubled.saved_share - saving.saved_share,
            )
        )
        before = saving.saved_share
    return found


# What comes out


def _show(findings: Findings, picture: Path | None) -> None:
    console = Console(soft_wrap=not Console().is_terminal, highlight=False)
    ceiling = findings.ceiling
    console.print(
        f"{findings.trace}: {findings.requests:,} requests, {_scaled(ceiling.tokens)} prompt tokens"
    )
    console.print(
        f"A cache without bound would hold {findings.size_text(ceiling.capacity_chunks)}, hit "
        f"{ceiling.hit_share:.1%} of chunks and save {ceiling.saved_share:.1%} of prefill."
    )
    console.print(_curve_table(findings))
    if findings.tiers:
        console.print(_tier_table(findings))
    for line in _truncation_lines(findings):
        console.print(line)
    if picture is not None:
        console.print(f"The picture is in {picture}")


def _curve_table(findings: Findings) -> Table:
    table = Table(title=f"Eviction: {findings.policy}", title_justify="left")
    table.add_column("size", justify="right")
    table.add_column("hit chunks", justify="right")
    table.add_column("tokens saved", justify="right")
    table.add_column("of prefill", justify="right")
    if findings.users_factor > 1:
        table.add_column(f"with {findings.users_factor}x users", justify="right")
    table.add_column("of what can be saved", no_wrap=True)
    for point in findings.points:
        saving = point.saving
        table.add_row(
            findings.size_text(saving.capacity_chunks),
            f"{saving.hit_share:.1%}",
            _scaled(saving.saved_tokens),
            f"{saving.saved_share:.1%}",
            *([f"{point.crowded.saved_share:.1%}"] if point.crowded is not None else []),
            _bar(_of(saving.saved_tokens, findings.ceiling.saved_tokens)),
        )
    return table


def _tier_table(findings: Findings) -> Table:
    table = Table(title="Tiers", title_justify="left")
    for column in ("tier", "holds", "of prefill", "adds", "twice the size adds"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier in findings.tiers:
        table.add_row(
            tier.name,
            findings.size_text(tier.saving.capacity_chunks),
            f"{tier.saving.saved_share:.1%}",
            f"{100 * tier.adds_share:.1f} points",
            f"{100 * tier.doubled_adds_share:.1f} points",
        )
    return table


def _truncation_lines(findings: Findings) -> list[str]:
    found = findings.truncated
    if found is None:
        return ["Whether prompts lost their beginning this trace cannot tell: no content_ids."]
    if not found:
        return ["No prompt repeats an earlier one behind a beginning that was cut off."]
    lost = sum(each.lost for each in found)
    lines = [
        f"{len(found):,} prompts repeat an earlier one behind a beginning that was cut off: "
        f"{lost:,} blocks ({_of(lost, findings.blocks):.1%} of all) miss for that. "
        "Clients that drop old turns should drop many at once, and seldom."
    ]
    for each in sorted(found, key=lambda each: -each.lost)[:EXAMPLES]:
        lines.append(
            f"  request {each.request + 1}: {each.lost} blocks of request {each.earlier + 1} and "
            f"others, {each.dropped} blocks further to the front, behind {each.kept} that are kept"
        )
    return lines


def _bar(share: float) -> str:
    cells = round(share * BAR_CELLS)
    return f"{'█' * cells}{'░' * (BAR_CELLS - cells)} {share:.0%}"


def _of(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _scaled(number: float) -> str:
    """Three digits and a decimal prefix."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {unit}".rstrip() if unit == "" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} P"


def _picture(findings: Findings) -> str:
    curves = [
        Curve(
            findings.policy,
            tuple((p.saving.capacity_chunks, p.saving.saved_share) for p in findings.points),
        )
    ]
    if findings.users_factor > 1:
        crowded = tuple(
            (p.crowded.capacity_chunks, p.crowded.saved_share)
            for p in findings.points
            if p.crowded is not None
        )
        curves.append(Curve(f"with {findings.users_factor} times the users", crowded))
    marks = [(tier.name, float(tier.saving.capacity_chunks)) for tier in findings.tiers]
    title = f"{findings.trace}: {findings.requests:,} requests"
    return svg(title, curves, findings.ceiling.saved_share, marks, findings.size_text)


def _as_json(findings: Findings) -> dict[str, Any]:
    truncated = findings.truncated
    return {
        "trace": findings.trace,
        "requests": findings.requests,
        "policy": findings.policy,
        "chunk_tokens": findings.chunk_tokens,
        "bytes_per_token": findings.bytes_per_token,
        "users_factor": findings.users_factor,
        "ceiling": _saving_json(findings, findings.ceiling),
        "sizes": [
            _saving_json(findings, point.saving)
            | (
                {"crowded": _saving_json(findings, point.crowded)}
                if point.crowded is not None
                else {}
            )
            for point in findings.points
        ],
        "tiers": [
            {
                "name": tier.name,
                **_saving_json(findings, tier.saving),
                "adds_share": round(tier.adds_share, 4),
                "doubled_adds_share": round(tier.doubled_adds_share, 4),
            }
            for tier in findings.tiers
        ],
        "truncated": None
        if truncated is None
        else {
            "requests": len(truncated),
            "lost_blocks": sum(each.lost for each in truncated),
        },
    }


def _saving_json(findings: Findings, saving: advice.Saving) -> dict[str, Any]:
    tokens = saving.capacity_chunks * findings.chunk_tokens
    per_token = findings.bytes_per_token
    return {
        "capacity_chunks": saving.capacity_chunks,
        "capacity_bytes": None if per_token is None else tokens * per_token,
        "hit_share": round(saving.hit_share, 4),
        "saved_tokens": saving.saved_tokens,
        "saved_share": round(saving.saved_share, 4),
    }

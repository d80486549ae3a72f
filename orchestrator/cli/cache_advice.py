"""``splitserve cache advise``: what a cache of each size would save, before memory is bought."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import track

from splitserve.kv_transfer.cache import advice
from splitserve.kv_transfer.cache.eviction import POLICIES
from splitserve.kv_transfer.cache.truncation import find_truncated
from splitserve.orchestrator.cli.advice_findings import (
    Findings,
    Point,
    TierAdvice,
    json_of,
    picture_of,
    scaled,
    show,
)
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
USERS_FACTOR_LIMIT = 8


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
@click.option(
    "--policy",
    default="s3fifo",
    show_default=True,
    type=click.Choice(sorted(POLICIES)),
    help="How the cache chooses what goes.",
)
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
        if name in sizes:
            raise RefusedError(f"--tier {text}: there is a tier {name} already")
        sizes[name] = chunks
    try:
        requests = list(read_trace(path, block_tokens))
    except TraceError as error:
        raise RefusedError(str(error)) from error
    if not any(request.blocks for request in requests):
        raise RefusedError(
            f"{path} does not say which prompts share what; `splitserve record` writes a trace that"
            " does"
        )
    prompts = _prompts(requests, block_tokens)
    replays = _Replays(prompts, policy, block_tokens)
    points = _points(replays, users_factor)
    contents = [request.content for request in requests]
    findings = Findings(
        trace=path.name,
        requests=len(requests),
        policy=policy,
        chunk_tokens=block_tokens,
        bytes_per_token=bytes_per_token,
        users_factor=users_factor,
        ceiling=replays.ceiling,
        points=tuple(points),
        tiers=tuple(_tier_advice(sizes, replays)),
        blocks=sum(len(request.blocks) for request in requests),
        truncated=tuple(find_truncated(contents, truncated_blocks)) if any(contents) else None,
    )
    if picture is not None:
        picture.write_text(picture_of(findings), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(json_of(findings), indent=1))
    else:
        show(findings, picture)


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
            f"--tier {text}: a tier has a name and room for a chunk of {scaled(chunk_bytes, 'B')}"
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
        self.ceiling = advice.ceiling(prompts, chunk_tokens)
        self._known: dict[int, advice.Saving] = {}

    def at(self, chunks: int) -> advice.Saving:
        """What a cache of that size saves."""
        if chunks >= self.ceiling.capacity_chunks:
            return replace(self.ceiling, capacity_chunks=chunks)
        if chunks not in self._known:
            self._known[chunks] = advice.replay(
                self.prompts, chunks, self.policy, self.chunk_tokens
            )
        return self._known[chunks]


def _points(replays: _Replays, users_factor: int) -> list[Point]:
    most = replays.ceiling.capacity_chunks
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

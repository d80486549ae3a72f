"""The load of ``splitserve bench``: options of its load generator, or a recorded trace in the form
that the generator replays.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.models.tiny import write_byte_tokenizer
from splitserve.orchestrator.traces import TraceError, TraceRequest, read_trace
from splitserve.orchestrator.tuner.workload import WorkloadError, rate_of, spread_ticks, with_rate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from splitserve.orchestrator.config import ClusterConfig

TOOL_INPUT_TOKENS, TOOL_OUTPUT_TOKENS = 1024, 128
"""The generator's own lengths for random prompts."""
_TARGET = re.compile(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Load:
    """What the generator is told to send."""

    arguments: tuple[str, ...]
    requests: int
    notes: tuple[str, ...] = ()
    """What people should know of it."""
    told: dict[str, Any] = field(default_factory=dict)
    """For the file of results."""


def targets_of(words: Sequence[str]) -> dict[str, float]:
    """``ttft:200``, ``ttft:200,tpot:20``: limits in milliseconds by name. Raises
    ``RefusedError``.
    """
    targets = {}
    for word in re.split(r"[\s,]+", " ".join(words).strip()) if words else ():
        match = _TARGET.fullmatch(word)
        if match is None:
            raise RefusedError(
                f"--goodput {word}: write NAME:MILLISECONDS, NAME one of ttft, tpot, e2el; "
                "as in --goodput ttft:200,tpot:20"
            )
        targets[match[1]] = float(match[2])
    return targets


def is_target(word: str) -> bool:
    """Whether it is one for ``targets_of``."""
    return _TARGET.fullmatch(word) is not None


def check_random(limit_tokens: int | None, input_tokens: int | None, output: int | None) -> None:
    """Raises ``RefusedError`` for random prompts of which none fits the model."""
    wanted = (input_tokens or TOOL_INPUT_TOKENS) + (output or TOOL_OUTPUT_TOKENS)
    if limit_tokens is not None and wanted > limit_tokens:
        raise RefusedError(
            f"prompt and answer have {wanted} tokens together, but the cluster's model takes "
            f"{limit_tokens}; choose --random-input-len and --random-output-len"
        )


def trace_load(
    path: Path,
    block_tokens: int,
    *,
    rate_per_s: float | None,
    count: int | None,
    limit_tokens: int | None,
    limit_s: float,
    folder: Path,
) -> Load:
    """The first ``count`` requests of a trace, at its own times or, with a rate, as much faster or
    slower; prompts that begin alike do so here too. Requests longer than the model takes are left
    out. Raises ``RefusedError``.
    """
    try:
        found = spread_ticks(list(read_trace(path, block_tokens)))[:count]
        requests = [r for r in found if _fits(r, limit_tokens)]
        if not requests:
            raise RefusedError(
                f"--trace {path}: no request fits into the {limit_tokens} tokens of the "
                "cluster's model"
            )
        if rate_per_s is not None:
            requests = with_rate(requests, rate_per_s)
    except (TraceError, WorkloadError) as error:
        raise RefusedError(str(error)) from error
    span_s = requests[-1].at_s - requests[0].at_s
    if span_s > limit_s:
        raise RefusedError(
            f"--trace {path}: its requests come within {span_s / 60:.0f} minutes; replay the first "
            "ones (--num-prompts), make it faster (--request-rate), or raise --limit-minutes"
        )
    file = folder / "trace.jsonl"
    file.write_text("".join(_timed_lines(requests, block_tokens)))
    notes = [
        f"replays {len(requests)} requests of {path} within {span_s:.0f} s "
        f"({rate_of(requests):.3g} per second), each at its own time"
    ]
    if left_out := len(found) - len(requests):
        notes.append(
            f"left out: {left_out} requests that are longer than the {limit_tokens} tokens of the "
            "cluster's model"
        )
    arguments = ["--dataset-name", "timed_trace", "--dataset-path", str(file)]
    arguments += ["--timed-trace-chunk-hash-size", str(block_tokens)]
    told = {"trace": str(path), "block_tokens": block_tokens, "span_s": round(span_s, 3)}
    told |= {"left_out_requests": left_out, "request_rate": rate_per_s}
    return Load(tuple(arguments), len(requests), tuple(notes), told)


def tokenizer_of(config: ClusterConfig, model: str, folder: Path) -> str:
    """A tokenizer for the generator: the model's own, or for mock engines, whose tokens are bytes,
    one that is written into ``folder``.
    """
    if config.engine != "mock":
        return model
    write_byte_tokenizer(folder, config.decode.engine_args.max_model_len or 4096)
    return str(folder)


def _fits(request: TraceRequest, limit_tokens: int | None) -> bool:
    length = max(1, request.input_tokens) + max(1, request.output_tokens)
    return limit_tokens is None or length <= limit_tokens


def _timed_lines(requests: Sequence[TraceRequest], block_tokens: int) -> list[str]:
    """A line per request: a time in seconds, lengths, and a number for each block. Blocks without
    one, as in a trace that knows none, get numbers that no other has.
    """
    lines = []
    fresh = -1
    for request in requests:
        tokens = max(1, request.input_tokens)
        blocks = [*request.blocks]
        while len(blocks) * block_tokens < tokens:
            blocks.append(fresh)
            fresh -= 1
        line = {
            "timestamp": round(request.at_s - requests[0].at_s, 6),
            "input_length": tokens,
            "output_length": max(1, request.output_tokens),
            "hash_ids": blocks,
        }
        lines.append(json.dumps(line) + "\n")
    return lines

"""What the engines of both pools would say of their KV: two that differ refuse to pair, and two
that make different prompts of one request refuse each of its transfers. Told before a model is
loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.config.checks import pool_differences
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.engines.command import expected_fingerprint
from splitserve.orchestrator.launch.finding import Finding, failure, told, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem

ABSENT = "not set"
CERTAIN = (
    "engine_args.dtype",
    "engine_args.kv_cache_dtype",
    "engine_args.block_size",
    "engine_args.load_format",
    "gpus",
    "env.VLLM_KV_CACHE_LAYOUT",
)
"""Below a pool: what makes two engines differ for sure. The rest may be set to what the other one
chooses by itself.
"""
SERVED_KEYS = ("max_model_len", "enable_lora", "lora_modules", "max_lora_rank")
"""Keys that decide which requests an engine takes."""


def fingerprints(subject: Subject) -> Finding:
    """Prefill and decode engines would pair."""
    config = subject.config
    expected = {pool: expected_fingerprint(config, pool) for pool in POOLS}
    problems = list(told(pool_differences(config)))
    said = {key for problem in problems for key in problem.keys}
    for key, ours, theirs in _differences(*(expected[pool] for pool in POOLS)):
        keys = tuple(f"{pool}.{key}" for pool in POOLS)
        if not said.isdisjoint(keys):
            continue
        is_certain = key in CERTAIN
        told_as = failure if is_certain else warning
        problems.append(
            told_as(
                keys,
                f"{ours} in prefill, {theirs} in decode: engines that differ in this "
                f"{'' if is_certain else 'may '}refuse to pair",
                "give both pools the same value",
            )
        )
    problems += _served(subject)
    shown = expected["prefill"].items()
    detail = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in shown)
    return Finding("fingerprints", detail, tuple(problems), {"expected": expected})


def _differences(ours: dict[str, str], theirs: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(key below the pool, value in prefill, value in decode)."""
    for key in sorted(ours.keys() | theirs.keys()):
        mine, its = ours.get(key, ABSENT), theirs.get(key, ABSENT)
        if mine != its:
            yield key, mine, its


def _served(subject: Subject) -> Iterator[Problem]:
    for key, ours, theirs in _unequal(subject, SERVED_KEYS):
        yield warning(
            tuple(f"{pool}.engine_args.{key}" for pool in POOLS),
            f"{ours} in prefill, {theirs} in decode: requests that only one of them takes fail",
            "give both pools the same value",
        )


def _unequal(subject: Subject, keys: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """(key, value in prefill, value in decode) where they differ."""
    prefill, decode = (_flags(subject, pool) for pool in POOLS)
    for key in keys:
        ours, theirs = (found.get(key, ABSENT) for found in (prefill, decode))
        if ours != theirs:
            yield key, ours, theirs


def _flags(subject: Subject, pool: str) -> dict[str, str]:
    args = subject.config.pool(pool).engine_args
    flags = {key: getattr(args, key) for key in type(args).model_fields} | args.passed_on
    return {key.replace("-", "_"): str(v) for key, v in flags.items() if v is not None}

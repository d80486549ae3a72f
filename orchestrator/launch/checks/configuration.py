"""Whether the keys of the YAML agree, thresholds that decide nothing, and where its secrets are."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError, secret_for, tenants_by_key
from splitserve.orchestrator.config.checks import pool_differences, port_overlaps, shared_devices
from splitserve.orchestrator.config.flips import flip_obstacle
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.launch.checks.cache import cache_secret_problems
from splitserve.orchestrator.launch.checks.model import kv_item_bytes
from splitserve.orchestrator.launch.finding import Finding, told, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem


LEAST_START_S = 20.0
"""What vLLM takes at least until a small model is ready."""
LEAST_FIRST_TOKEN_S = 1.0


def configuration(subject: Subject) -> Finding:
    """Keys agree; what concerns CPUs, GPUs, ports or fingerprints is told by those checks."""
    config = subject.config
    elsewhere = {
        *pool_differences(config),
        *port_overlaps(config),
        *shared_devices(config, "cpus"),
        *shared_devices(config, "gpus"),
    }
    left = [sentence for sentence in subject.contradictions if sentence not in elsewhere]
    engines = " and ".join(dict.fromkeys(config.engine_of(pool) for pool in POOLS))
    detail = f"cluster {config.name}, engine {engines}, model {config.model.name}"
    return Finding("configuration", detail, told(left))


def roles(subject: Subject) -> Finding:
    """Whether nodes can change their roles; either is fine."""
    obstacle = flip_obstacle(subject.config)
    return Finding("roles", f"fixed: {obstacle}" if obstacle else "can be changed (flip)")


def policy(subject: Subject) -> Finding:
    """Thresholds leave both ways open, and deadlines come in their order."""
    config = subject.config
    least = config.policy.conditional.min_uncached_tokens
    longest = _longest_prompt(subject)
    if least == 0:
        detail = "every request that can be split is split"
    else:
        detail = f"prompts under {least} uncached tokens are computed by the decode node alone"
    if longest is not None:
        detail += f"; the longest has {longest}"
    problems = [*_never_splits(least, longest), *_deadlines(subject), *_never_streams(subject)]
    measured = {"min_uncached_tokens": least, "longest_prompt_tokens": longest}
    return Finding("policy", detail, tuple(problems), measured)


def secrets(subject: Subject) -> Finding:
    """Every secret is there, and only this user can read it."""
    config, sentences = subject.config, list[str]()
    for read in (
        lambda: secret_for(config, subject.environ),
        lambda: tenants_by_key(config, subject.environ) if subject.has_router else {},
    ):
        try:
            read()
        except ConfigError as error:
            sentences += error.problems
    sentences += cache_secret_problems(config)
    keys = len(config.security.api_keys)
    problems = (*told(sentences), *_open_key_files(subject))
    return Finding("secrets", f"{keys} API keys" if keys else "no API keys", problems)


def _open_key_files(subject: Subject) -> Iterator[Problem]:
    for index, entry in enumerate(subject.config.security.api_keys):
        if entry.key_file is None:
            continue
        path = Path(entry.key_file).expanduser()
        try:
            is_open = path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        except OSError:
            continue
        if is_open:
            yield warning(
                f"security.api_keys[{index}].key_file",
                f"{path} can be read by others",
                f"run `chmod 600 {path}`",
            )


def _longest_prompt(subject: Subject) -> int | None:
    """Tokens of the longest prompt that both pools take; None where nothing says so."""
    facts = subject.model_facts
    made_for = facts.max_position if facts is not None else None
    lengths = [
        subject.config.pool(pool).engine_args.max_model_len or made_for
        for pool in ("prefill", "decode")
    ]
    known = [length for length in lengths if length is not None]
    return min(known) - 1 if known else None


def _never_splits(least: int, longest: int | None) -> Iterator[Problem]:
    if longest is not None and least > longest:
        yield warning(
            "policy.conditional.min_uncached_tokens",
            f"{least}, but no prompt has more than {longest} tokens: nothing is ever split, and "
            "the prefill nodes stay idle",
            "use a smaller value (0 splits every request that can be split)",
        )


def _deadlines(subject: Subject) -> Iterator[Problem]:
    router = subject.config.router
    if router.first_token_deadline_s < LEAST_FIRST_TOKEN_S:
        yield warning(
            "router.first_token_deadline_s",
            f"requests whose first token takes {router.first_token_deadline_s:g} s end with an "
            "error, and long prompts take longer",
            "use the time that the longest prompt takes, with room for waiting",
        )
    for pool in ("prefill", "decode"):
        transfer = subject.config.pool(pool).transfer
        start_s = subject.config.pool(pool).startup_timeout_s
        if subject.config.engine_of(pool) == "vllm" and start_s < LEAST_START_S:
            yield warning(
                f"{pool}.startup_timeout_s",
                f"{start_s:g} s, but an engine takes at least {LEAST_START_S:g} s to be ready",
                "use 600 (the default), or what your model takes",
            )
        limit, whole = transfer.quarantine_limit_bytes, subject.config.pool(pool).kv_cache_bytes
        if "quarantine_limit_bytes" in transfer.model_fields_set and limit > whole:
            yield warning(
                (f"{pool}.transfer.quarantine_limit_bytes", f"{pool}.kv_cache_bytes"),
                f"{limit / 1e9:.2f} GB of KV may wait for a fence, and a node has "
                f"{whole / 1e9:.2f} GB: a prefill node that falls silent can take all of it",
                "use about a quarter of kv_cache_bytes",
            )
        if transfer.deadline_s > router.request_deadline_s:
            yield warning(
                (f"{pool}.transfer.deadline_s", "router.request_deadline_s"),
                f"a transfer may take {transfer.deadline_s:g} s, but the request ends after "
                f"{router.request_deadline_s:g} s",
                "make the transfer's shorter",
            )


def _never_streams(subject: Subject) -> Iterator[Problem]:
    """Pages leave early only if a prompt has more KV than one write."""
    facts, longest = subject.model_facts, _longest_prompt(subject)
    if facts is None or longest is None:
        return
    settings = subject.config.prefill
    per_token = facts.kv_bytes_per_token(kv_item_bytes(settings, facts))
    ranks = settings.engine_args.tensor_parallel_size
    if per_token and settings.transfer.stream_min_bytes >= longest * per_token // ranks:
        yield warning(
            "prefill.transfer.stream_min_bytes",
            f"{settings.transfer.stream_min_bytes} bytes, but the longest prompt has "
            f"{longest * per_token // ranks} of KV per rank: nothing is sent before a prompt is "
            "computed",
            "use a smaller value (1 MiB is the default)",
        )

"""Whether the engine takes what ``engine_args`` says: it would end with a usage message, or after a
minute of loading.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.engines.transformers.flags import arguments
from splitserve.orchestrator.engines.vllm.known_flags import known_flags, known_kv_cache_types
from splitserve.orchestrator.launch.finding import Finding, failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem

_FLAGS: dict[str, Callable[[], frozenset[str]]] = {
    "vllm": known_flags,
    "transformers": lambda: frozenset(
        option.removeprefix("--").replace("-", "_")
        for action in arguments()._actions
        for option in action.option_strings
    ),
}
_NAMES = {"vllm": "the installed vLLM", "transformers": "the transformers engine"}
_LISTED = {
    "vllm": "`vllm serve --help=all`",
    "transformers": "`python -m splitserve.orchestrator.engines.transformers.server --help`",
}


def engine_args(subject: Subject) -> Finding:
    """Every flag is one of the installed engine, and their sizes fit each other."""
    check = "engine_args"
    looked_at = [pool for pool in POOLS if subject.config.engine_of(pool) in _FLAGS]
    if not looked_at:
        return Finding(check, "not looked at")
    passed = {pool: sorted(subject.config.pool(pool).engine_args.passed_on) for pool in looked_at}
    problems = [
        problem
        for pool in looked_at
        for problem in (
            *_unknown_flags(subject, pool, passed[pool]),
            *_sizes(subject, pool),
            *_files(subject, pool),
        )
    ]
    names = sorted({name for pool in looked_at for name in passed[pool]})
    return Finding(check, f"passed on: {', '.join(names) or 'none'}", tuple(problems))


def _unknown_flags(subject: Subject, pool: str, keys: list[str]) -> Iterator[Problem]:
    """What argparse takes for a flag: its beginning is enough, ``no_`` negates it, and behind a dot
    is a part of its value. What `configuration` tells is left out.
    """
    told_of = [sentence.partition(":")[0] for sentence in subject.contradictions]
    engine = subject.config.engine_of(pool)
    known = _FLAGS[engine]() if keys else frozenset()
    for key in keys if known else ():
        if f"{pool}.engine_args.{key}" in told_of:
            continue
        name = key.replace("-", "_").partition(".")[0]
        forms = {name, name.removeprefix("no_")}
        if any(flag.startswith(form) for flag in known for form in forms):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        yield failure(
            f"{pool}.engine_args.{key}",
            f"{_NAMES[engine]} has no flag --{key.replace('_', '-')}",
            f"did you mean {close[0]!r}?" if close else f"remove it; {_LISTED[engine]} lists all",
        )


def _sizes(subject: Subject, pool: str) -> Iterator[Problem]:
    args = subject.config.pool(pool).engine_args
    types = known_kv_cache_types() if subject.config.engine_of(pool) == "vllm" else frozenset()
    if types and args.kv_cache_dtype not in types:
        yield failure(
            f"{pool}.engine_args.kv_cache_dtype",
            f"the installed vLLM has no KV cache of {args.kv_cache_dtype!r}",
            f"use one of {', '.join(sorted(types))}",
        )
    step, running = args.max_num_batched_tokens, args.max_num_seqs
    if step is not None and running is not None and step < running:
        yield failure(
            (f"{pool}.engine_args.max_num_batched_tokens", f"{pool}.engine_args.max_num_seqs"),
            f"a step of {step} tokens cannot hold one token of each of {running} requests",
            f"raise max_num_batched_tokens to at least {running}",
        )
    flags = {name.replace("-", "_"): value for name, value in args.passed_on.items()}
    whole = flags.get("enable_chunked_prefill") is False or flags.get("no_enable_chunked_prefill")
    longest = args.max_model_len
    if step is not None and longest is not None and whole and step < longest:
        yield failure(
            (f"{pool}.engine_args.max_num_batched_tokens", f"{pool}.engine_args.max_model_len"),
            f"without chunked prefill a step of {step} tokens cannot hold a prompt of {longest}",
            f"raise max_num_batched_tokens to {longest}, or allow enable_chunked_prefill",
        )


def _files(subject: Subject, pool: str) -> Iterator[Problem]:
    """What is named by its whole path is there."""
    args = subject.config.pool(pool).engine_args.passed_on
    flags = {name.replace("-", "_"): value for name, value in args.items()}
    named = [("chat_template", str(flags.get("chat_template", "")))]
    modules = flags.get("lora_modules", [])
    for module in modules if isinstance(modules, list) else [modules]:
        name, _, path = str(module).partition("=")
        named.append(("lora_modules", path if name.isidentifier() else ""))
    for key, path in named:
        if path.startswith("/") and "{" not in path and not Path(path).exists():
            yield failure(f"{pool}.engine_args.{key}", f"{path} is not there", "correct the path")

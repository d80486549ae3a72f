"""Whether the model is there, whole, and fits what the pools are started with: what an engine would
otherwise say only after it has loaded for a while.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.engines.transformers.tested_models import TESTED_MODELS
from splitserve.orchestrator.engines.vllm.known_flags import known_architectures
from splitserve.orchestrator.launch.finding import Finding, Problem, failure, told, warning
from splitserve.orchestrator.models.errors import ModelError
from splitserve.orchestrator.models.folder_facts import (
    DEFAULTS_JSON,
    ITEM_BYTES,
    TOKENIZER_JSON,
    broken_json,
    has_chat_template,
    has_tokenizer,
    mismatches,
    read_facts,
    weight_bytes,
    weight_problems,
)
from splitserve.orchestrator.models.resolve import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config import ClusterConfig, PoolConfig
    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.models.folder_facts import ModelFacts

LONGER_THAN_MODEL = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""vLLM's own variable: a length beyond what the model was made for is allowed."""


def model_of(config: ClusterConfig) -> str:
    """What the engines get as their model: a folder or a Hub id. Raises ``ConfigError``."""
    if config.engine == "mock":
        return config.model.path
    try:
        return resolve_model(config.model.path).engine_model
    except ModelError as error:
        raise ConfigError([f"model.path: {error}"]) from error


def model(subject: Subject) -> Finding:
    """The folder is there, can be read, and fits the pools."""
    check, config = "model", subject.config
    if config.launcher == "ray":
        return Finding(check, f"{config.model.path}, which `up` looks for on each host")
    try:
        found = model_of(config)
    except ConfigError as error:
        return Finding(check, config.model.path, told(error.problems))
    folder = subject.model_folder
    if folder is None:
        return Finding(check, found) if config.engine == "mock" else _from_the_hub(subject, found)
    problems = [*_folder_problems(folder, config)]
    if subject.model_facts is not None:
        for pool in POOLS:
            problems += _shape_problems(subject, pool, subject.model_facts)
    size = weight_bytes(folder)
    detail = f"{found}, {size / 1e9:.2f} GB of weights"
    return Finding(check, detail, tuple(problems), {"weight_bytes": size})


def chat_template(subject: Subject) -> Finding:
    """Chats can be turned into prompts."""
    check, folder = "chat_template", subject.model_folder
    if folder is None:
        return Finding(check, "not looked for")
    given = [bool(_flag(subject.config.pool(pool), "chat_template")) for pool in POOLS]
    if has_chat_template(folder) or all(given):
        return Finding(check, "given" if all(given) else "in the model's folder")
    problem = warning(
        ("model.path", *(f"{pool}.engine_args.chat_template" for pool in POOLS)),
        f"{folder} has none: /v1/chat/completions answers every request with status 400",
        "put chat_template.jinja into the model's folder, or name a file as "
        "engine_args.chat_template in both pools; /v1/completions needs none",
    )
    return Finding(check, "none", (problem,))


def _from_the_hub(subject: Subject, name: str) -> Finding:
    """A model that the engines get themselves: cached already, or to be downloaded."""
    check, environ = "model", subject.environ
    home = Path(environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    if any((hub / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json")):
        return Finding(check, f"{name}, in the Hub's cache {hub}")
    if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        problem = failure(
            ("model.path", "HF_HUB_OFFLINE"),
            f"{name} is neither a folder here nor in the Hub's cache {hub}, and HF_HUB_OFFLINE is "
            "set",
            "name a folder, or unset HF_HUB_OFFLINE for the download",
        )
        return Finding(check, name, (problem,))
    problem = warning(
        "model.path",
        f"there is no folder {Path(name).absolute()}, so it is taken for a model of the Hub, and "
        "each engine begins with its download",
        "name the folder by its whole path if it is one, or download it once before",
    )
    return Finding(check, f"{name}, from the Hub", (problem,))


def _folder_problems(folder: Path, config: ClusterConfig) -> Iterator[Problem]:
    restore = "copy the model again (`splitserve model prepare` for a prepared one)"
    wrong: list[str] = []
    try:
        facts = read_facts(folder)
        wrong += mismatches(folder, facts)
        yield from _architecture(facts, {config.engine_of(pool) for pool in POOLS})
    except ModelError as error:
        yield Problem.told(f"model.path: {error}")
    formats = {_flag(config.pool(pool), "load_format") for pool in POOLS}
    if formats != {"dummy"}:
        wrong += weight_problems(folder)
    for what in (*wrong, *broken_json(folder, TOKENIZER_JSON)):
        yield failure("model.path", what, restore)
    for what in broken_json(folder, DEFAULTS_JSON):
        yield warning("model.path", f"{what}: its defaults for sampling are lost", restore)
    tokenizers = [
        _flag(config.pool(pool), name)
        for pool in POOLS
        for name in ("tokenizer", "skip_tokenizer_init")
    ]
    if not has_tokenizer(folder) and not any(tokenizers):
        yield failure("model.path", f"{folder} has no tokenizer", restore)


def _architecture(facts: ModelFacts, engines: set[str]) -> Iterator[Problem]:
    named = ", ".join(facts.architectures)
    if "transformers" in engines and set(TESTED_MODELS.values()).isdisjoint(facts.architectures):
        yield failure(
            "model.path",
            f"{named or 'a model of no named class'} was not tested with the transformers engine",
            f"use one of {', '.join(TESTED_MODELS.values())}, or engine: vllm",
        )
    known = known_architectures() if "vllm" in engines else frozenset()
    if known and facts.architectures and known.isdisjoint(facts.architectures):
        yield warning(
            "model.path",
            f"the installed vLLM has no implementation of {named}, and "
            "tries that of transformers, if there is one",
            "use a model of a class that vLLM has",
        )


def _shape_problems(subject: Subject, pool: str, facts: ModelFacts) -> Iterator[Problem]:
    settings = subject.config.pool(pool)
    args, ranks = settings.engine_args, settings.engine_args.tensor_parallel_size
    if facts.has_latent_kv:
        yield failure(
            "model.path", "models with latent attention (MLA) cannot be split yet", "use another"
        )
    for heads, what in ((facts.kv_heads, "KV heads"), (facts.heads, "attention heads")):
        if heads and heads % ranks:
            yield failure(
                f"{pool}.engine_args.tensor_parallel_size",
                f"{ranks} does not divide the model's {heads} {what}",
                f"use a divisor of {heads}",
            )
            break
    longest = args.max_model_len
    if longest and facts.max_position and longest > facts.max_position:
        is_allowed = subject.environment_of(pool).get(LONGER_THAN_MODEL) == "1"
        scaled = _flag(settings, "hf_overrides") or _flag(settings, "rope_scaling")
        if not is_allowed and not scaled:
            yield failure(
                f"{pool}.engine_args.max_model_len",
                f"{longest} tokens, but the model was made for {facts.max_position}",
                f"use at most {facts.max_position}",
            )
    yield from room_problems(settings, pool, facts)


def room_problems(settings: PoolConfig, pool: str, facts: ModelFacts) -> Iterator[Problem]:
    """One request of the longest length fits into a node's KV; else vLLM does not start."""
    args = settings.engine_args
    per_token = facts.kv_bytes_per_token(kv_item_bytes(settings, facts))
    longest = args.max_model_len or facts.max_position
    if not per_token or not longest or settings.gpus is not None:
        return
    blocks = -(-longest // args.block_size) + 1  # vLLM keeps one that holds nothing
    needed = blocks * args.block_size * per_token // args.tensor_parallel_size
    if needed > settings.kv_cache_bytes:
        fitting = settings.kv_cache_bytes * args.tensor_parallel_size // per_token
        fitting = max(0, fitting - fitting % args.block_size - args.block_size)
        remedy = f"raise it to at least {needed}"
        if fitting:
            remedy = f"raise it, or set max_model_len to at most {fitting}"
        yield failure(
            (f"{pool}.kv_cache_bytes", f"{pool}.engine_args.max_model_len"),
            f"one request of {longest} tokens takes {needed / 1e9:.2f} GB of KV per rank, "
            f"kv_cache_bytes is {settings.kv_cache_bytes / 1e9:.2f} GB",
            remedy,
        )


def kv_item_bytes(settings: PoolConfig, facts: ModelFacts) -> int:
    """Bytes of one number of the KV cache; 4 where it cannot be known."""
    args = settings.engine_args
    if args.kv_cache_dtype.startswith(("fp8", "int8")):
        return 1
    for name in (args.kv_cache_dtype, args.dtype, facts.dtype or ""):
        if name in ITEM_BYTES:
            return ITEM_BYTES[name]
    return 4


def _flag(settings: PoolConfig, name: str) -> object:
    """A key of ``engine_args`` that is passed on, however it is spelt."""
    passed = settings.engine_args.passed_on
    return passed.get(name, passed.get(name.replace("_", "-")))

"""From a node's configuration to the command line and environment of vLLM's own API server.
Pure.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.config.tracing_schema import engine_tracing_environment
from splitserve.orchestrator.engines.command import (
    EngineCommand,
    common_arguments,
    network_environment,
    passed_on_arguments,
    transfer_settings,
)
from splitserve.orchestrator.engines.vllm.process_waits import SLEEPING_WAITS_ENV
from splitserve.orchestrator.engines.vllm.seeded_chunks import SEEDED_CHUNKS_ENV

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig, NodeConfig, PoolConfig

CONNECTOR = "SplitserveConnector"
CONNECTOR_MODULE = "splitserve.orchestrator.engines.vllm.connector"

FINGERPRINT_FLAGS = ("quantization", "revision", "hf_overrides", "rope_scaling", "model_impl")
"""Flags passed on as they are that may change what a page holds; what they are set to may be what
the engine would have chosen by itself.
"""
LAYOUT_ENV = "VLLM_KV_CACHE_LAYOUT"


def expected_fingerprint(settings: PoolConfig) -> dict[str, str]:
    """What decides the content and the form of the pool's pages, by key below the pool."""
    args = settings.engine_args
    flags = {name.replace("-", "_"): value for name, value in args.passed_on.items()}
    expected = {
        "engine_args.dtype": args.dtype,
        "engine_args.kv_cache_dtype": args.kv_cache_dtype,
        "engine_args.block_size": str(args.block_size),
        "engine_args.load_format": "dummy" if flags.get("load_format") == "dummy" else "weights",
        "gpus": "used" if settings.gpus is not None else "not used",
    }
    for name in FINGERPRINT_FLAGS:
        if flags.get(name) is not None:
            expected[f"engine_args.{name}"] = str(flags[name])
    if LAYOUT_ENV in settings.env:
        expected[f"env.{LAYOUT_ENV}"] = settings.env[LAYOUT_ENV]
    return expected


def command(config: ClusterConfig, node: NodeConfig, model: str, incarnation: str) -> EngineCommand:
    """The command of one vLLM engine with splitserve's connector in it."""
    args = node.settings.engine_args
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += common_arguments(config, node, model)
    argv += ["--dtype", args.dtype, "--kv-cache-dtype", args.kv_cache_dtype]
    argv += ["--enforce-eager"] if args.enforce_eager else []
    argv += ["--disable-access-log-for-endpoints", "/health,/metrics"]
    argv += ["--kv-transfer-config", _kv_transfer_config(config, node, incarnation)]
    environment = _environment(node, model)
    if (tracing := config.observability.tracing) is not None:
        argv += ["--otlp-traces-endpoint", tracing.traces_url]
        environment |= engine_tracing_environment(tracing, node.name)
    argv += passed_on_arguments(node)
    environment |= node.settings.env
    return EngineCommand(tuple(argv), environment, _warm_up(config))


def _warm_up(config: ClusterConfig) -> dict[str, Any]:
    """A step over several tokens and one over a single one: vLLM compiles each of the two kinds
    when it first comes, which takes 13 s with tensor parallelism and an empty compiler cache.
    """
    prompt = list(range(1, 9))
    return {"model": config.model.name, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}


def omp_binding(cpus: tuple[int, ...], ranks: int) -> str:
    """``VLLM_CPU_OMP_THREADS_BIND``: the node's CPUs in order, split evenly over its ranks
    (``0,1|2,3``).
    """
    share = len(cpus) // ranks
    return "|".join(
        ",".join(str(cpu) for cpu in cpus[rank * share : (rank + 1) * share])
        for rank in range(ranks)
    )


def _kv_transfer_config(config: ClusterConfig, node: NodeConfig, incarnation: str) -> str:
    return json.dumps(
        {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": incarnation,
            "kv_connector_extra_config": transfer_settings(config, node, incarnation),
        }
    )


_ON_CPU = {SLEEPING_WAITS_ENV: "1", SEEDED_CHUNKS_ENV: "1"}


def _environment(node: NodeConfig, model: str) -> dict[str, str]:
    env = network_environment(node) | {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        # setproctitle would overwrite the environment block by which left-over processes are found
        "SPT_NOENV": "1",
    }
    if model.startswith("/"):
        env["HF_HUB_OFFLINE"] = "1"
    if node.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in node.gpus)
    elif node.cpus is not None:
        ranks = node.settings.engine_args.tensor_parallel_size
        env["VLLM_CPU_OMP_THREADS_BIND"] = omp_binding(node.cpus, ranks)
        env |= _ON_CPU
    elif node.unpinned_cpus:
        ranks = node.settings.engine_args.tensor_parallel_size
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(node.unpinned_cpus // ranks)
        env |= _ON_CPU
    return env

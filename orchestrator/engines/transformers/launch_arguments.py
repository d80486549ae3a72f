"""From a node's configuration to the command line of the transformers engine. Pure."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from splitserve.orchestrator.engines.command import (
    EngineCommand,
    common_arguments,
    network_environment,
    passed_on_arguments,
    transfer_settings,
)

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig, NodeConfig, PoolConfig


def expected_fingerprint(settings: PoolConfig) -> dict[str, str]:
    """What decides the content and the form of the pool's pages, by key below the pool: the keys
    are vLLM's, for the two may be paired.
    """
    args = settings.engine_args
    return {
        "engine_args.dtype": args.dtype,
        "engine_args.kv_cache_dtype": args.kv_cache_dtype,
        "engine_args.block_size": str(args.block_size),
        "engine_args.load_format": "weights",
        "gpus": "used" if settings.gpus is not None else "not used",
    }


def command(config: ClusterConfig, node: NodeConfig, model: str, incarnation: str) -> EngineCommand:
    """The command of one engine. ``--kv-transfer-config`` holds ``kv_connector_extra_config``
    only.
    """
    args = node.settings.engine_args
    argv = [sys.executable, "-m", "splitserve.orchestrator.engines.transformers.server"]
    argv += common_arguments(config, node, model)
    argv += ["--dtype", args.dtype, "--kv-cache-dtype", args.kv_cache_dtype]
    settings = {"kv_connector_extra_config": transfer_settings(config, node, incarnation)}
    argv += ["--kv-transfer-config", json.dumps(settings)]
    # engines that share CPUs must not spin there while they wait for each other's threads
    env = network_environment(node) | {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
    if model.startswith("/"):
        env["HF_HUB_OFFLINE"] = "1"
    if node.gpus is not None:
        argv += ["--device", "cuda"]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in node.gpus)
    elif node.cpus is None and node.unpinned_cpus:
        argv += ["--threads", str(node.unpinned_cpus)]
    argv += passed_on_arguments(node)
    return EngineCommand(tuple(argv), env | node.settings.env)

"""The command line of the mock engine: vLLM's flags, as far as they mean something without a model.
Pure.
"""

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

FINGERPRINT_FLAGS = ("num_layers", "num_kv_heads", "kv_head_bytes", "seed")


def expected_fingerprint(settings: PoolConfig) -> dict[str, str]:
    """What decides the content and the form of the pool's pages, by key below the pool."""
    args = settings.engine_args
    flags = {name.replace("-", "_"): value for name, value in args.passed_on.items()}
    expected = {"engine_args.block_size": str(args.block_size)}
    for name in FINGERPRINT_FLAGS:
        if flags.get(name) is not None:
            expected[f"engine_args.{name}"] = str(flags[name])
    return expected


def command(config: ClusterConfig, node: NodeConfig, model: str, incarnation: str) -> EngineCommand:
    """The command of one mock engine. ``--kv-transfer-config`` holds ``kv_connector_extra_config``
    only.
    """
    argv = [sys.executable, "-m", "splitserve.orchestrator.engines.mock.server"]
    argv += common_arguments(config, node, model)
    settings = {"kv_connector_extra_config": transfer_settings(config, node, incarnation)}
    argv += ["--kv-transfer-config", json.dumps(settings)]
    argv += passed_on_arguments(node)
    return EngineCommand(tuple(argv), network_environment(node) | node.settings.env)

"""What the router is told of a node when its engine is ready."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from splitserve.orchestrator.agent.messages import NodeDescription
from splitserve.orchestrator.engines.versions import own_version

if TYPE_CHECKING:
    from splitserve.kv_transfer.engine_endpoint import EngineDescription
    from splitserve.orchestrator.agent.life import Life
    from splitserve.orchestrator.agent.messages import AdapterDescription
    from splitserve.orchestrator.config import ClusterConfig, NodeConfig


def describe(
    config: ClusterConfig,
    node: NodeConfig,
    life: Life,
    engine: EngineDescription,
    flip_obstacle: str,
    adapters: dict[str, AdapterDescription],
) -> NodeDescription:
    """The node in this life of its engine, which says what it is itself."""
    return NodeDescription(
        node=node.name,
        pool=node.pool,
        incarnation=life.incarnation,
        engine_url=node.advertised_url,
        engine_api_key=life.api_key,
        control_addresses=tuple(engine.control_addresses),
        model=config.model.name,
        max_model_len=engine.max_model_len,
        block_tokens=engine.block_tokens,
        total_blocks=engine.total_blocks,
        tensor_parallel=engine.tensor_parallel,
        transport=engine.transport,
        fingerprint=dict(engine.fingerprint),
        host=socket.gethostname(),
        version=own_version(),
        reports_prefixes=engine.reports_prefixes,
        reports_transfers=engine.reports_transfers,
        uses_cache=engine.uses_cache,
        step_limit_tokens=engine.step_limit_tokens,
        running_limit_requests=engine.running_limit_requests,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        vocabulary_tokens=engine.vocabulary_tokens,
        engine=engine.engine,
        hardware=engine.hardware,
        flip_obstacle=flip_obstacle,
        adapters=adapters,
    )

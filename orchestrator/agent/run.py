"""An agent as a process: from what it is told to its exit status."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.kv_transfer.engine_endpoint import EngineEndpointClient
from splitserve.orchestrator.agent.agent import EXIT_FAULT, Agent
from splitserve.orchestrator.agent.health import HealthServer
from splitserve.orchestrator.agent.processes import become_subreaper
from splitserve.orchestrator.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.config import ClusterConfig, NodeConfig

_log = logging.getLogger(__name__)

SPANS_CLOSE_S = 1.0
"""For the last spans of transfers to leave."""


def run(
    config: ClusterConfig,
    node: NodeConfig,
    *,
    model: str,
    secret: bytes,
    router_urls: Sequence[str],
    run_dir: Path,
    health_port: int | None = None,
) -> int:
    """Run the node until it has ended; returns one of ``agent.EXIT_*``.

    SIGTERM and SIGINT stop it. ``run_dir`` is a folder of this user, for its status and for what
    the next agent of the node must know. Probes are answered on ``health_port`` of the node's host,
    if one is given.
    """
    logging.basicConfig(
        level=config.observability.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {node.name} %(name)s: %(message)s",
    )
    become_subreaper()

    async def main() -> int:
        spans = None
        if config.observability.tracing is not None:
            # It brings OpenTelemetry's SDK, which an agent needs for nothing else
            from splitserve.orchestrator.observe.transfer_spans import TransferSpans

            spans = TransferSpans(config.observability.tracing, node.name)
        agent = Agent(
            config,
            node,
            model=model,
            secret=secret,
            router_urls=router_urls,
            run_dir=run_dir,
            log_dir=Path(config.observability.log_dir or run_dir / "logs"),
            connect_endpoint=EngineEndpointClient,
            spans=spans,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop)
        health = HealthServer(agent.health)
        try:
            if health_port is not None:
                await health.listen(node.host, health_port)
        except OSError as error:
            _log.error("cannot listen on %s:%d (--health-port): %s", node.host, health_port, error)
            return EXIT_FAULT
        try:
            return await agent.run()
        finally:
            await health.close()
            if spans is not None:
                await asyncio.to_thread(spans.close, SPANS_CLOSE_S)

    try:
        return asyncio.run(main())
    except ConfigError as error:
        _log.error("%s", error)
        return EXIT_FAULT

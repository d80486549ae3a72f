"""``python -m splitserve.orchestrator.agent --node NAME --config RESOLVED.json``: runs one node.
Started by ``splitserve up``.

The cluster secret comes by environment. SIGTERM and SIGINT stop the engine and end the agent; its
exit status is one of ``agent.EXIT_*``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from splitserve.kv_transfer.engine_endpoint import EngineEndpointClient
from splitserve.orchestrator.agent.agent import Agent
from splitserve.orchestrator.agent.processes import become_subreaper
from splitserve.orchestrator.config import cluster_secret, load_resolved, node, router_url

SPANS_CLOSE_S = 1.0
"""For the last spans of transfers to leave."""


async def _run(arguments: argparse.Namespace) -> int:
    config = load_resolved(arguments.config)
    run_dir = arguments.config.parent
    spans = None
    if config.observability.tracing is not None:
        # It brings OpenTelemetry's SDK, which an agent needs for nothing else
        from splitserve.orchestrator.observe.transfer_spans import TransferSpans

        spans = TransferSpans(config.observability.tracing, arguments.node)
    agent = Agent(
        config,
        node(config, arguments.node),
        model=arguments.model,
        secret=cluster_secret(os.environ),
        router_url=router_url(config),
        run_dir=run_dir,
        log_dir=Path(config.observability.log_dir or run_dir / "logs"),
        connect_endpoint=EngineEndpointClient,
        spans=spans,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    try:
        return await agent.run()
    finally:
        if spans is not None:
            await asyncio.to_thread(spans.close, SPANS_CLOSE_S)


def main() -> int:
    """Run the agent that the command line names; returns its exit status."""
    parser = argparse.ArgumentParser(prog="splitserve-agent", description=__doc__)
    parser.add_argument("--node", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--model", required=True, help="folder or Hub id, as resolved by `up`")
    arguments = parser.parse_args()
    config = load_resolved(arguments.config)
    logging.basicConfig(
        level=config.observability.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {arguments.node} %(name)s: %(message)s",
    )
    become_subreaper()
    return asyncio.run(_run(arguments))


if __name__ == "__main__":
    sys.exit(main())

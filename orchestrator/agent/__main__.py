"""``python -m splitserve.orchestrator.agent --node NAME --config RESOLVED.json``: runs one node.
Started by ``splitserve up``; ``splitserve node`` does the same from a cluster YAML.

The cluster secret comes by environment. SIGTERM and SIGINT stop the engine and end the agent; its
exit status is one of ``agent.EXIT_*``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from splitserve.orchestrator.agent.run import run
from splitserve.orchestrator.config import cluster_secret, load_resolved, node, router_urls


def main() -> int:
    """Run the agent that the command line names; returns its exit status."""
    parser = argparse.ArgumentParser(prog="splitserve-agent", description=__doc__)
    parser.add_argument("--node", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--model", required=True, help="folder or Hub id, as resolved by `up`")
    arguments = parser.parse_args()
    config = load_resolved(arguments.config)
    return run(
        config,
        node(config, arguments.node),
        model=arguments.model,
        secret=cluster_secret(os.environ),
        router_urls=router_urls(config),
        run_dir=arguments.config.parent,
    )


if __name__ == "__main__":
    sys.exit(main())

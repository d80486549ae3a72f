"""``python -m splitserve.orchestrator.router --config FILE``: the router of a resolved
configuration. Started by ``splitserve up``; ``splitserve router`` does the same from a cluster
YAML.

The cluster secret comes by environment. SIGTERM lets running requests finish for
``supervision.drain_timeout_s``, then ends them with an error. Exit status 0 after a stop, 2 for a
configuration that cannot be used, 3 when the port is taken.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from splitserve.orchestrator.config import (
    ConfigError,
    cluster_secret,
    for_router,
    load_resolved,
    tenants_by_key,
)
from splitserve.orchestrator.router.run import run


def main() -> int:
    """The process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m splitserve.orchestrator.router")
    parser.add_argument("--config", required=True, type=Path, help="resolved configuration (JSON)")
    parser.add_argument("--index", type=int, default=0, help="which of the cluster's routers")
    arguments = parser.parse_args()
    try:
        config = for_router(load_resolved(arguments.config), arguments.index)
        secret = cluster_secret(os.environ)
        keys = tenants_by_key(config, os.environ)
    except (ConfigError, OSError, KeyError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return run(config, secret, keys, index=arguments.index)


if __name__ == "__main__":
    sys.exit(main())

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
    load_resolved,
    tenants_by_key,
)
from splitserve.orchestrator.router.run import run


def main() -> int:
    """The process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m splitserve.orchestrator.router")
    parser.add_argument("--config", required=True, type=Path, help="resolved configuration (JSON)")
    arguments = parser.parse_args()
    try:
        config = load_resolved(arguments.config)
        secret = cluster_secret(os.environ)
        keys = tenants_by_key(config, os.environ)
    except (ConfigError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return run(config, secret, keys)


if __name__ == "__main__":
    sys.exit(main())

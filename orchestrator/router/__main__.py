"""``python -m splitserve.orchestrator.router --config FILE``: the router of a resolved
configuration.

The cluster secret comes by the environment variable ``SPLITSERVE_SECRET``. SIGTERM lets running
requests finish for ``supervision.drain_timeout_s``, then ends them with an error. Exit status 0
after a stop, 2 for a configuration that cannot be used, 3 when the port is taken.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path

import uvloop

from splitserve.orchestrator.config import (
    ConfigError,
    cluster_secret,
    load_resolved,
    tenants_by_key,
)
from splitserve.orchestrator.router.app import CannotListenError, run

GC_THRESHOLD_OBJECTS = 20_000
"""Objects between two looks for cycles among the young ones (Python's own value is 700)."""


def main() -> int:
    """The process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m splitserve.orchestrator.router")
    parser.add_argument("--config", required=True, type=Path, help="resolved configuration (JSON)")
    parser.add_argument("--cache-socket", type=Path, help="where this host's cache server listens")
    arguments = parser.parse_args()
    try:
        config = load_resolved(arguments.config)
        secret = cluster_secret(os.environ)
        keys = tenants_by_key(config, os.environ)
    except (ConfigError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(
        level=config.observability.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # What is loaded by now stays: the collector need not look at it again and again. A request
    # makes some hundred objects and drops nearly all of them by itself.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD_OBJECTS, 20, 50)
    try:
        uvloop.run(run(config, secret, keys, arguments.cache_socket))
    except CannotListenError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

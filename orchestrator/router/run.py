"""A router as a process: from what it is told to its exit status."""

from __future__ import annotations

import gc
import logging
import sys
from typing import TYPE_CHECKING

import uvloop

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.router.app import CannotListenError
from splitserve.orchestrator.router.app import run as serve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.orchestrator.config import ClusterConfig

GC_THRESHOLD_OBJECTS = 20_000
"""Objects between two looks for cycles among the young ones (Python's own value is 700)."""

EXIT_REFUSED = 2
"""The configuration, or a file that it names, cannot be used."""
EXIT_CANNOT_LISTEN = 3
"""The address is taken, or is none of this machine."""


def run(
    config: ClusterConfig, secret: bytes, tenant_by_key: Mapping[str, str], *, index: int = 0
) -> int:
    """Be the router ``index``, whose address ``config`` has. Serve until SIGTERM or SIGINT; returns
    0, ``EXIT_REFUSED`` or ``EXIT_CANNOT_LISTEN``.
    """
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
        uvloop.run(serve(config, secret, tenant_by_key, index))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    except CannotListenError as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT_LISTEN
    return 0

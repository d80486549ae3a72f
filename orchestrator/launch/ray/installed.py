"""Whether Ray can be imported here; asked before anything that imports it."""

from __future__ import annotations

import importlib.util
import os

from splitserve.orchestrator.config import ConfigError

_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
"""Ray tells nobody that it is used, and does not guess how this process was started."""


def require_ray() -> None:
    """Ray may be imported. Raises ``ConfigError`` where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            ["launcher: ray is not installed here; run `pip install 'splitserve[ray]'`"]
        )
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)

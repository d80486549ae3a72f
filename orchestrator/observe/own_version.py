"""Which splitserve this is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def own_version() -> str:
    """As installed; ``unknown`` for what runs without having been installed."""
    try:
        return version("splitserve")
    except PackageNotFoundError:
        return "unknown"

"""Gives a cluster the folders and files that its YAML left open, as absolute paths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.files import ClusterFiles

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig


def with_log_dir(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the folder of its logs as an absolute path."""
    folder = _absolute(config.observability.log_dir, ClusterFiles(config.name).log_dir)
    observability = config.observability.model_copy(update={"log_dir": folder})
    return config.model_copy(update={"observability": observability})


def with_cache_paths(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the cache's socket and the folders of its disk tiers as absolute
    paths.
    """
    cache = config.cache
    if cache is None:
        return config
    files = ClusterFiles(config.name)
    tiers = [
        tier.model_copy(update={"path": _absolute(tier.path, files.cache_dir)})
        if tier.type == "disk"
        else tier
        for tier in cache.tiers
    ]
    socket_path = _absolute(cache.socket_path, files.cache_socket_path)
    update = {"tiers": tiers, "socket_path": socket_path}
    return config.model_copy(update={"cache": cache.model_copy(update=update)})


def with_profile_path(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the file of the profile by which roles are decided as an absolute
    path.
    """
    autotune = config.policy.autotune
    if autotune.mode == "off":
        return config
    path = _absolute(autotune.profile, ClusterFiles(config.name).profile_path)
    policy = config.policy.model_copy(
        update={"autotune": autotune.model_copy(update={"profile": path})}
    )
    return config.model_copy(update={"policy": policy})


def _absolute(path: str | None, default: Path) -> str:
    return str((Path(path).expanduser() if path else default).absolute())

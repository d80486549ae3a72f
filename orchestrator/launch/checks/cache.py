"""What the cache's tiers must find before anything is started: room on disks, stores that answer
and take the credentials, and the software to talk to them.

A store is asked once, within the tier's own timeouts.
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.settings import tier_names
from splitserve.orchestrator.config import ConfigError, cache_secret
from splitserve.orchestrator.launch.cache_settings import tier_settings
from splitserve.orchestrator.launch.finding import Finding, told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config import CacheConfig, ClusterConfig, TierConfig
    from splitserve.orchestrator.launch.checks.subject import Subject

_TIERS = "splitserve.kv_transfer.cache.tiers"
_NO_SECRET = bytes(16)
"""Stands in for the cluster secret where only the cache's own file matters."""


def arena_bytes(cache: CacheConfig | None) -> int:
    """Memory that the cache server takes for chunks at start."""
    if cache is None:
        return 0
    first = cache.tiers[0]
    if first.type == "cpu" and first.capacity_bytes is not None:
        return first.capacity_bytes
    return cache.staging_bytes


def cache(subject: Subject) -> Finding:
    """Every tier below ``cpu`` can be used."""
    check, asked_for = "cache", subject.config.cache
    if asked_for is None:
        return Finding(check, "not asked for")
    names = ", ".join(tier_names(tier.type for tier in asked_for.tiers))
    if subject.running is not None:
        return Finding(check, f"tiers: {names}; used by the running cluster")
    problems = list(_room_problems(asked_for))
    full = {problem.split(".capacity_bytes")[0] for problem in problems}
    for index, tier in enumerate(asked_for.tiers):
        where = f"cache.tiers[{index}]"
        if tier.type != "cpu" and where not in full:
            problems += _store_problems(where, tier)
    return Finding(check, f"tiers: {names}", told(problems))


def cache_secret_problems(config: ClusterConfig) -> list[str]:
    """Why the file of the cache's secret cannot be used."""
    try:
        cache_secret(config, _NO_SECRET)
    except ConfigError as error:
        return error.problems
    return []


def _room_problems(cache: CacheConfig) -> Iterator[str]:
    """Disk tiers of one file system share its room; what a tier holds already is its own."""
    promised: dict[int, int] = {}
    for index, tier in enumerate(cache.tiers):
        if tier.type != "disk" or tier.capacity_bytes is None:
            continue
        assert tier.path is not None, "the configuration's paths are filled in by `up`"
        folder = existing(Path(tier.path))
        device = folder.stat().st_dev
        promised[device] = promised.get(device, 0) + tier.capacity_bytes
        room = shutil.disk_usage(folder).free
        if promised[device] > room:
            room += _bytes_in(Path(tier.path))
        if promised[device] > room:
            yield (
                f"cache.tiers[{index}].capacity_bytes: {promised[device] / 1e9:.1f} GB, but there "
                f"is room for {room / 1e9:.1f} GB at {tier.path}; lower it, or choose another path"
            )


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _bytes_in(folder: Path) -> int:
    """Bytes that the files below ``folder`` take on disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).lstat().st_blocks * 512
            except FileNotFoundError:  # A chunk that was removed meanwhile.
                continue
    return total


def _store_problems(where: str, tier: TierConfig) -> list[str]:
    """Why the store of this tier cannot be used."""
    error_class: type[Exception] = import_module(f"{_TIERS}.base").TierError
    try:
        store = import_module(f"{_TIERS}.registry").create(tier_settings(tier))
        try:
            store.check()
        finally:
            store.close()
    except error_class as error:
        return [f"{where}: {error}"]
    return []

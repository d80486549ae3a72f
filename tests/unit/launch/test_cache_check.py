"""What the cache's tiers must find on this machine and beyond, with stand-ins for the stores."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.config import ClusterConfig, ConfigError, parse
from splitserve.orchestrator.launch.checks import cache as subject
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.paths import with_cache_paths
from splitserve.orchestrator.launch.preflight import findings, preflight

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.kv_transfer.cache.settings import TierSettings

TIERS = "splitserve.kv_transfer.cache.tiers"
BASE = """
engine: mock
model: {path: m}
router: {port: 0}
prefill: &pool {kv_cache_bytes: 1 MiB, transfer: {transport: tcp}}
decode: *pool
"""
CPU = "{type: cpu, capacity_bytes: 1 MB}"


class Stores:
    """Stands in for the tiers: takes note of what is made, and refuses where it is told to."""

    def __init__(self) -> None:
        self.made: list[TierSettings] = []
        self.closed = 0
        self.refusal = ""

        class TierError(Exception):
            pass

        self.error = TierError

    def create(self, settings: TierSettings) -> SimpleNamespace:
        """A store."""
        self.made.append(settings)
        return SimpleNamespace(check=self.check, close=self.close)

    def check(self) -> None:
        """Fine, or not."""
        if self.refusal:
            raise self.error(self.refusal)

    def close(self) -> None:
        """Counted."""
        self.closed += 1


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stores:
    """The stand-ins, in a state folder of their own."""
    stores = Stores()
    base, registry = ModuleType(f"{TIERS}.base"), ModuleType(f"{TIERS}.registry")
    base.TierError = stores.error  # type: ignore[attr-defined]
    registry.create = stores.create  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return stores


def config_of(*tiers: str, more: str = "") -> ClusterConfig:
    """A mock cluster with these tiers."""
    return with_cache_paths(parse(f"{BASE}cache: {{tiers: [{', '.join(tiers)}]{more}}}\n"))


def problems_of(config: ClusterConfig) -> list[str]:
    """What ``preflight`` refuses."""
    with pytest.raises(ConfigError) as caught:
        preflight(config, {})
    return caught.value.problems


def test_every_lower_tier_is_asked(stores: Stores) -> None:
    """Once, and closed again; the arena is no store."""
    config = config_of(CPU, "{type: disk, capacity_bytes: 1 MB}", "{type: s3, url: 's3://b'}")
    found = {finding.check: finding for finding, _ in findings(Subject(config, {}))}
    assert found["cache"].detail == "tiers: cpu, disk, s3"
    assert not found["cache"].problems
    assert [settings.type for settings in stores.made] == ["disk", "s3"]
    assert stores.closed == 2


def test_a_store_that_cannot_be_used(stores: Stores) -> None:
    """The tier's own sentence, behind its place in the YAML; it is closed all the same."""
    stores.refusal = "h:6379 does not answer; start it, or remove the tier"
    problems = problems_of(config_of(CPU, "{type: redis, url: 'redis://h:6379'}"))
    assert problems == [f"cache.tiers[1]: {stores.refusal}"]
    assert stores.closed == 1


def test_more_arena_than_memory(stores: Stores) -> None:
    """The key and both numbers."""
    (problem,) = problems_of(config_of(CPU.replace("1 MB", "900 TB")))
    assert problem.startswith("cache.tiers[0].capacity_bytes, prefill.kv_cache_bytes, decode.")
    assert "900000.0 GB of cache" in problem
    assert "GB available" in problem


def test_staging_memory_counts_without_a_cpu_tier(stores: Stores) -> None:
    """It is the arena then."""
    config = config_of("{type: s3, url: 's3://b'}", more=", staging_bytes: 900 TB")
    assert problems_of(config)[0].startswith("cache.staging_bytes, prefill.kv_cache_bytes")


def test_more_disk_than_there_is(stores: Stores, tmp_path: Path) -> None:
    """The key, both numbers and the folder, which need not be there; the store is not asked."""
    tier = f"{{type: disk, capacity_bytes: 900 TB, path: {tmp_path}/not/there}}"
    (problem,) = problems_of(config_of(CPU, tier))
    assert problem.startswith("cache.tiers[1].capacity_bytes: 900000.0 GB, but there is room for ")
    assert problem.endswith(f"{tmp_path}/not/there; lower it, or choose another path")
    assert not stores.made


def test_disk_tiers_share_a_disk_and_own_what_they_hold(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two capacities must fit together; chunks of the last run are room for this one."""
    monkeypatch.setattr(subject.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    tiers = [
        f"{{type: disk, capacity_bytes: 800 kB, path: {tmp_path}/{name}}}" for name in ("a", "b")
    ]
    assert [p.partition(":")[0] for p in problems_of(config_of(CPU, *tiers))] == [
        "cache.tiers[2].capacity_bytes"
    ]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "chunk").write_bytes(b"x" * 700_000)
    preflight(config_of(CPU, *tiers), {})


def test_a_secret_file_that_is_not_there(stores: Stores, tmp_path: Path) -> None:
    """Named with its key."""
    config = config_of(CPU, more=f", encrypt: true, secret_file: {tmp_path}/none")
    assert problems_of(config)[0].startswith("cache.secret_file: file ")

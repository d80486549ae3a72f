"""From the YAML to what the cache server and the engines are told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from splitserve.kv_transfer.cache.settings import (
    CacheClientConfig,
    CacheSettings,
    TierSettings,
    tier_names,
)
from splitserve.orchestrator.config import ConfigError, nodes, parse, tenant_tag
from splitserve.orchestrator.engines.command import engine_command
from splitserve.orchestrator.engines.connector_config import connector_config
from splitserve.orchestrator.launch.cache_settings import cache_settings
from splitserve.orchestrator.launch.paths import with_cache_paths
from splitserve.orchestrator.launch.plan import shown_config

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """
engine: mock
model: {path: m}
name: c
security: {secret_file: /s, api_keys: [{tenant: alice, key_env: K}]}
cache:
  chunk_tokens: 512
  lookup_timeout_s: 0.5
  load_timeout_s: 7
  save_generated: false
  save_limit_bytes: 3 MB
  write_queue_limit_bytes: 5 MB
  quotas:
    - {tenant: alice, tier: cpu, limit_bytes: 10}
    - {tenant: alice, tier: disk, limit_bytes: 20}
    - {tenant: "*", tier: cpu, limit_bytes: 30}
  tiers:
    - {type: cpu, capacity_bytes: 1 GB, ttl_s: 60}
    - {type: disk, capacity_bytes: 2 GB, path: PATH}
    - {type: redis, url: "redis://u:hushhush@h/0", admission: second_use, options: {a: b}}
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "splitserve"


def test_the_cache_server_is_told_everything(state: Path) -> None:
    """Every key arrives, tenants as tags, and the JSON can be read back."""
    config = with_cache_paths(parse(TEXT.replace("PATH", "/data")))
    assert config.cache is not None
    settings = cache_settings(config.cache, bytes(32))
    assert settings == CacheSettings(
        socket_path=f"{state}/c/cache.sock",
        chunk_tokens=512,
        tiers=(
            TierSettings(type="cpu", capacity_bytes=10**9, ttl_s=60),
            TierSettings(type="disk", capacity_bytes=2 * 10**9, url="/data"),
            TierSettings(
                type="redis",
                url="redis://u:hushhush@h/0",
                admission="second_use",
                options={"a": "b"},
            ),
        ),
        write_queue_limit_bytes=5 * 10**6,
        quota_bytes={tenant_tag(bytes(32), "alice"): {"cpu": 10, "disk": 20}, "*": {"cpu": 30}},
    )
    assert msgspec.json.decode(msgspec.json.encode(settings), type=CacheSettings) == settings


@pytest.mark.parametrize("engine", ["mock", "vllm"])
def test_engines_are_told_how_to_use_it(state: Path, engine: str) -> None:
    """In their connector's settings, without the tiers; nothing where there is no cache."""
    text = TEXT.replace("PATH", "/data").replace("engine: mock", f"engine: {engine}")
    text += "prefill: {cpus: [[0]]}\ndecode: {cpus: [[1]]}\n"
    config = with_cache_paths(parse(text))
    for node in nodes(config):
        argv = engine_command(config, node, "m", "i").argv
        told = json.loads(argv[argv.index("--kv-transfer-config") + 1])
        cache = connector_config(told["kv_connector_extra_config"]).cache
        assert cache == CacheClientConfig(
            socket_path=f"{state}/c/cache.sock",
            chunk_tokens=512,
            lookup_timeout_s=0.5,
            load_timeout_s=7,
            save_generated=False,
            save_limit_bytes=3 * 10**6,
        )
        assert "hushhush" not in " ".join(argv)
    without = connector_config({"incarnation": "P", "endpoint_port": 1, "control_port_base": 2})
    assert without.cache is None


@pytest.mark.parametrize(
    ("path", "expected"), [("~/c", "HOME/c"), ("c", "HOME/c"), (None, "STATE/c/cache")]
)
def test_paths_are_absolute(
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str | None,
    expected: str,
) -> None:
    """All processes find the same folder, wherever they run; by default below the state folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = TEXT.replace(", path: PATH", f", path: {path}" if path else "")
    cache = with_cache_paths(parse(text)).cache
    assert cache is not None
    expected = expected.replace("HOME", str(tmp_path)).replace("STATE", str(state))
    assert cache.tiers[1].path == expected


def test_the_shown_configuration_hides_passwords(state: Path) -> None:
    """And can be read again; with its paths filled in."""
    shown = shown_config(with_cache_paths(parse(TEXT.replace("PATH", "/data"))))
    assert "hushhush" not in shown
    assert "redis://(hidden)@h/0" in shown
    again = parse(shown).cache
    assert again is not None
    assert again.socket_path == f"{state}/c/cache.sock"


def test_tiers_have_names() -> None:
    """Their types, numbered from the second one on."""
    assert tier_names(["cpu", "s3", "disk", "s3", "s3"]) == ("cpu", "s3", "disk", "s3-2", "s3-3")


def test_errors_never_show_a_password() -> None:
    """Not even of a URL that is refused."""
    for url in ("http://u:hushhush@h/0", "redis://u:hushhush@h:port/0"):
        with pytest.raises(ConfigError) as caught:
            parse(TEXT.replace("redis://u:hushhush@h/0", url))
        assert "hushhush" not in str(caught.value)

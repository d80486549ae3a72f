"""Stores that the shared cache cannot use as they are configured: each is told at the start, by its
place in the YAML and with what to do. And hosts of different models on one store, which is no
mistake: they do not see each other's chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis
from support import cache_rig
from support.cache_rig import CacheEngine, prompt_of, served, settings_in, until
from support.store_servers import S3Server, redis_server

from splitserve.kv_transfer.cache.settings import CacheSettings, TierSettings
from splitserve.orchestrator.config import ConfigError, parse
from splitserve.orchestrator.launch.paths import with_cache_paths
from splitserve.orchestrator.launch.preflight import preflight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.store_servers import StoreServer

PASSWORD = "right"
CLUSTER = """
name: bad-input
engine: mock
model: {{path: mock}}
router: {{port: 0}}
prefill: &pool {{kv_cache_bytes: 1 MiB, transfer: {{transport: tcp}}}}
decode: *pool
cache:
  tiers:
    - {{type: cpu, capacity_bytes: 1 MiB}}
    - {tier}
"""


@pytest.fixture
def guarded(free_port: Callable[[], int], tmp_path: Path) -> Iterator[StoreServer]:
    """A Redis with a password."""
    server = redis_server(free_port(), tmp_path, "--requirepass", PASSWORD)
    yield server
    server.kill()


def _problems(tier: str) -> str:
    """What is said at the start of a cluster with that lower tier."""
    with pytest.raises(ConfigError) as caught:
        preflight(with_cache_paths(parse(CLUSTER.format(tier=tier))), {})
    return "\n".join(caught.value.problems)


def test_a_store_that_is_not_there(free_port: Callable[[], int]) -> None:
    """Nobody listens: the address, and the question that helps."""
    port = free_port()
    said = _problems(f"{{type: redis, url: 'redis://127.0.0.1:{port}/0'}}")
    assert said.startswith("cache.tiers[1]: the redis tier at redis://127.0.0.1:")
    assert "cannot be reached" in said
    assert "is it running?" in said


def test_a_wrong_password(guarded: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told as such, and not repeated; with the right one the cluster may start."""
    monkeypatch.setenv("BANK_PASSWORD", "wrong-one")
    tier = (
        f"{{type: redis, url: 'redis://127.0.0.1:{guarded.port}/0', "
        "options: {password: '${BANK_PASSWORD}'}}"
    )
    said = _problems(tier)
    assert said.startswith("cache.tiers[1]: ")
    assert "refuses the credentials" in said
    assert "correct username and password" in said
    assert "wrong-one" not in said
    monkeypatch.setenv("BANK_PASSWORD", PASSWORD)
    preflight(with_cache_paths(parse(CLUSTER.format(tier=tier))), {})


def test_more_than_a_store_or_a_disk_holds(guarded: StoreServer, tmp_path: Path) -> None:
    """Both numbers, and the key to change."""
    with redis.Redis(port=guarded.port, password=PASSWORD) as client:
        client.config_set("maxmemory", 10_000_000)
    tier = (
        f"{{type: redis, capacity_bytes: 1 GB, url: 'redis://:{PASSWORD}@127.0.0.1:"
        f"{guarded.port}/0'}}"
    )
    said = _problems(tier)
    assert "1000000000 bytes" in said
    assert "maxmemory is 10000000" in said
    assert "capacity_bytes" in said
    assert PASSWORD not in said
    said = _problems(f"{{type: disk, capacity_bytes: 1000000 GiB, path: {tmp_path / 'disk'}}}")
    assert "cache.tiers[1].capacity_bytes: 1073741.8 GB, but there is room for" in said
    assert "lower it" in said


def test_a_bucket_that_is_not_there(
    free_port: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers, the bucket does not exist; and credentials that are refused."""
    monkeypatch.setenv("BANK_KEY", "me")
    server = S3Server(free_port(), tmp_path)
    tier = (
        "{type: s3, url: 's3://nowhere/here', options: {access_key: '${BANK_KEY}', "
        f"secret_key: '${{BANK_KEY}}', region: us-east-1, endpoint: '{server.endpoint}'}}}}"
    )
    try:
        assert "there is no such bucket; make it or correct the url" in _problems(tier)
        server.make_bucket("nowhere")
        preflight(with_cache_paths(parse(CLUSTER.format(tier=tier))), {})
        server.refuse_credentials(True)
        assert "refuses the credentials" in _problems(tier)
    finally:
        server.kill()


def test_hosts_of_different_models_on_one_store(
    free_port: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts with one model find each other's chunks in Redis. A third one whose fingerprint
    differs finds none, computes, and its own chunks lie beside theirs.
    """
    server = redis_server(free_port(), tmp_path)
    prompt = prompt_of(200)
    try:
        with redis.Redis(port=server.port) as client:
            assert _host_serves(tmp_path / "a", server.port, prompt) == 0
            until(lambda: client.dbsize() == 3, "chunks in the store")
            first = set(client.keys("*"))
            assert _host_serves(tmp_path / "b", server.port, prompt) > 0
            assert set(client.keys("*")) == first
            monkeypatch.setattr(cache_rig, "FINGERPRINT", {"weights": "other"})
            assert _host_serves(tmp_path / "c", server.port, prompt) == 0
            until(lambda: client.dbsize() == 6, "both models' chunks in the store")
            assert first < set(client.keys("*"))
    finally:
        server.kill()


def _host_serves(folder: Path, port: int, prompt: list[int]) -> int:
    """A host with a cache server of its own serves the prompt rightly; tokens that it had not to
    compute. What it has saved is written to the store before it ends.
    """
    folder.mkdir()
    shared = TierSettings(type="redis", url=f"redis://127.0.0.1:{port}/0")
    own = settings_in(folder)
    settings = CacheSettings(
        socket_path=own.socket_path, chunk_tokens=own.chunk_tokens, tiers=(*own.tiers, shared)
    )
    with served(settings) as host:
        engine = CacheEngine(settings)
        try:
            request = engine.serve(prompt)
            engine.until_saved()
            until(lambda: not host.book.tiers[0].writing, "writes to end")
        finally:
            engine.stop()
    return request.cached

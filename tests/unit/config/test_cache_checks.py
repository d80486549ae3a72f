"""The section `cache`: what it may say, and what is refused with which remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.config import (
    ClusterConfig,
    ConfigError,
    cache_secret,
    parse,
    tenant_tag,
)
from splitserve.orchestrator.config.cache_checks import shown_url

if TYPE_CHECKING:
    from pathlib import Path

BASE = "model: {path: m}\nengine: mock\n"
CPU = "{type: cpu, capacity_bytes: 1 GB}"
REDIS = "{type: redis, url: 'redis://h:6379/0'}"
KEYS = "security: {api_keys: [{tenant: a, key_env: K}]}\n"


def config_of(cache: str, more: str = "") -> ClusterConfig:
    """The cluster with that ``cache``."""
    return parse(f"{BASE}{more}cache: {cache}\n")


def problems_of(cache: str, more: str = "") -> list[str]:
    """What is wrong with that ``cache``."""
    with pytest.raises(ConfigError) as caught:
        config_of(cache, more)
    return caught.value.problems


def test_without_the_section_there_is_no_cache() -> None:
    """Off is the default."""
    assert parse(BASE).cache is None


def test_every_key_can_be_given() -> None:
    """All tiers with all keys, sizes with units."""
    cache = config_of(
        f"{{chunk_tokens: 128, encrypt: true, secret_file: /s, quotas: [{{tenant: '*', tier: disk, "
        f"limit_bytes: 1 MB}}], tiers: [{CPU}, {{type: disk, capacity_bytes: 1 GiB, path: /c, "
        "eviction: lru, ttl_s: 60, admission: second_use}, "
        "{type: s3, url: 's3://b/p', options: {endpoint: 'http://h'}}]}"
    ).cache
    assert cache is not None
    assert [tier.type for tier in cache.tiers] == ["cpu", "disk", "s3"]
    assert cache.tiers[1].capacity_bytes == 2**30
    assert cache.quotas[0].limit_bytes == 10**6


@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        ("{type: tape}", "input should be 'cpu', 'disk', 'redis', 'mooncake' or 's3' (got 'tape')"),
        ("{type: cpu}", "capacity_bytes: required for a cpu tier, e.g. 4 GiB"),
        ("{type: disk}", "capacity_bytes: required for a disk tier, e.g. 4 GiB"),
        (f"{REDIS}, {CPU}", "cache.tiers[1]: a cpu tier comes first; move it to the top"),
        (f"{REDIS}, {REDIS}", "cache.tiers[1]: the same redis tier as cache.tiers[0]"),
        ("{type: redis}", "url: required for a redis tier (redis://, rediss://)"),
        ("{type: redis, url: 'http://h'}", "a redis tier takes redis://, rediss:// (got 'http"),
        ("{type: redis, url: 'redis://'}", "redis:// names no host"),
        ("{type: redis, url: 'redis://h:x'}", "is no URL"),
        ("{type: mooncake}", "url: required for a mooncake tier (mooncake://)"),
        ("{type: mooncake, url: 'mooncake:///x'}", "names no host"),
        ("{type: s3, url: 's3:b'}", "takes s3://, gs://, az://, file:// (got 's3:b')"),
        ("{type: s3, url: 's3://'}", "names no bucket"),
        ("{type: s3, url: 'file://b/c'}", "write file:///FOLDER"),
        ("{type: s3, url: 's3://b', path: /x}", "only a disk tier has one; give a s3 tier a `url`"),
        ("{type: disk, capacity_bytes: 1, url: 'file:///x'}", "give its folder as `path`"),
        ("{type: cpu, capacity_bytes: 1, admission: never}", "passes through the cpu tier"),
        (
            "{type: s3, url: 's3://b', options: {aws_secret_access_key: abc}}",
            "options.aws_secret_access_key: secrets do not belong into the YAML; write ${NAME}",
        ),
    ],
)
def test_a_tier_that_cannot_be(tiers: str, problem: str) -> None:
    """One sentence with the key's path and the remedy."""
    (found,) = problems_of(f"{{tiers: [{tiers}]}}")
    assert found.startswith("cache.tiers[")
    assert problem in found


@pytest.mark.parametrize(
    "tier",
    [
        REDIS,
        "{type: redis, url: 'rediss://u:p@h'}",
        "{type: mooncake, url: 'mooncake://h:50051', options: {replicas: '2'}}",
        "{type: s3, url: 'gs://b'}",
        "{type: s3, url: 'az://b/p'}",
        "{type: s3, url: 'file:///x'}",
        "{type: s3, url: 's3://b', options: {secret: '${NAME}'}}",
        f"{REDIS}, {{type: redis, url: 'redis://other'}}",
    ],
)
def test_tiers_that_can_be(tier: str) -> None:
    """Every scheme, two stores of one kind, and secrets by variable."""
    config_of(f"{{tiers: [{tier}]}}")


def test_chunks_are_whole_blocks() -> None:
    """In both pools, with the nearest size that fits."""
    found = problems_of(f"{{chunk_tokens: 200, tiers: [{CPU}]}}")
    assert found == [
        f"cache.chunk_tokens is 200, no multiple of {pool}.engine_args.block_size 128; use 256"
        for pool in ("prefill", "decode")
    ]


def test_a_cache_without_tiers() -> None:
    """At least one."""
    assert problems_of("{tiers: []}")[0].startswith("cache.tiers (line 3): list should have at")


@pytest.mark.parametrize(
    ("quotas", "problem"),
    [
        (
            "{tenant: a, tier: disk, limit_bytes: 1}",
            "tier: there is no tier 'disk'; known: cpu, redis",
        ),
        ("{tenant: b, tier: cpu, limit_bytes: 1}", "tenant: there is no tenant 'b'; known: a"),
        (
            "{tenant: a, tier: cpu, limit_bytes: 1}, {tenant: a, tier: cpu, limit_bytes: 2}",
            "cache.quotas[1]: a second quota of a in cpu",
        ),
    ],
)
def test_quotas_name_what_there_is(quotas: str, problem: str) -> None:
    """Tenants of the API keys, tiers of the cache, each pair once."""
    security = KEYS.replace("{", "{secret_file: /s, ", 1)
    (found,) = problems_of(f"{{tiers: [{CPU}, {REDIS}], quotas: [{quotas}]}}", security)
    assert problem in found


def test_stored_chunks_need_a_secret_that_lasts() -> None:
    """Tenants' salts and keys must be the same at the next `up`."""
    (encrypted,) = problems_of(f"{{encrypt: true, tiers: [{CPU}]}}")
    assert encrypted.startswith("cache.encrypt: ")
    (salts,) = problems_of(f"{{tiers: [{CPU}, {REDIS}]}}", KEYS)
    assert salts.startswith("security.secret_file: needed when tenants have keys and the cache has")
    config_of(f"{{tiers: [{CPU}]}}", KEYS)
    config_of(f"{{encrypt: true, secret_file: /s, tiers: [{CPU}, {REDIS}]}}")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:p@ss@h/0", "redis://(hidden)@h/0"),
        ("rediss://user:p@h?db=1&password=x", "rediss://(hidden)@h?db=1&password=(hidden)"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_urls_are_shown_without_passwords(url: str, shown: str) -> None:
    """User, password and secrets of the query are hidden, the rest is not."""
    assert shown_url(url) == shown


def test_the_secret_of_the_cache(tmp_path: Path) -> None:
    """From its own file, or from the cluster's secret; never that itself. A file that others can
    read is refused.
    """
    path = tmp_path / "secret"
    path.write_text("ab" * 16)
    path.chmod(0o600)
    own = config_of(f"{{secret_file: {path}, tiers: [{CPU}]}}")
    assert cache_secret(own, bytes(32)) == bytes([0xAB]) * 16
    derived = cache_secret(config_of(f"{{tiers: [{CPU}]}}"), bytes(32))
    assert len(derived) == 16
    assert derived != bytes(16)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"cache\.secret_file: .* can be read by others"):
        cache_secret(own, bytes(32))


def test_a_tenants_tag_tells_nothing() -> None:
    """Sixteen hex digits that follow from the secret and the name; none for no tenant."""
    tag = tenant_tag(bytes(32), "alice")
    assert len(bytes.fromhex(tag)) == 8
    assert tag == tenant_tag(bytes(32), "alice")
    assert len({tag, tenant_tag(bytes(32), "bob"), tenant_tag(bytes([1] * 32), "alice")}) == 3
    assert tenant_tag(bytes(32), "") == ""


def test_engines_on_gpus_have_no_cache_yet() -> None:
    """Copies go to and from host memory: a GPU pool beside `cache` is refused."""
    more = "experimental_cuda: true\nprefill: {gpus: [[0]]}\ndecode: {gpus: [[1]]}\n"
    problems = problems_of(f"{{chunk_tokens: 128, tiers: [{CPU}]}}", more)
    assert any("prefill.gpus" in p and "remove `cache`" in p for p in problems), problems

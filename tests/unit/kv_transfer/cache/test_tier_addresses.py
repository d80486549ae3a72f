"""URLs and options of tiers, and how they are chosen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tiers.address import (
    expand,
    read_options,
    without_userinfo,
)
from splitserve.kv_transfer.cache.tiers.base import TierConfigError
from splitserve.kv_transfer.cache.tiers.redis import RedisOptions
from splitserve.kv_transfer.cache.tiers.registry import create


def test_variables_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one; a missing one is an error with its name; a dollar alone is a dollar."""
    monkeypatch.setenv("ONE", "1${TWO}")
    monkeypatch.delenv("TWO", raising=False)
    assert expand("$a ${ONE} ${ONE}", "here") == "$a 1${TWO} 1${TWO}"
    with pytest.raises(TierConfigError, match="here: the environment variable TWO is not set"):
        expand("${TWO}", "here")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:pw@host:1/2", "redis://host:1/2"),
        ("redis://:p@w@host", "redis://host"),
        ("s3://bucket/folder", "s3://bucket/folder"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    """The rest stays as it was."""
    assert without_userinfo(url) == shown


def test_options_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are read from text, variables are replaced first."""
    monkeypatch.setenv("SECONDS", "1.5")
    options = {"timeout_s": "${SECONDS}", "connections": "3", "password": "5"}
    read = read_options(TierSettings(type="redis", options=options), RedisOptions)
    assert read == RedisOptions(timeout_s=1.5, connections=3, password="5")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "redis", "url": ""}, r"the redis tier needs a url \(redis://, rediss://\)"),
        ({"type": "redis", "url": "http://u:hunter2@h"}, r"'http://h' has the scheme 'http'"),
        ({"type": "redis", "url": "redis://u:hunter2@h:port"}, r"'redis://h:port'"),
        ({"type": "redis", "url": "redis://h/name"}, "redis://host:port/number"),
        ({"type": "redis", "url": "redis:///1"}, "redis://host:port/number"),
        ({"type": "redis", "url": "redis://h", "options": {"ttl": "1"}}, "'ttl' is unknown; known"),
        ({"type": "redis", "url": "redis://h", "options": {"timeout_s": "0"}}, "timeout_s"),
        ({"type": "redis", "url": "redis://h", "options": {"connections": "0"}}, "connections"),
        ({"type": "redis", "url": "rediss://h", "options": {"ca_file": "/no/file"}}, "ca_file"),
        ({"type": "mooncake", "url": "redis://h"}, "known are mooncake://"),
        ({"type": "mooncake", "url": "mooncake://"}, "mooncake://host:port"),
        ({"type": "mooncake", "url": "mooncake://h/x"}, "mooncake://host:port"),
        ({"type": "mooncake", "url": "mooncake://u:hunter2@h"}, "mooncake://host:port"),
        ({"type": "mooncake", "url": "mooncake://h", "options": {"protocol": "x"}}, "protocol"),
        ({"type": "mooncake", "url": "mooncake://h", "options": {"admin_port": "0"}}, "admin_port"),
        ({"type": "s3", "url": "redis://h"}, "known are s3://, gs://, az://"),
        ({"type": "s3", "url": "s3:///folder"}, "s3://bucket/folder"),
        ({"type": "s3", "url": "s3://b", "options": {"part_bytes": "9"}}, "part_bytes"),
        ({"type": "s3", "url": "s3://b", "options": {"concurrency": "0"}}, "concurrency"),
        ({"type": "cpu"}, r"'cpu'; known are disk, redis, mooncake, s3"),
        ({"type": "tape"}, r"'tape'; known are disk, redis, mooncake, s3"),
    ],
)
def test_bad_settings(changes: dict[str, Any], said: str) -> None:
    """Each is explained, without the password."""
    settings = msgspec.structs.replace(TierSettings(type="disk"), **changes)
    with pytest.raises(TierConfigError, match=said) as caught:
        create(settings)
    assert "hunter2" not in str(caught.value)

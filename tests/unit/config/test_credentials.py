"""Where secrets come from, and what is said when they cannot be read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from splitserve.kv_transfer.cache.settings import CACHE_SECRET_ENV
from splitserve.orchestrator.config import (
    SECRET_ENV,
    SECRET_FILE_ENV,
    ClusterConfig,
    ConfigError,
    cluster_secret,
    parse,
    secret_for,
    secret_variables,
    shared_secret,
    tenants_by_key,
)
from splitserve.orchestrator.config.credentials import is_closed

if TYPE_CHECKING:
    from pathlib import Path


def config_with(security: str) -> ClusterConfig:
    """A mock cluster with that security section."""
    return parse(f"engine: mock\nmodel: {{path: m}}\nsecurity: {security}\n")


def test_without_a_file_each_call_makes_a_new_secret() -> None:
    """Two runs never share a secret by accident."""
    config = config_with("{}")
    assert len(secret_for(config, {})) == 32
    assert secret_for(config, {}) != secret_for(config, {})


def test_the_secret_of_a_file(tmp_path: Path) -> None:
    """The file's hex digits are the secret."""
    path = tmp_path / "secret"
    path.write_text("ab" * 16 + "\n")
    path.chmod(0o600)
    assert secret_for(config_with(f"{{secret_file: {path}}}"), {}) == bytes([0xAB] * 16)


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        (None, 0o600, "does not exist; make one with"),
        ("ab" * 16, 0o644, "can be read by others; run `chmod 600"),
        ("no hex", 0o600, "hexadecimal"),
        ("abcd", 0o600, "at least 16"),
    ],
)
def test_a_bad_secret_file_is_explained(
    tmp_path: Path, content: str | None, mode: int, expected: str
) -> None:
    """Missing, readable by others, no hex, too short."""
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=expected) as caught:
        secret_for(config_with(f"{{secret_file: {path}}}"), {})
    assert content is None or content not in str(caught.value)


def test_the_secret_of_a_started_process() -> None:
    """It comes by environment; without it the process says who sets it."""
    assert cluster_secret({SECRET_ENV: "cd" * 16}) == bytes([0xCD] * 16)
    with pytest.raises(ConfigError, match="splitserve up"):
        cluster_secret({})


def test_api_keys_come_from_files_and_variables(tmp_path: Path) -> None:
    """Blanks around a key do not count."""
    path = tmp_path / "key"
    path.write_text("  first\n")
    config = config_with(
        f"{{api_keys: [{{tenant: a, key_file: {path}}}, {{tenant: b, key_env: SECOND}}]}}"
    )
    assert tenants_by_key(config, {"SECOND": "second"}) == {"first": "a", "second": "b"}


def test_every_unreadable_api_key_is_named(tmp_path: Path) -> None:
    """A missing file and an unset variable are two problems."""
    config = config_with(
        f"{{api_keys: [{{tenant: a, key_file: {tmp_path}/no}}, {{tenant: b, key_env: UNSET}}]}}"
    )
    with pytest.raises(ConfigError) as caught:
        tenants_by_key(config, {})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "security.api_keys[0].key_file",
        "security.api_keys[1].key_env",
    ]


def test_one_key_for_two_tenants_is_refused() -> None:
    """Otherwise the second tenant would silently be the first."""
    config = config_with("{api_keys: [{tenant: a, key_env: K}, {tenant: b, key_env: K}]}")
    with pytest.raises(ConfigError, match="already given to tenant 'a'"):
        tenants_by_key(config, {"K": "same"})


def test_the_environment_goes_before_the_yaml(tmp_path: Path) -> None:
    """A variable with the secret, then one with its file, then the YAML's file."""
    files = []
    for digits in ("ab", "cd"):
        path = tmp_path / digits
        path.write_text(digits * 16)
        path.chmod(0o600)
        files.append(path)
    config = config_with(f"{{secret_file: {files[0]}}}")
    environ = {SECRET_FILE_ENV: str(files[1])}
    assert shared_secret(config, {}) == bytes([0xAB] * 16)
    assert shared_secret(config, environ) == secret_for(config, environ) == bytes([0xCD] * 16)
    assert shared_secret(config, environ | {SECRET_ENV: "ef" * 16}) == bytes([0xEF] * 16)
    assert cluster_secret(environ) == bytes([0xCD] * 16)
    with pytest.raises(ConfigError, match="give every host the same one"):
        shared_secret(config_with("{}"), {})


@pytest.mark.parametrize(
    ("mode", "user", "group", "is_fine"),
    [
        (0o400, 1000, 1000, True),
        (0o440, 1000, 1000, False),
        (0o440, 0, 1000, True),
        (0o460, 0, 1000, False),
        (0o440, 0, 0, False),
        (0o444, 0, 1000, False),
    ],
)
def test_a_group_may_read_what_root_has_given_it(
    mode: int, user: int, group: int, is_fine: bool
) -> None:
    """As Kubernetes mounts secrets; nobody else may, nor may a group write."""
    found = os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))
    assert is_closed(found) is is_fine


def test_no_engine_inherits_what_is_the_routers() -> None:
    """The cluster's secrets and the clients' keys."""
    config = config_with("{api_keys: [{tenant: a, key_env: A_KEY}, {tenant: b, key_file: /b}]}")
    assert secret_variables(config) == {SECRET_ENV, CACHE_SECRET_ENV, "A_KEY"}

"""Where the cluster's secrets come from. They are read here and never printed, and no command line
holds one.

``SPLITSERVE_SECRET`` holds the cluster secret in hexadecimal, ``SPLITSERVE_SECRET_FILE`` names a
file with it; either goes before ``security.secret_file``. ``up`` and agents hand it on in a file
that only its owner can read, so that it is in no engine's environment. Clients' API keys are read
by the router itself: from key files, or from the variables that ``key_env`` names, which no engine
inherits.
"""

from __future__ import annotations

import re
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.settings import CACHE_SECRET_ENV
from splitserve.kv_transfer.channel import SECRET_ENV as SECRET_ENV
from splitserve.kv_transfer.channel import SECRET_FILE_ENV as SECRET_FILE_ENV
from splitserve.kv_transfer.channel import mac, parse_secret, secret_in
from splitserve.orchestrator.config.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from splitserve.orchestrator.config.schema import ApiKeyConfig, ClusterConfig

TENANT_TAG_BYTES = 8
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""In the names of variables whose values are not shown."""


def new_secret() -> bytes:
    """A fresh cluster secret."""
    return secrets.token_bytes(32)


def cluster_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that this process was given; raises ``ConfigError`` when there is none or it is
    malformed.
    """
    found = _given_secret(environ)
    if found is None:
        raise ConfigError(
            [
                f"{SECRET_ENV}: not set, nor {SECRET_FILE_ENV}; `splitserve up` gives every process"
                " it starts the secret"
            ]
        )
    return found


def secret_for(config: ClusterConfig, environ: Mapping[str, str]) -> bytes:
    """The secret that the environment or ``security.secret_file`` gives, or else a new one."""
    given = _configured_secret(config, environ)
    return given if given is not None else new_secret()


def shared_secret(config: ClusterConfig, environ: Mapping[str, str]) -> bytes:
    """The same, for a process whose peers are started by somebody else: there has to be one."""
    given = _configured_secret(config, environ)
    if given is None:
        raise ConfigError(
            [
                "security.secret_file: not set, nor the variables "
                f"{SECRET_ENV} or {SECRET_FILE_ENV}; make a secret with `openssl rand -hex 32` and"
                " give every host the same one"
            ]
        )
    return given


def _configured_secret(config: ClusterConfig, environ: Mapping[str, str]) -> bytes | None:
    given = _given_secret(environ)
    if given is None and config.security.secret_file is not None:
        return _secret_in(config.security.secret_file, "security.secret_file")
    return given


def _given_secret(environ: Mapping[str, str]) -> bytes | None:
    if not environ.get(SECRET_ENV) and (file := environ.get(SECRET_FILE_ENV)):
        return _secret_in(file, SECRET_FILE_ENV)
    try:
        return secret_in(environ)
    except ValueError as error:
        raise ConfigError([f"{error}; make one with `openssl rand -hex 32`"]) from None


def cache_secret(config: ClusterConfig, secret: bytes) -> bytes:
    """What the keys of the cache's tenants follow from: ``cache.secret_file``, or else the cluster
    secret.
    """
    if config.cache is None or config.cache.secret_file is None:
        return mac(secret, "cache encryption")
    return _secret_in(config.cache.secret_file, "cache.secret_file")


def secret_variables(config: ClusterConfig) -> frozenset[str]:
    """Names of the variables that no engine may inherit."""
    keys = {entry.key_env for entry in config.security.api_keys if entry.key_env is not None}
    return frozenset({SECRET_ENV, CACHE_SECRET_ENV, *keys})


def tenant_tag(secret: bytes, tenant: str) -> str:
    """What the cache knows a tenant by: a short keyed hash of its name; empty for the tenant
    without a name.
    """
    return mac(secret, "tenant tag", tenant.encode())[:TENANT_TAG_BYTES].hex() if tenant else ""


def _secret_in(file: str, where: str) -> bytes:
    path = Path(file).expanduser()
    text = _read(path, where, "make one with `openssl rand -hex 32`")
    if not is_closed(path.stat()):
        raise ConfigError([f"{where}: {path} can be read by others; run `chmod 600 {path}`"])
    return _decoded(text, f"{where}: {path}")


def is_closed(found: os.stat_result) -> bool:
    """Whether only a file's owner can read it. An administrator may give it to a group: Kubernetes
    mounts secrets for processes without root that way.
    """
    group = stat.S_IRWXG if found.st_uid != 0 or found.st_gid == 0 else stat.S_IWGRP
    return not found.st_mode & (group | stat.S_IRWXO)


def tenants_by_key(config: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """API key to tenant, for the router. Raises ``ConfigError`` naming each key that cannot be
    read, is empty or is used twice.
    """
    problems: list[str] = []
    tenants: dict[str, str] = {}
    for index, entry in enumerate(config.security.api_keys):
        where = f"security.api_keys[{index}]"
        try:
            key = _api_key(entry, where, environ)
        except ConfigError as error:
            problems += error.problems
            continue
        if key in tenants:
            problems.append(
                f"{where}: the same key was already given to tenant {tenants[key]!r}; make "
                "another one"
            )
        tenants[key] = entry.tenant
    if problems:
        raise ConfigError(problems)
    return tenants


def _api_key(entry: ApiKeyConfig, where: str, environ: Mapping[str, str]) -> str:
    if entry.key_env is not None:
        key = environ.get(entry.key_env, "").strip()
        if not key:
            raise ConfigError(
                [
                    f"{where}.key_env: variable {entry.key_env} is not set or empty; export it "
                    "before `splitserve up`"
                ]
            )
        return key
    assert entry.key_file is not None
    path = Path(entry.key_file).expanduser()
    key = _read(path, f"{where}.key_file", "write the key into it").strip()
    if not key:
        raise ConfigError([f"{where}.key_file: {path} is empty; write the key into it"])
    return key


def _read(path: Path, where: str, remedy: str) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise ConfigError([f"{where}: file {path} does not exist; {remedy}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        message = f"{where}: {path} cannot be read: {why}; correct the path, or its rights"
        raise ConfigError([message]) from error


def _decoded(text: str, where: str) -> bytes:
    try:
        return parse_secret(text)
    except ValueError as error:
        raise ConfigError([f"{where}: {error}; make one with `openssl rand -hex 32`"]) from None

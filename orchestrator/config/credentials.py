"""Where the cluster's secrets come from. They are read here, passed on by environment only, and
never printed.

``SPLITSERVE_SECRET`` (hex) carries the cluster secret to every process that ``up`` starts. Clients'
API keys are read by the router itself: from key files, or from the variables that ``key_env``
names, which it inherits from ``up``.
"""

from __future__ import annotations

import re
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.kv_transfer.channel import SECRET_ENV as SECRET_ENV
from splitserve.kv_transfer.channel import mac, parse_secret
from splitserve.orchestrator.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.orchestrator.config.schema import ApiKeyConfig, ClusterConfig

TENANT_TAG_BYTES = 8
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""In the names of variables whose values are not shown."""


def new_secret() -> bytes:
    """A fresh cluster secret."""
    return secrets.token_bytes(32)


def cluster_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that ``up`` handed to this process; raises ``ConfigError`` when there is none or
    it is no hex.
    """
    text = environ.get(SECRET_ENV, "")
    if not text:
        raise ConfigError(
            [f"{SECRET_ENV}: not set; it is set by `splitserve up` for every process it starts"]
        )
    return _decoded(text, SECRET_ENV)


def secret_for(config: ClusterConfig) -> bytes:
    """The secret of ``security.secret_file``, or a new one when the YAML names no file."""
    if config.security.secret_file is None:
        return new_secret()
    return _secret_in(config.security.secret_file, "security.secret_file")


def cache_secret(config: ClusterConfig, secret: bytes) -> bytes:
    """What the keys of the cache's tenants follow from: ``cache.secret_file``, or else the cluster
    secret.
    """
    if config.cache is None or config.cache.secret_file is None:
        return mac(secret, "cache encryption")
    return _secret_in(config.cache.secret_file, "cache.secret_file")


def tenant_tag(secret: bytes, tenant: str) -> str:
    """What the cache knows a tenant by: a short keyed hash of its name; empty for the tenant
    without a name.
    """
    return mac(secret, "tenant tag", tenant.encode())[:TENANT_TAG_BYTES].hex() if tenant else ""


def _secret_in(file: str, where: str) -> bytes:
    path = Path(file).expanduser()
    text = _read(path, where, "make one with `openssl rand -hex 32`")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError([f"{where}: {path} can be read by others; run `chmod 600 {path}`"])
    return _decoded(text, f"{where}: {path}")


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

"""The servers that ``splitserve bench`` sends its load to: the running cluster's router, and
another one beside it.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from splitserve.orchestrator.cli.bench_tool import API_KEY_ENV
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.router_tls import connection_to
from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.config.credentials import tenants_by_key

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig

COMPARED_KEY_ENV = "COMPARE_API_KEY"
"""The other server's key; never the cluster's."""
ANSWER_LIMIT_S = 10.0
ANSWER_LIMIT_BYTES = 2**20


@dataclass(frozen=True)
class Server:
    """An OpenAI server."""

    name: str
    url: str
    """Without ``/v1``."""
    model: str
    limit_tokens: int | None
    """Prompt and answer together; None when it does not say."""
    api_key: str
    ca_file: str = ""
    """By which its certificate is verified; empty: by the system's."""

    @property
    def host(self) -> str:
        """Its address, for those who must not use a proxy."""
        return urlsplit(self.url).hostname or ""


def cluster_server(config: ClusterConfig, url: str) -> Server:
    """The router of the cluster. Raises ``RefusedError``."""
    tls = config.security.tls
    ca_file = str(Path(tls.ca_file).expanduser()) if tls is not None else ""
    key = _cluster_key(config)
    return _asked(config.name, url, config.model.name, key, API_KEY_ENV, ca_file)


def compared_server(url: str, model: str | None) -> Server:
    """Another server at ``url``, serving ``model`` or else the first that it names. Raises
    ``RefusedError``.
    """
    url = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RefusedError(f"--compare {url}: write an address such as http://127.0.0.1:8001")
    if parts.username or parts.password:
        raise RefusedError(f"--compare: no key in the address; set {COMPARED_KEY_ENV} instead")
    return _asked(url, url, model, os.environ.get(COMPARED_KEY_ENV, ""), COMPARED_KEY_ENV)


def _cluster_key(config: ClusterConfig) -> str:
    """One of the cluster's keys: that of the environment, else the first that can be read here;
    empty where none is needed.
    """
    if not config.security.api_keys:
        return ""
    given = os.environ.get(API_KEY_ENV, "")
    try:
        keys = list(tenants_by_key(config, os.environ))
    except ConfigError as error:
        if given:
            return given
        raise RefusedError(
            f"{config.name} wants an API key: set {API_KEY_ENV} to one of its own; "
            f"{error.problems[0]}"
        ) from error
    return given if given in keys else keys[0]


def _asked(
    name: str, url: str, model: str | None, api_key: str, variable: str, ca_file: str = ""
) -> Server:
    status, answer = _models(url, api_key, ca_file)
    if status in (401, 403):
        raise RefusedError(f"{name} refuses the API key (status {status}); set {variable}")
    found = answer.get("data") if status == 200 else None
    models = {m["id"]: m for m in found or () if isinstance(m, dict) and "id" in m}
    if not models:
        raise RefusedError(f"{url}/v1/models answers {status} and names no model")
    if model is None:
        model = next(iter(models))
    elif model not in models:
        raise RefusedError(f"{name} does not serve {model!r}; it serves {', '.join(models)}")
    limit = models[model].get("max_model_len")
    return Server(name, url, model, limit if isinstance(limit, int) else None, api_key, ca_file)


def _models(url: str, api_key: str, ca_file: str) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        tls = ssl.create_default_context(cafile=ca_file or None)
        connection = connection_to(url, tls, ANSWER_LIMIT_S)
        try:
            connection.request("GET", f"{parts.path}/v1/models", headers=headers)
            response = connection.getresponse()
            answer = json.loads(response.read(ANSWER_LIMIT_BYTES))
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RefusedError(f"{url}/v1/models does not answer as it should: {error}") from error
    return response.status, answer if isinstance(answer, dict) else {}

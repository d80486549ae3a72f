"""How commands verify the router of a running cluster."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from splitserve.orchestrator.config import TlsConfig
from splitserve.orchestrator.config.tls import client_context

if TYPE_CHECKING:
    import ssl

    from splitserve.orchestrator.launch.files import ClusterRecord


def router_tls(record: ClusterRecord) -> ssl.SSLContext | None:
    """None for a router that speaks plain HTTP. Raises ``ConfigError``."""
    files = record.tls
    return client_context(TlsConfig(**msgspec.structs.asdict(files)) if files else None)


def connection_to(
    url: str, tls: ssl.SSLContext | None, timeout_s: float
) -> http.client.HTTPConnection:
    """A connection, not opened yet, to the server of ``url``."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=tls
        )
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)

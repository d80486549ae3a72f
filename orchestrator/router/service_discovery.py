"""``GET /internal/http_sd``: where the cluster's metrics are, in the form that Prometheus asks for
(``http_sd_configs``).

https://prometheus.io/docs/prometheus/latest/http_sd/. The router's own target has no label that its
metrics have, too: Prometheus would rename those. Engines are named as long as they are
members: one that is silent or draining is scraped, one that has died is not.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from splitserve.orchestrator.core.router_core import RouterCore

HTTP_SD_PATH = "/internal/http_sd"
_HOST = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,255}")


def targets_of(core: RouterCore, asked_host: bytes | None, scheme: str) -> list[dict[str, Any]]:
    """The router, by the name by which it was asked, and the engines; all speak ``scheme``. Raises
    ``ApiError`` 400 for who does not say whom he asks.
    """
    host = (asked_host or b"").decode("latin-1")
    if not _HOST.fullmatch(host):
        raise ApiError(400, "send a Host header: it is the router's own address in the answer")
    # Prometheus' own name; without it a target is asked by HTTP
    spoken = {"__scheme__": scheme} if scheme != "http" else {}
    router = {"component": "router", **spoken}
    groups: list[dict[str, Any]] = [{"targets": [host], "labels": router}]
    for name, node in sorted(core.membership.nodes.items()):
        address = urlsplit(node.description.engine_url).netloc
        labels = {
            "component": "engine",
            "role": node.role,
            "node": name,
            "pool": node.description.pool,
            **spoken,
        }
        groups.append({"targets": [address], "labels": labels})
    return groups

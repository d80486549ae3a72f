"""Agents that do not know the cluster secret: told once each, since they come every second."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from splitserve.orchestrator.agent.auth import HOST_HEADER

if TYPE_CHECKING:
    from splitserve.orchestrator.router.engine_client import RawHeaders
    from splitserve.orchestrator.router.incidents import Incidents

_log = logging.getLogger(__name__)

_NAME_LIMIT = 64
_STRANGERS_LIMIT = 256


class Strangers:
    """Who has been told of."""

    def __init__(self, incidents: Incidents) -> None:
        self._incidents = incidents
        self._told: set[str] = set()

    def tell(self, headers: RawHeaders) -> None:
        """Somebody wanted to be an agent, with these headers."""
        name = HOST_HEADER.lower().encode()
        given = next((value for key, value in headers if key == name), b"an unknown machine")
        host = "".join(c for c in given[:_NAME_LIMIT].decode("latin-1") if c.isprintable())
        if host in self._told or len(self._told) >= _STRANGERS_LIMIT:
            return
        self._told.add(host)
        what = (
            f"an agent on {host} has another cluster secret; give both machines the same one "
            "(security.secret_file, SPLITSERVE_SECRET or SPLITSERVE_SECRET_FILE)"
        )
        _log.error("%s", what)
        self._incidents.note("refused", "", what)

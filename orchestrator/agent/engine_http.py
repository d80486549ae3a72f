"""How an agent asks the HTTP server of its own engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from splitserve.orchestrator.config.tls import client_context

if TYPE_CHECKING:
    from splitserve.orchestrator.config import TlsConfig


@dataclass(frozen=True)
class EngineHttp:
    """One life's server. The agent has started it, so with TLS its certificate counts and not the
    address at which it is asked, which may be any of this machine.
    """

    url: str
    api_key: str
    tls: TlsConfig | None = None

    def session(self, timeout_s: float | None) -> aiohttp.ClientSession:
        """A session to use as a context; ``timeout_s`` is for each whole request, None when the
        caller holds the deadline.
        """
        context = client_context(self.tls, checks_name=False)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context if context is not None else True),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Authorization": f"Bearer {self.api_key}"},
        )

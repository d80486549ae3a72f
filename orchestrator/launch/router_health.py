"""Whether a router serves, as everybody may ask it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    import ssl

_HEALTH_TIMEOUT_S = 1.0


async def router_health(url: str, tls: ssl.SSLContext | None) -> str:
    """``ready``, ``waits for nodes``, or ``starting`` while it does not answer."""
    timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/health", ssl=tls if tls is not None else True) as response,
        ):
            return "ready" if response.status == 200 else "waits for nodes"
    except (aiohttp.ClientError, OSError, TimeoutError):
        return "starting"

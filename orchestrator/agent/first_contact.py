"""Asks the routers, before an engine is started for minutes, whether they would take this machine's
agents.
"""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import aiohttp

from splitserve.orchestrator.agent.link import PATH, agent_headers, obstacle_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

LIMIT_S = 5.0
CLOCK_SKEW_LIMIT_S = 3.0
"""Seconds by which both clocks may differ; the router's is told in whole seconds."""


class RouterRefusesError(Exception):
    """The router would not take this agent whatever its engine does; the message says why and what
    to do.
    """


async def ask_routers(
    router_urls: Sequence[str], secret: bytes, tls: ssl.SSLContext | None
) -> list[str]:
    """What ``ask_router`` says of each of them, asked at the same time. Raises
    ``RouterRefusesError`` when one refuses.
    """
    answers = await asyncio.gather(*(ask_router(url, secret, tls) for url in router_urls))
    return list(dict.fromkeys(line for lines in answers for line in lines))


async def ask_router(router_url: str, secret: bytes, tls: ssl.SSLContext | None) -> list[str]:
    """What a person should know before the node starts: that the router is away (it may come
    later), or that the clocks differ. Raises ``RouterRefusesError``.
    """
    verified = tls if tls is not None else True
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            aiohttp.ClientSession() as session,
            session.ws_connect(
                router_url + PATH,
                headers=agent_headers(secret),
                ssl=verified,
            ) as socket,
        ):
            date = socket._response.headers.get("Date", "")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        if obstacle := obstacle_of(error):
            raise RouterRefusesError(f"the router on {router_url}: {obstacle}") from error
        return [
            f"the router on {router_url} does not answer yet ({_in_words(error)}); the node starts "
            "and goes on trying"
        ]
    return _skew(date)


def _in_words(error: Exception) -> str:
    inner = getattr(error, "os_error", error)
    return getattr(inner, "strerror", None) or str(inner) or type(inner).__name__


def _skew(date: str) -> list[str]:
    try:
        ahead_s = time.time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return []
    if abs(ahead_s) <= CLOCK_SKEW_LIMIT_S:
        return []
    way = "ahead of" if ahead_s > 0 else "behind"
    return [
        f"this machine's clock is {abs(ahead_s):.0f} s {way} the router's; run NTP (chrony) on both"
    ]

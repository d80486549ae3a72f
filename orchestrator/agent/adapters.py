"""Which LoRA adapters an engine has loaded, asked of the engine itself when it is ready."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from splitserve.orchestrator.agent.messages import AdapterDescription
from splitserve.orchestrator.models.identity import weights_identity

if TYPE_CHECKING:
    from splitserve.orchestrator.agent.engine_http import EngineHttp

_log = logging.getLogger(__name__)

ADAPTERS_LIMIT = 256
"""Adapters of one engine that clients can ask for; the frame that tells the router has a bound."""
_TIMEOUT_S = 10.0


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    """The model that it adapts; None for the model itself."""


class _Cards(msgspec.Struct):
    data: list[_Card]


async def loaded_adapters(engine: EngineHttp) -> dict[str, AdapterDescription]:
    """The adapters by name. An engine that does not say serves its model only, and the log tells
    why.
    """
    try:
        async with (
            engine.session(_TIMEOUT_S) as session,
            session.get(f"{engine.url}/v1/models") as response,
        ):
            cards = msgspec.json.decode(await response.read(), type=_Cards).data
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
        _log.warning("the engine does not say which adapters it has: %r", error)
        return {}
    found = [card for card in cards if card.parent is not None]
    if len(found) > ADAPTERS_LIMIT:
        _log.error("of %d adapters only the first %d are served", len(found), ADAPTERS_LIMIT)
    return {card.id: await _described(card) for card in found[:ADAPTERS_LIMIT]}


async def _described(card: _Card) -> AdapterDescription:
    path = card.root or card.id
    content = await asyncio.to_thread(weights_identity, Path(path), None)
    return AdapterDescription(path=path, content=content)

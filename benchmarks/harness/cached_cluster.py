"""A running cluster with a cache as its operator sees it: who has what, and emptying it tier by
tier.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import aiohttp

    from harness.product import Product

POLL_S = 0.05
SETTLE_DEADLINE_S = 60.0


class CachedCluster:
    """The router's side of a ``Product`` that has a cache."""

    def __init__(self, product: Product, session: aiohttp.ClientSession) -> None:
        self._product = product
        self._session = session

    async def nodes(self) -> dict[str, Any]:
        """The router's view of its nodes."""
        async with self._session.get(f"{self._product.url}/internal/status") as answer:
            found: dict[str, Any] = (await answer.json())["nodes"]
        return found

    async def operate(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """An operator's wish. Raises ``aiohttp.ClientResponseError``."""
        url = f"{self._product.url}/internal/cache/{verb}"
        headers = self._product.operator_headers()
        async with self._session.post(url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            found: dict[str, Any] = await answer.json()
        return found

    async def wait_until_held(self, prompt: Sequence[int], tiers: Sequence[str]) -> None:
        """Every whole chunk of the prompt is in each of ``tiers``. Raises ``TimeoutError``."""
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        while True:
            found = await self.operate("lookup", {"tokens": list(prompt)})
            whole = found["chunks"] * found["chunk_tokens"]
            if all(found["tiers"].get(tier) == whole for tier in tiers):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(prompt)} tokens are not in {tiers}: {found}")
            await asyncio.sleep(POLL_S)

    async def forget_in_engines(self) -> dict[str, Any]:
        """The engines are idle and their own prefix caches empty; the nodes as they are then.
        Raises ``TimeoutError``.
        """
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        nodes = await self.nodes()
        while any(_is_busy(node) for node in nodes.values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engines do not become idle: {nodes}")
            await asyncio.sleep(POLL_S)
            nodes = await self.nodes()
        for node in nodes.values():
            url = node["engine_url"]
            headers = self._product.engine_headers(url)
            async with self._session.post(f"{url}/reset_prefix_cache", headers=headers) as answer:
                answer.raise_for_status()
        return nodes

    async def loaded_since(self, before: dict[str, Any], role: str, chunks: int) -> Counter[str]:
        """What the node of that role counted of its cache since ``before``, once it has loaded
        ``chunks`` chunks; without them after a deadline. Nodes report twice a second.
        """
        deadline = time.monotonic() + 5.0
        while True:
            nodes = await self.nodes()
            name = next(name for name, node in nodes.items() if node["role"] == role)
            found = Counter(nodes[name]["counters"])
            found.subtract(before[name]["counters"])
            if found["cache_loaded_chunks"] >= chunks or time.monotonic() > deadline:
                return found
            await asyncio.sleep(POLL_S)


def _is_busy(node: dict[str, Any]) -> bool:
    return bool(
        node["running"]
        or node["waiting"]
        or node["open_transfers"]
        or node["leased_blocks"]
        or node["counters"].get("cache_held_bytes")
        or node["free_blocks"] is None
        or node["free_blocks"] < node["total_blocks"] - 1
    )

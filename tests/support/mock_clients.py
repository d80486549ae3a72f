"""Clients that keep a cluster of mock engines busy and look at every answer."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import aiohttp

from support.mock_cluster import alone, prompt_of

if TYPE_CHECKING:
    from support.mock_cluster import Cluster

IN_FLIGHT = 16
SHORT_TOKENS, LONG_TOKENS = 12, 200


class Clients:
    """Clients that ask again and again, each for another prompt, and look at what they get."""

    def __init__(self, cluster: Cluster, long_tokens: int = LONG_TOKENS) -> None:
        self._long_tokens = long_tokens
        self.is_over = False
        self.answered = 0
        self._cluster = cluster
        self._numbers = itertools.count(1)

    async def keep_asking(self) -> None:
        """Until it is over. Fails with the first wrong answer."""
        while not self.is_over:
            number = next(self._numbers)
            prompt = prompt_of(20 + number * 37 % 400, start=number)
            tokens = self._long_tokens if number % 5 == 0 else SHORT_TOKENS
            ask = self._stream if number % 2 else self._cluster.text
            assert await ask(prompt, tokens) == alone(prompt, tokens)
            self.answered += 1

    async def _stream(self, prompt: list[int], tokens: int) -> str:
        stream: Any = await self._cluster.client.completions.create(
            model="mock",
            prompt=prompt,
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([chunk.choices[0].text async for chunk in stream])


async def retries_of(cluster: Cluster) -> float:
    """Attempts beyond the first, of all requests so far: with other nodes to go to, a node that
    does not wait for its requests would still fail none.
    """
    url = str(cluster.client.base_url).removesuffix("/v1/")
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        (line,) = re.findall(
            r"^splitserve_decode_leg_retries_total (\S+)$", await response.text(), re.M
        )
    return float(line)

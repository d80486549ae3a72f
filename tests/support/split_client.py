"""Asking a router and a single engine the same thing, and looking at what a cluster of real engines
holds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from support.up_process import UpProcess

REQUEST_LIMIT_S = 120.0


class Split:
    """A running cluster: its router, and its engines one by one."""

    def __init__(self, up: UpProcess, transfer_log: Path) -> None:
        self.up = up
        status = up.status()
        assert status is not None, up.story()
        self.url = str(status["url"]).removesuffix("/v1")
        self.transfer_log = transfer_log
        state = Path(up.env["XDG_STATE_HOME"]) / "splitserve"
        (token,) = state.glob("*/operator.token")
        self._operator_token = token.read_text()

    def key_of(self, engine_url: str) -> dict[str, str]:
        """The header that this engine asks for; the key is known to its process and its agent."""
        port = engine_url.rsplit(":", 1)[1]
        for process in self.up.processes():
            try:
                if ["--port", port] in pairs(process.cmdline()):
                    return {"Authorization": f"Bearer {process.environ()['VLLM_API_KEY']}"}
            except psutil.Error:
                continue
        raise AssertionError(f"no engine process for {engine_url}")

    async def nodes(self) -> dict[str, Any]:
        """The router's view of its nodes."""
        async with aiohttp.ClientSession() as session:
            found: dict[str, Any] = (await self._json(session, "/internal/status"))["nodes"]
        return found

    async def _json(self, session: aiohttp.ClientSession, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._operator_token}"}
        async with session.get(self.url + path, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
        return found

    async def ask(
        self, session: aiohttp.ClientSession, prompt: list[int], tokens: int
    ) -> dict[str, Any]:
        """A completion through the router: the first choice."""
        return await self._complete(session, self.url, prompt, tokens)

    async def ask_one_engine(
        self, session: aiohttp.ClientSession, node: str, prompt: list[int], tokens: int
    ) -> dict[str, Any]:
        """The same, from one engine that knows nothing of a split, with an empty prefix cache."""
        engine = (await self.nodes())[node]["engine_url"]
        return await self._complete(session, engine, prompt, tokens)

    async def _complete(
        self, session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int
    ) -> dict[str, Any]:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = self.key_of(url) if url != self.url else {}
        limit = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
        async with session.post(
            url + "/v1/completions", json=body, headers=headers, timeout=limit
        ) as answer:
            assert answer.status == 200, await answer.text()
            choice: dict[str, Any] = (await answer.json())["choices"][0]
        return choice

    async def forget_prefixes(self, session: aiohttp.ClientSession) -> None:
        """Empty the prefix cache of every engine."""
        for node in (await self.nodes()).values():
            url = node["engine_url"]
            async with session.post(
                url + "/reset_prefix_cache", headers=self.key_of(url)
            ) as answer:
                assert answer.status == 200, await answer.text()

    def transfers(self, side: str) -> list[dict[str, Any]]:
        """Every record of one side so far."""
        if not self.transfer_log.exists():
            return []
        records = [json.loads(line) for line in self.transfer_log.read_text().splitlines()]
        return [record for record in records if record["side"] == side]

    async def wait_until_idle(self, limit_s: float = 40) -> None:
        """Every engine has all of its blocks back (freed ones may stay cached) and owes nothing."""
        end = asyncio.get_running_loop().time() + limit_s
        while True:
            nodes = await self.nodes()
            busy = {
                name: node
                for name, node in nodes.items()
                if node["running"]
                or node["waiting"]
                or node["open_transfers"]
                or node["leased_blocks"]
                or node["free_blocks"] is None
                or node["free_blocks"] < node["total_blocks"] - 1
            }
            if not busy:
                return
            assert asyncio.get_running_loop().time() < end, busy
            await asyncio.sleep(0.2)


def start_split(config: str, folder: Path, limit_s: float) -> Split:
    """`splitserve up` with that configuration, serving; the caller closes ``up``."""
    path = folder / "cluster.yaml"
    log = folder / "transfers.jsonl"
    path.write_text(config.format(log=log))
    up = UpProcess(path, folder, {})
    try:
        up.wait_until_serving(limit_s)
        return Split(up, log)
    except BaseException:
        up.close()
        raise


def stop_split(split: Split) -> None:
    """Stop the cluster; nothing may be left of it."""
    try:
        split.up.interrupt()
        assert split.up.wait_for_end(90) == 0, split.up.story()
        split.up.wait_until_nothing_is_left(10)
    finally:
        split.up.close()


def pairs(words: list[str]) -> list[list[str]]:
    """Each word with the one behind it."""
    return [list(pair) for pair in itertools.pairwise(words)]

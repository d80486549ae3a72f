"""A cluster of mock engines as `splitserve up` starts it, and an OpenAI client of its router."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import openai
import psutil

from splitserve.kv_transfer.channel import secret_in
from splitserve.orchestrator.engines.command import API_KEY_ENV
from splitserve.orchestrator.engines.mock.model import KvShape, MockModel, reference_answer
from splitserve.orchestrator.engines.mock.tokenizer import decode
from support.mock_engines import EngineHandle
from support.up_process import UpProcess, kill, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

TOKENS = 12


@dataclass
class Cluster:
    """The cluster and its client."""

    up: UpProcess
    client: openai.AsyncOpenAI
    url: str = ""
    """The router's, without a path."""
    nodes: tuple[str, ...] = ()
    engines: dict[str, EngineHandle] = field(default_factory=dict)
    """By incarnation: every engine that a test has asked for."""
    killed: set[str] = field(default_factory=set)
    """Nodes whose engine a test has killed."""

    async def engine(self, node: str) -> EngineHandle:
        """The engine of a node, as soon as it is ready."""
        found = self.up.node(node)
        if found.get("phase") != "ready" or found["incarnation"] not in self.engines:
            await asyncio.to_thread(wait_for, lambda: self._look_for(node), 40, node, self.up.story)
        return self.engines[self.up.node(node)["incarnation"]]

    async def kill_engine(self, node: str) -> None:
        """SIGKILL to the engine's process; returns when its agent has seen it."""
        life = self.up.node(node)["incarnation"]
        self.killed.add(node)
        kill([self.process(node).pid])
        await asyncio.to_thread(
            wait_for, lambda: self.up.node(node)["incarnation"] != life, 20, "death", self.up.story
        )

    def process(self, node: str) -> psutil.Process:
        """The process of a node's engine, whichever life it is in."""
        (found,) = (p for p, settings in self._processes() if settings["node"] == node)
        return found

    def pids(self) -> dict[str, int]:
        """Each node's engine process."""
        return {settings["node"]: process.pid for process, settings in self._processes()}

    def _look_for(self, node: str) -> bool:
        status = self.up.node(node)
        for process, settings in self._processes():
            ready = status["phase"] == "ready"
            if ready and settings["incarnation"] == status["incarnation"]:
                environ = process.environ()
                engine = EngineHandle(
                    node,
                    status["engine_url"],
                    f"tcp://127.0.0.1:{settings['endpoint_port']}",
                    secret_in(environ) or b"",
                    environ[API_KEY_ENV],
                )
                engine.idle_blocks = status["total_blocks"] - 1
                self.engines[status["incarnation"]] = engine
                return engine.idle_blocks > 0
        return False

    def _processes(self) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
        """Each engine's process, with its connector's settings."""
        for process in self.up.processes():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if line[1:3] == ["-m", "splitserve.orchestrator.engines.mock.server"]:
                config = json.loads(line[line.index("--kv-transfer-config") + 1])
                yield process, config["kv_connector_extra_config"]

    async def text(self, prompt: list[int], tokens: int = TOKENS) -> str:
        """The router's answer."""
        answer = await self.client.completions.create(
            model="mock", prompt=prompt, max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text


@asynccontextmanager
async def running_cluster(folder: Path, text: str) -> AsyncIterator[Cluster]:
    """The cluster of that YAML serves; afterwards everything that it started is stopped."""
    config = folder / "cluster.yaml"
    config.write_text(text)
    up = UpProcess(config, folder)
    try:
        await asyncio.to_thread(up.wait_until_serving)
        status = await asyncio.to_thread(up.status)
        assert status is not None
        client = openai.AsyncOpenAI(base_url=status["url"], api_key="none", max_retries=0)
        async with client:
            url = status["url"].removesuffix("/v1")
            nodes = tuple(sorted(node["node"] for node in status["nodes"]))
            cluster = Cluster(up, client, url, nodes)
            try:
                yield cluster
            finally:
                for engine in cluster.engines.values():
                    engine.close()
    finally:
        await asyncio.to_thread(up.close)


def prompt_of(length: int, start: int) -> list[int]:
    """A prompt that shares no block with one of another ``start``."""
    return [(start * 17 + n * 31 + n // 7) % 256 for n in range(length)]


def alone(prompt: list[int], tokens: int = TOKENS) -> str:
    """What one engine answers."""
    return decode(reference_answer(MockModel(KvShape()), prompt, tokens))

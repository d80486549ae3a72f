"""Two routers before the same nodes, as real processes: both serve at once from little memory, one
dies and comes back, and what one orders or learns the other knows.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import psutil
import pytest
import pytest_asyncio
from support.mock_clients import Clients, retries_of
from support.mock_cluster import Cluster, alone, prompt_of, running_cluster
from support.up_process import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CLUSTER = """
name: mock-two-routers
engine: mock
model: {path: mock}
router: {port: 0, replicas: 2}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 1 MiB
  engine_args: {block_size: 32, max_model_len: 3072, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096, lease_s: 3}
decode: *pool
supervision: {restart_delay_s: 0.1, restart_limit: 100, drain_timeout_s: 5, stop_timeout_s: 3}
"""
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
IN_FLIGHT = 20
"""At each router; a decode node has room for about eight of their longer requests."""
ANSWERS = 40
LIMIT_S = 30.0
_starts = itertools.count(1_000_000)


class Two:
    """The cluster as clients of each router see it."""

    def __init__(self, cluster: Cluster, urls: list[str]) -> None:
        self.up = cluster.up
        self.cluster = cluster
        self.urls = [url.removesuffix("/v1") for url in urls]
        self.routers = [
            replace(
                cluster,
                url=url,
                client=openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
            )
            for url in self.urls
        ]

    async def nodes(self, router: int) -> dict[str, dict[str, Any]]:
        """What that router knows of each node."""
        async with (
            aiohttp.ClientSession(headers=self.up.operator()) as session,
            session.get(f"{self.urls[router]}/internal/status") as response,
        ):
            found: dict[str, dict[str, Any]] = (await response.json())["nodes"]
            return found

    async def until(self, router: int, what: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        """That router has come to know it."""
        known: dict[str, dict[str, Any]] = {}
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        known = await self.nodes(router)
                        if what(known):
                            return
                    except aiohttp.ClientError:
                        pass  # It is being started again
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"router {router} knows {known}\n{self.up.story()}") from None

    async def until_both_have_the_same_cached(self) -> None:
        """Both routers use every node and count the same prefixes there, some on each prefill node.
        They are compared as they are now: nodes go on saying what came and what was pushed out.
        """
        found: list[dict[str, int]] = []
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    found = [await self._cached(router) for router in range(2)]
                    first, second = found
                    is_whole = first == second and first.keys() == set(NODES)
                    if is_whole and min(first["prefill-0"], first["prefill-1"]) > 0:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"the routers know {found}\n{self.up.story()}") from None

    async def _cached(self, router: int) -> dict[str, int]:
        """How many prefixes it knows of each node that it uses; none while it is away."""
        try:
            nodes = await self.nodes(router)
        except aiohttp.ClientError:
            return {}
        return {name: n["cached_prefixes"] for name, n in nodes.items() if n["is_usable"]}

    def pids(self, router: int) -> list[int]:
        """Its process; none while it is away."""
        return [
            pid
            for pid in self.up.pids("splitserve.orchestrator.router ")
            if f"--index {router}" in " ".join(psutil.Process(pid).cmdline())
        ]

    async def all_idle(self) -> None:
        """Every engine has all its blocks, and nobody waits for it."""
        for name in NODES:
            engine = await self.cluster.engine(name)
            await engine.faults()
            await engine.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Two]:
    """Two routers before two prefill and two decode nodes."""
    async with running_cluster(tmp_path_factory.mktemp("two"), CLUSTER) as cluster:
        status = await asyncio.to_thread(cluster.up.status)
        assert status is not None
        two = Two(cluster, [router["url"] for router in status["routers"]])
        assert len(two.urls) == 2
        for name in NODES:
            await cluster.engine(name)
        yield two
        for router in two.routers:
            await router.client.close()


async def test_what_one_has_served_the_other_finds(two: Two) -> None:
    """The beginning of a conversation that went through the first router: the second sends its next
    turn to the node that has it, and says how much it expects there. (The caches are empty yet, so
    that what is new does not push out anything.)
    """
    text = ""
    served, expected = [], []
    for turn in range(3):
        router, other = turn % 2, (turn + 1) % 2
        text += " ".join(f"Turn {turn}, sentence {number}." for number in range(30))
        before = await two.nodes(other)
        timeline = await chat(two, router, text)
        node = timeline["prefill_node"]
        served.append(node)
        expected.append(timeline["expected_cached_tokens"])
        known = before[node]["cached_prefixes"]
        await two.until(
            other,
            lambda nodes, n=node, k=known: nodes[n]["cached_prefixes"] > k,  # type: ignore[misc]
        )
    assert len(set(served)) == 1
    assert expected[0] == 0
    assert expected[1:] == sorted(expected[1:])
    assert expected[1] > 400


async def test_both_serve_at_once_from_little_memory(two: Two) -> None:
    """Twenty requests in flight at each, where a decode node has room for a few: every text is
    right at the first attempt, both routers get on, and each knows what the other has placed.
    """
    retries = [await retries_of(router) for router in two.routers]
    clients = [Clients(router, long_tokens=60) for router in two.routers]
    load = [asyncio.create_task(c.keep_asking()) for c in clients for _ in range(IN_FLIGHT)]
    for router in range(2):
        await two.until(router, lambda nodes: any(n["others"] for n in nodes.values()))
    async with asyncio.timeout(LIMIT_S):
        while min(c.answered for c in clients) < ANSWERS:
            failed = [task for task in load if task.done()]
            assert not failed, failed[0].exception()
            await asyncio.sleep(0.02)
    for client in clients:
        client.is_over = True
    await asyncio.gather(*load)
    assert [await retries_of(router) for router in two.routers] == retries
    await two.all_idle()


async def test_a_killed_router_takes_only_its_own_streams(two: Two) -> None:
    """SIGKILL to the first while both stream: all streams of the second end with their right text,
    the engines get rid of what the first had there, and it comes back and learns its nodes and what
    they have cached.
    """
    before = await two.nodes(1)
    lives = {name: node["incarnation"] for name, node in before.items()}
    engines = [await two.cluster.engine(name) for name in ("decode-0", "decode-1")]
    for engine in engines:
        await engine.faults(hold_after_tokens=5)
    asked = [(number % 2, prompt_of(150, start=next(_starts))) for number in range(8)]
    streams = [asyncio.create_task(stream(two.routers[router], prompt)) for router, prompt in asked]
    for engine in engines:
        await engine.until(lambda status: status.running > 0, "streams")
    await two.until(1, lambda nodes: sum(n["decode_legs"] for n in nodes.values()) == 4)
    (first,) = two.pids(0)
    psutil.Process(first).send_signal(signal.SIGKILL)
    await two.until(1, lambda nodes: not any(n["others"] for n in nodes.values()))
    for engine in engines:
        await engine.faults()
    async with asyncio.timeout(LIMIT_S):
        texts = await asyncio.gather(*streams)
    for (router, prompt), text in zip(asked, texts, strict=True):
        assert text == (alone(prompt, 40) if router == 1 else None)
    await two.all_idle()
    await asyncio.to_thread(
        wait_for, lambda: two.pids(0) not in ([], [first]), 20, "another router", two.up.story
    )
    await two.until_both_have_the_same_cached()
    assert {n: s["incarnation"] for n, s in (await two.nodes(0)).items()} == lives
    prompt = prompt_of(90, start=next(_starts))
    assert await two.routers[0].text(prompt) == alone(prompt)
    await two.all_idle()


async def test_a_flip_through_one_is_seen_by_the_other(two: Two) -> None:
    """And may be taken back through that one. Each sends new work accordingly."""
    assert await order(two, 0, "decode-1", "flip", {"role": "prefill"}) == "flipped"
    await two.until(1, lambda nodes: nodes["decode-1"]["role"] == "prefill")
    for number in range(4):
        prompt = prompt_of(100 + number, start=next(_starts))
        assert await two.routers[1].text(prompt) == alone(prompt)
    assert (await two.nodes(1))["decode-1"]["decode_legs"] == 0
    assert await order(two, 1, "decode-1", "flip", {"role": "decode"}) == "flipped"
    await two.until(0, lambda nodes: nodes["decode-1"]["role"] == "decode")
    for router in range(2):
        assert {n: s["role"] for n, s in (await two.nodes(router)).items()} == {
            name: name.partition("-")[0] for name in NODES
        }


async def test_a_node_drains_for_both(two: Two) -> None:
    """Ordered at the second router while the first has a stream on the node: the node restarts only
    when that stream has ended, with its right text.
    """
    life = two.up.node("decode-1")["incarnation"]
    engine = await two.cluster.engine("decode-1")
    await engine.faults(hold_after_tokens=5)
    prompts = [prompt_of(150, start=next(_starts)) for _ in range(2)]
    streams = [asyncio.create_task(stream(two.routers[0], prompt)) for prompt in prompts]
    await two.until(0, lambda nodes: nodes["decode-1"]["decode_legs"] == 1)
    await engine.until(lambda status: status.running == 1, "stream")
    assert await order(two, 1, "decode-1", "drain", {"restart": True}) == "draining"
    await two.until(0, lambda nodes: nodes["decode-1"]["is_draining"])
    # Reports come twice a second: the second router has dismissed it by the second of them
    await two.until(0, lambda nodes: nodes["decode-1"]["phase"] == "draining")
    prompt = prompt_of(80, start=next(_starts))
    assert await two.routers[0].text(prompt) == alone(prompt)
    assert two.up.node("decode-1")["incarnation"] == life
    await engine.faults()
    async with asyncio.timeout(LIMIT_S):
        texts = await asyncio.gather(*streams)
    assert texts == [alone(prompt, 40) for prompt in prompts]
    for router in range(2):
        await two.until(
            router,
            lambda nodes: (
                nodes.get("decode-1", {}).get("is_usable", False)
                and nodes["decode-1"]["incarnation"] != life
            ),
        )
    await two.all_idle()


async def test_a_recording_has_what_came_to_either(two: Two, tmp_path: Path) -> None:
    """In the order of arrival, and equal beginnings are known whichever router they went to."""
    path, said = tmp_path / "trace.jsonl", tmp_path / "said"
    process = recorder(two, path, said)
    try:
        await asyncio.to_thread(
            wait_for, lambda: "recording mock-two" in said.read_text(), 20, "begin", said.read_text
        )
        head = prompt_of(512, start=next(_starts))
        for number in range(4):
            prompt = [*head, *prompt_of(100, start=next(_starts))]
            assert await two.routers[number % 2].text(prompt) == alone(prompt)
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 20) == 0, said.read_text()
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["input_length"] for line in lines] == [612] * 4
    times = [line["timestamp"] for line in lines]
    assert times == sorted(times)
    assert times[0] == 0
    first, *others = (line["hash_ids"] for line in lines)
    assert all(blocks[:3] == first[:3] for blocks in others)


async def test_no_router_misses_anything(two: Two) -> None:
    """What engines hold is known to one of them."""
    result = await asyncio.to_thread(two.up.run, "status", "--audit")
    assert result.returncode == 0, result.stdout


def recorder(two: Two, path: Path, said: Path) -> subprocess.Popen[bytes]:
    """A running ``splitserve record`` that writes to ``path`` and speaks to ``said``."""
    command = [*two.up.command(), "record", "--out", str(path), "--block-tokens", "128"]
    with said.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=two.up.env)


async def stream(router: Cluster, prompt: list[int]) -> str | None:
    """The streamed answer; None when the connection broke."""
    body = {"model": "mock", "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "stream": True}
    text = ""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{router.url}/v1/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data.startswith(b"{"):
                    text += json.loads(data)["choices"][0]["text"]
                elif data == b"[DONE]":
                    return text
    except aiohttp.ClientError:
        pass
    return None


async def chat(two: Two, router: int, text: str) -> dict[str, Any]:
    """The record of a turn that went through that router."""
    name = f"turn-{next(_starts)}"
    body = {"model": "mock", "prompt": text, "max_tokens": 4, "ignore_eos": True}
    url = two.urls[router]
    async with aiohttp.ClientSession(headers=two.up.operator()) as session:
        async with session.post(
            f"{url}/v1/completions", json=body, headers={"X-Request-Id": name}
        ) as response:
            assert response.status == 200, await response.text()
            await response.read()
        async with asyncio.timeout(LIMIT_S):
            while True:
                async with session.get(f"{url}/internal/timeline/{name}") as response:
                    if response.status == 200:
                        found: dict[str, Any] = await response.json()
                        return found
                await asyncio.sleep(0.02)


async def order(two: Two, router: int, node: str, verb: str, body: dict[str, Any]) -> str:
    """The router's verdict."""
    async with (
        aiohttp.ClientSession(headers=two.up.operator()) as session,
        session.post(f"{two.urls[router]}/internal/nodes/{node}/{verb}", json=body) as response,
    ):
        return str((await response.json())["verdict"])

"""Conversations on real processes: they stay where their beginning is cached, while that pays."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from support.mock_cluster import Cluster, running_cluster
from support.up_process import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import openai

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLUSTER = """
name: mock-prefix-routing
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 16 MiB
  engine_args: {block_size: 32, max_model_len: 16384, enable_faults: true}
  transfer: {transport: tcp, lease_s: 5}
decode: {<<: *pool, replicas: 1}
supervision: {restart_delay_s: 0.1, drain_timeout_s: 1, stop_timeout_s: 3}
"""
PREFILL = ("prefill-0", "prefill-1")
LIMIT_S = 20.0
_ids = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two prefill nodes and one decode node behind a router."""
    async with running_cluster(tmp_path_factory.mktemp("prefixes"), CLUSTER) as cluster:
        yield cluster


async def test_a_conversation_stays_on_the_node_that_has_it(cluster: Cluster) -> None:
    """Six turns go to one node each for two conversations that go on in turn; from the second turn
    on the router expects what came before, and the node computes little more than what is new.
    """
    talks = [Talk(cluster, "first"), Talk(cluster, "second")]
    before = await computed(cluster)
    for _ in range(6):
        for talk in talks:
            await talk.say()
    assert [len(set(talk.nodes)) for talk in talks] == [1, 1]
    assert {talk.nodes[0] for talk in talks} == set(PREFILL)
    for talk in talks:
        expected = [turn["expected_cached_tokens"] for turn in talk.turns]
        assert expected[0] == 0
        assert expected[1:] == sorted(expected[1:])
        assert expected[-1] > talk.prompt_tokens[-2] - 600
    spent = await computed(cluster) - before
    assert spent < 0.55 * sum(sum(talk.prompt_tokens) for talk in talks)


async def test_a_conversation_leaves_a_node_that_is_busier_than_it_saves(cluster: Cluster) -> None:
    """The holder is held in a long prompt that nobody else has; it comes back when that is over."""
    talk = Talk(cluster, "third")
    for _ in range(3):
        await talk.say()
    (holder,) = set(talk.nodes)
    engine = await cluster.engine(holder)
    await engine.faults(hold_at_layer=2)
    long = asyncio.create_task(talk.say_aside("Something else altogether. " * 300))
    await engine.until(lambda status: status.running > 0, "long prompt")
    await talk.say(wait=False)
    assert talk.nodes[-1] != holder
    await engine.faults()
    assert (await long)["prefill_node"] == holder


async def test_a_restarted_router_knows_what_is_cached(cluster: Cluster) -> None:
    """From its agents alone: nothing is asked before the conversation goes on where it was."""
    talk = Talk(cluster, "fourth")
    for _ in range(2):
        await talk.say()
    before = await cached_prefixes(cluster)
    assert min(before.values()) > 0
    (router,) = cluster.up.pids("splitserve.orchestrator.router ")
    psutil.Process(router).send_signal(signal.SIGKILL)
    await asyncio.to_thread(
        wait_for,
        lambda: cluster.up.pids("splitserve.orchestrator.router ") not in ([], [router]),
        LIMIT_S,
        "another router",
        cluster.up.story,
    )
    # More than before when the last report was still on its way
    await until(cluster, lambda found: all(found.get(n, 0) >= before[n] for n in before))
    await talk.say()
    assert len(set(talk.nodes)) == 1
    assert talk.turns[-1]["expected_cached_tokens"] > 0


async def test_a_conversation_leaves_a_node_that_drains(cluster: Cluster) -> None:
    """And goes on at the other one."""
    talk = Talk(cluster, "fifth")
    for _ in range(2):
        await talk.say()
    (holder,) = set(talk.nodes)
    result = await asyncio.to_thread(cluster.up.run, "drain", holder)
    assert result.returncode == 0, result.stderr
    await talk.say(wait=False)
    (other,) = set(PREFILL) - {holder}
    assert talk.nodes[-1] == other


@dataclass
class Talk:
    """One conversation; each turn waits until the router has heard what the one before left."""

    cluster: Cluster
    topic: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)

    @property
    def nodes(self) -> list[str]:
        """The prefill node of each turn."""
        return [turn["prefill_node"] for turn in self.turns]

    async def say(self, *, wait: bool = True) -> None:
        """The user says about 900 bytes more, and the answer joins the conversation."""
        number = len(self.turns)
        text = " ".join(f"{self.topic} {number}, sentence {n}." for n in range(40))
        self.messages.append({"role": "user", "content": text})
        before = await cached_prefixes(self.cluster)
        answer, turn = await ask(self.cluster, self.messages)
        assert answer.usage is not None
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        self.turns.append(turn)
        self.prompt_tokens.append(answer.usage.prompt_tokens)
        node = turn["prefill_node"]
        if wait:
            await until(self.cluster, lambda found: found.get(node, 0) > before[node])

    async def say_aside(self, text: str) -> dict[str, Any]:
        """The timeline of a turn that the conversation forgets."""
        _, turn = await ask(self.cluster, [*self.messages, {"role": "user", "content": text}])
        return turn


async def ask(
    cluster: Cluster, messages: list[dict[str, str]]
) -> tuple[openai.types.chat.ChatCompletion, dict[str, Any]]:
    """(answer, timeline)."""
    request_id = f"talk-{next(_ids)}"
    answer = await cluster.client.chat.completions.create(
        model="mock",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=20,
        extra_body={"ignore_eos": True},
        extra_headers={"X-Request-Id": request_id},
    )
    return answer, await get(cluster, f"/internal/timeline/{request_id}")


async def get(cluster: Cluster, path: str) -> dict[str, Any]:
    """What the router says there."""
    async with aiohttp.ClientSession() as session, session.get(cluster.url + path) as response:
        assert response.status == 200, await response.text()
        found: dict[str, Any] = await response.json()
        return found


async def cached_prefixes(cluster: Cluster) -> dict[str, int]:
    """How many marks the router knows of each node that gets work."""
    nodes = (await get(cluster, "/internal/status"))["nodes"]
    return {name: node["cached_prefixes"] for name, node in nodes.items() if node["is_usable"]}


async def computed(cluster: Cluster) -> int:
    """Prompt tokens that the prefill engines have computed so far."""
    states = [await (await cluster.engine(name)).status() for name in PREFILL]
    return int(sum(state.counters["prompt_tokens_computed"] for state in states))


async def until(cluster: Cluster, condition: Callable[[dict[str, int]], bool]) -> None:
    """The router's knowledge of its nodes is so."""
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            found = await cached_prefixes(cluster)
        except aiohttp.ClientError:
            found = {}
        if found and condition(found):
            return
        assert time.monotonic() < end, f"the router knows {found}\n{cluster.up.story()}"
        await asyncio.sleep(0.02)

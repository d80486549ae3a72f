"""More load than the engines can take, clients that give up, tenants that share, an engine that is
stopped: real processes behind a real router.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from support.mock_cluster import TOKENS, Cluster, alone, prompt_of, running_cluster
from support.mock_engines import POLL_S
from support.standing_still import tell

from splitserve.orchestrator.agent.auth import agent_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = bytes(range(32))
LIMIT_S = 60.0
QUEUE_LIMIT = 32
RUNNING = 2
"""Requests that the prefill nodes hold, one each, while they are held."""
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
NODES = (*PREFILL, *DECODE)
CLUSTER = """
name: mock-overload
engine: mock
model: {path: mock}
router:
  {port: 0, queue_limit_requests: 32, prefill_ahead_requests: 0, prefill_batch_tokens: 0,
   node_silence_limit_s: 4}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: tcp, stream_min_bytes: 4096, lease_s: 3}
decode: *pool
security:
  secret_file: FOLDER/secret
  api_keys: [{tenant: a, key_file: FOLDER/a}, {tenant: b, key_file: FOLDER/b}]
supervision:
  {restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3, engine_silence_limit_s: 600}
"""


@dataclass
class Shared:
    """The cluster, with a client for each tenant and an operator's view of the router."""

    cluster: Cluster
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        """The router's."""
        return str(self.cluster.client.base_url).removesuffix("/v1/")

    def client(self, tenant: str) -> openai.AsyncOpenAI:
        """That tenant's."""
        return self.cluster.client.with_options(api_key=f"sk-{tenant}", timeout=LIMIT_S)

    async def text(
        self, prompt: list[int], tenant: str = "a", tokens: int = TOKENS, name: str = ""
    ) -> str:
        """The router's answer; ``name`` is for ``dispatched``."""
        answer = await self.client(tenant).completions.create(
            model="mock",
            prompt=prompt,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": name} if name else None,
        )
        return answer.choices[0].text

    async def dispatched(self, name: str) -> float | None:
        """When that request was sent to its nodes, in milliseconds; None when it never was."""
        async with self.session.get(f"{self.url}/internal/timeline/{name}") as response:
            assert response.status == 200
            record = await response.json()
        after = record["dispatched_ms"]
        return None if after is None else record["received_unix_s"] * 1000 + after

    async def status(self) -> dict[str, Any]:
        """The router's view."""
        async with self.session.get(f"{self.url}/internal/status") as response:
            assert response.status == 200
            found: dict[str, Any] = await response.json()
            return found

    async def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The router's first view of which that is true."""
        status: dict[str, Any] = {}
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    status = await self.status()
                    if holds(status):
                        return status
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pytest.fail(f"no {what}: {status}\n{self.cluster.up.story()}")

    async def faults(self, names: tuple[str, ...], **faults: Any) -> None:
        """Set on those engines; without arguments they are well again."""
        for name in names:
            await (await self.cluster.engine(name)).faults(**faults)

    async def until_idle(self) -> None:
        """Nothing waits or runs in the router, and every engine holds nothing."""
        await self.until(lambda s: load(s) == (0, 0), "idle router")
        for name in NODES:
            engine = await self.cluster.engine(name)
            await engine.until(
                lambda s, idle=engine.idle_blocks: (
                    (s.running, s.waiting, s.open_transfers, s.leased_blocks, s.free_blocks)
                    == (0, 0, 0, 0, idle)
                ),
                "return to idle",
                LIMIT_S,
            )

    async def counters(self, name: str) -> dict[str, float]:
        """What an engine has counted."""
        return dict((await (await self.cluster.engine(name)).status()).counters)

    def signal(self, name: str, number: signal.Signals) -> None:
        """To the engine's process."""
        for process, settings in self.cluster._processes():
            if settings["node"] == name:
                tell(process.pid, number)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    """Two prefill and two decode nodes; two tenants."""
    folder = tmp_path_factory.mktemp("overload")
    for tenant in "ab":
        (folder / tenant).write_text(f"sk-{tenant}")
    (folder / "secret").write_text(SECRET.hex())
    (folder / "secret").chmod(0o600)
    headers = {"Authorization": f"Bearer {agent_token(SECRET)}"}
    text = CLUSTER.replace("FOLDER", str(folder))
    async with (
        running_cluster(folder, text) as cluster,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        for name in NODES:
            await cluster.engine(name)
        yield Shared(cluster, session)


def load(status: dict[str, Any]) -> tuple[int, int]:
    """(requests that wait, requests with legs out)."""
    return status["requests"]["waiting"], status["requests"]["running"]


def all_closed(status: dict[str, Any]) -> bool:
    """No breaker of any node has anything against it."""
    breakers = [b for node in status["nodes"].values() for b in node["breakers"].values()]
    return all((b["state"], b["latest_fault"]) == ("closed", "") for b in breakers)


def start(*asked: Coroutine[Any, Any, str]) -> list[asyncio.Task[str]]:
    """All of them at once."""
    return [asyncio.create_task(one) for one in asked]


async def test_overload_ends_with_the_load(shared: Shared) -> None:
    """Far more requests than the engines and the queue take: the rest is told when to come again.
    All clients give up; then nothing is left, and a fresh request is answered.
    """
    await shared.faults(PREFILL, hold_at_layer=2)
    room = QUEUE_LIMIT + RUNNING
    tasks = start(*(shared.text(prompt_of(100 + n, start=n)) for n in range(room + 22)))
    status = await shared.until(lambda s: sum(t.done() for t in tasks) == 22, "refusals")
    assert load(status) == (QUEUE_LIMIT, RUNNING)
    for task in tasks:
        if task.done():
            error = task.exception()
            assert isinstance(error, openai.RateLimitError)
            assert 1 <= int(error.response.headers["retry-after"]) <= 60
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await shared.until(lambda s: load(s) == (0, 0), "abandoned requests gone")
    await shared.faults(PREFILL)
    await shared.until_idle()
    prompt = prompt_of(150, start=500)
    assert await shared.text(prompt) == alone(prompt)
    assert all_closed(await shared.status())


async def test_two_tenants_take_turns(shared: Shared) -> None:
    """One has filled the queue when the other comes: it finds room, and its three requests are
    sent among the first, in turn with the others.
    """
    await shared.faults(PREFILL, hold_at_layer=2)
    names = [f"a{n}" for n in range(QUEUE_LIMIT + RUNNING)] + [f"b{n}" for n in range(3)]

    def ask(name: str) -> Coroutine[Any, Any, str]:
        prompt = prompt_of(100, start=600 + names.index(name))
        return shared.text(prompt, name[0], name=name)

    flood = start(*(ask(name) for name in names[:-3]))
    await shared.until(lambda s: load(s) == (QUEUE_LIMIT, RUNNING), "full queue")
    polite = start(*(ask(name) for name in names[-3:]))
    await shared.until(
        lambda s: s["requests"]["waiting_by_tenant"] == {"a": QUEUE_LIMIT - 3, "b": 3}, "b's turn"
    )
    await shared.faults(PREFILL)
    for name, task in zip(names[-3:], polite, strict=True):
        assert await task == alone(prompt_of(100, start=600 + names.index(name)))
    results = await asyncio.gather(*flood, return_exceptions=True)
    refused = [r for r in results if isinstance(r, openai.RateLimitError)]
    assert len(refused) == 3
    assert sum(isinstance(r, str) for r in results) == len(flood) - 3
    sent = [(at, name) for name in names if (at := await shared.dispatched(name)) is not None]
    tenants = "".join(name[0] for _, name in sorted(sent))
    assert tenants[RUNNING : RUNNING + 8].count("b") == 3, tenants
    await shared.until_idle()


async def test_clients_mistakes_change_no_node(shared: Shared) -> None:
    """Fifty bad requests in a row, the engines' refusals and the router's own: no breaker notices,
    and the next request is answered.
    """
    good = shared.client("a")
    bad = shared.cluster.client.with_options(api_key="wrong")
    long: Any = [1] * 5000
    seen = set()
    for number in range(50):
        ask: list[tuple[openai.AsyncOpenAI, dict[str, Any]]] = [
            (good, {"model": "mock", "prompt": long}),
            (good, {"model": "mock", "prompt": [1, 2, 3], "max_tokens": -3}),
            (good, {"model": "no such model", "prompt": [1, 2, 3]}),
            (bad, {"model": "mock", "prompt": [1, 2, 3]}),
        ]
        client, body = ask[number % len(ask)]
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(**body)
        seen.add(caught.value.status_code)
    assert seen == {400, 401, 404}
    assert all_closed(await shared.status())
    # Each at once; one of them may just be late with its report
    await shared.until(lambda s: all(n["is_usable"] for n in s["nodes"].values()), "usable nodes")
    prompt = prompt_of(90, start=800)
    assert await shared.text(prompt) == alone(prompt)
    await shared.until_idle()


async def test_equal_nodes_get_equal_shares(shared: Shared) -> None:
    """Four hundred distinct prompts of one length, thirty-two at a time: each node does half of it,
    give or take a tenth.
    """
    before = {name: await shared.counters(name) for name in NODES}
    prompts = [prompt_of(64, start=1000 + n) for n in range(400)]

    async def worker(mine: list[list[int]]) -> None:
        for prompt in mine:
            assert await shared.text(prompt, tokens=2) == alone(prompt, 2)

    await asyncio.gather(*(worker(prompts[n::32]) for n in range(32)))
    for names, counter in ((PREFILL, "prompt_tokens_computed"), (DECODE, "received_transfers")):
        gained = [(await shared.counters(n))[counter] - before[n].get(counter, 0) for n in names]
        for count in gained:
            assert 0.4 <= count / sum(gained) <= 0.6, (counter, gained)
    await shared.until_idle()


@pytest.mark.parametrize(("victim", "legs"), [("decode-1", "decode"), ("prefill-1", "prefill")])
async def test_a_stopped_engine_holds_up_only_its_own(
    shared: Shared, victim: str, legs: str
) -> None:
    """SIGSTOP: what went to the other node is answered, the stopped one gets no new work as soon as
    it is silent, and takes part again after SIGCONT.
    """
    base = 2000 if legs == "decode" else 3000
    shared.signal(victim, signal.SIGSTOP)
    try:
        tasks = start(*(shared.text(prompt_of(80, start=base + n)) for n in range(10)))
        await shared.until(
            lambda s: (
                s["nodes"][victim]["is_silent"]
                and s["requests"]["waiting"] == 0
                and sum(not t.done() for t in tasks) <= s["nodes"][victim][f"{legs}_legs"]
            ),
            "answers of the other node",
        )
        held = (await shared.status())["nodes"][victim][f"{legs}_legs"]
        for number in range(10, 18):
            prompt = prompt_of(80, start=base + number)
            assert await shared.text(prompt) == alone(prompt)
        assert (await shared.status())["nodes"][victim][f"{legs}_legs"] <= held
    finally:
        shared.signal(victim, signal.SIGCONT)
    await shared.until(lambda s: s["nodes"][victim]["is_usable"], "return")
    async with asyncio.timeout(LIMIT_S):
        for number, task in enumerate(tasks):
            assert await task == alone(prompt_of(80, start=base + number))
        counter = "received_transfers" if legs == "decode" else "prompt_tokens_computed"
        before = (await shared.counters(victim)).get(counter, 0)
        number = 100
        while (await shared.counters(victim)).get(counter, 0) == before:
            prompt = prompt_of(80, start=base + number)
            assert await shared.text(prompt) == alone(prompt)
            number += 1
    await shared.until_idle()

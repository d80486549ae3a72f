"""The quickstart's shape with the real model on two real vLLM engines, started by `splitserve up`.

One cluster is shared by all tests of this file; the last one kills it. A plain engine's answer is
had from the prefill engine itself, asked without a transfer and with an empty prefix cache.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import random
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import psutil
import pytest
from end_to_end.conformance.run import REAL_ROWS, counted, run, transfer_problems
from end_to_end.conformance.sides import REQUEST_LIMIT_S, OneCluster
from support.otlp_receiver import otlp_receiver
from support.promtool import OBSERVABILITY, metrics_in
from support.split_client import Split, start_split, stop_split
from support.timelines import assert_whole_timeline, streamed_record
from support.up_process import kill, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = 128
LAYERS = 30
START_LIMIT_S = 400.0
CLUSTER = """
name: vllm-split
model: {{path: MODEL, served_name: m}}
router: {{port: 0}}
prefill: &pool
  cpus: [[0]]
  kv_cache_bytes: 1 GB
  env: {{VLLM_SERVER_DEV_MODE: "1", SPLITSERVE_TRANSFER_LOG: {log}, OTEL_BSP_SCHEDULE_DELAY: "200"}}
  engine_args: {{dtype: float32, block_size: 128, max_model_len: 2048, enforce_eager: true,
    max_num_batched_tokens: 512, enable_prompt_tokens_details: true}}
  transfer: {{transport: nixl, lease_s: 15}}
decode:
  <<: *pool
  cpus: [[1]]
observability: {{tracing: {{otlp_endpoint: "http://127.0.0.1:OTLP_PORT", sample_ratio: 0}}}}
"""
CALLER = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def otlp_port(free_port: Callable[[], int]) -> int:
    """Where the collector of traces is, while a test has one."""
    return free_port()


@pytest.fixture(scope="module")
def split(
    real_model: Path, otlp_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Split]:
    """One prefill and one decode engine behind a router."""
    folder = tmp_path_factory.mktemp("vllm")
    text = CLUSTER.replace("MODEL", str(real_model)).replace("OTLP_PORT", str(otlp_port))
    split = start_split(text, folder, START_LIMIT_S)
    yield split
    if split.up.process.poll() is None:
        stop_split(split)
    split.up.close()


def prompts(lengths: list[int], seed: int) -> list[list[int]]:
    """Random token ids, different in every prompt."""
    draw = random.Random(seed)
    return [[draw.randrange(100, 40_000) for _ in range(length)] for length in lengths]


async def test_every_socket_listens_on_loopback(split: Split) -> None:
    """Router, agents and engines, with all their helpers, listen on loopback addresses only."""
    listening = set()
    for process in split.up.processes():
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                listening.add(connection.laddr.ip.removeprefix("::ffff:"))
    assert listening
    assert all(ipaddress.ip_address(address).is_loopback for address in listening), listening


async def test_engines_stay_on_the_cpus_of_their_node(split: Split) -> None:
    """Every process of an engine may run there only."""
    for name, cpu in (("prefill-0", 0), ("decode-0", 1)):
        (agent,) = split.up.pids(f"orchestrator.agent --node {name}")
        engine = psutil.Process(agent).children(recursive=True)
        assert len(engine) >= 4
        assert {tuple(process.cpu_affinity() or ()) for process in engine} == {(cpu,)}


async def test_engine_processes_wait_without_polling(split: Split) -> None:
    """EngineCore and worker of either engine, which share one core, sleep while they wait."""
    waiting = {
        (path.stem, "Worker" if "Worker" in process else process)
        for path in split.up.logs()
        for process in re.findall(
            r"^\((\S+) pid=.* without polling$", path.read_text(errors="replace"), re.MULTILINE
        )
    }
    nodes, processes = ("prefill-0", "decode-0"), ("EngineCore", "Worker")
    assert waiting >= set(itertools.product(nodes, processes))


async def test_text_equals_one_engine(split: Split) -> None:
    """Greedy tokens equal the plain engine's for lengths around block multiples, alone and eight
    at a time; exactly the expected pages travelled, and the first of a long prompt before the
    prompt was computed.
    """
    lengths = [1, 2, 127, 128, 129, 255, 256, 257, 500, 640, 1000, 1025]
    asked = prompts(lengths, seed=1)
    async with aiohttp.ClientSession() as session:
        await split.forget_prefixes(session)
        before = len(split.transfers("receive"))
        alone = [await split.ask(session, prompt, 8) for prompt in asked]
        records = split.transfers("receive")[before:]
        await split.forget_prefixes(session)
        gate = asyncio.Semaphore(8)

        async def gated(prompt: list[int]) -> dict[str, Any]:
            async with gate:
                return await split.ask(session, prompt, 8)

        together = await asyncio.gather(*(gated(prompt) for prompt in asked))
        for length, prompt, first, second in zip(lengths, asked, alone, together, strict=True):
            await split.forget_prefixes(session)
            plain = await split.ask_one_engine(session, "prefill-0", prompt, 8)
            assert first["token_ids"] == plain["token_ids"], f"{length} tokens, one at a time"
            assert second["token_ids"] == plain["token_ids"], f"{length} tokens, eight at a time"
    expected = {n: LAYERS * -(-n // BLOCK) for n in lengths if n > 1}
    assert {r["prompt_tokens"]: r["pages"] for r in records} == expected
    assert {r["outcome"] for r in records} == {"landed"}
    long = next(r for r in split.transfers("send") if r["prompt_tokens"] == 1025)
    assert long["first_write"] < long["last_layer"]


async def test_a_timeline_has_every_part(split: Split) -> None:
    """A streamed split request of several steps: the router's record has all moments in order,
    parts that add up to the time to the first token, and every page.
    """
    (prompt,) = prompts([1200], seed=7)
    async with aiohttp.ClientSession() as session:
        await split.forget_prefixes(session)
    record = await streamed_record(split.url, prompt, 8)
    node = (await split.nodes())["decode-0"]
    assert_whole_timeline(
        record,
        layers=LAYERS,
        pages=LAYERS * -(-1200 // BLOCK),
        page_bytes=node["kv_bytes_per_token"] * BLOCK // LAYERS,
    )
    assert record["transfer_hidden_ms"] > 0


async def test_engines_are_in_a_requests_trace(split: Split, otlp_port: int) -> None:
    """Both engines' own spans are below the legs that the router sent them, transfers beside them;
    all in the client's trace, and their times fit into it.
    """
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    (prompt,) = prompts([700], seed=11)
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    headers = {"traceparent": f"00-{trace_id}-{CALLER}-01"}
    async with otlp_receiver(otlp_port) as receiver, aiohttp.ClientSession() as session:
        url = f"{split.url}/v1/completions"
        async with session.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            await response.read()
        spans = await receiver.wait_for(lambda spans: len(spans) >= 8)
    assert {span.trace_id for span in spans} == {trace_id}
    legs = {span.span_id: span.name for span in spans if span.service == "splitserve-router"}
    (whole,) = (span for span in spans if span.parent_id == CALLER)
    below = {
        (legs[span.parent_id], span.instance, span.name)
        for span in spans
        if span.service != "splitserve-router"
    }
    assert below == {
        ("prefill leg", "prefill-0", "llm_request"),
        ("prefill leg", "prefill-0", "transfer send"),
        ("decode leg", "decode-0", "llm_request"),
        ("decode leg", "decode-0", "transfer receive"),
    }
    for span in spans:
        assert whole.start <= span.start <= span.end
    assert len(spans) == 8


async def test_engines_have_the_metrics_that_the_dashboard_asks_for(split: Split) -> None:
    """At the addresses that http_sd gives, without a key."""
    asked = metrics_in((OBSERVABILITY / "grafana-dashboard.json").read_text())
    asked = {name for name in asked if name.startswith("vllm:")}
    assert asked
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{split.url}/internal/http_sd") as response:
            targets = await response.json()
        for target in targets[1:]:
            async with session.get(f"http://{target['targets'][0]}/metrics") as response:
                text = await response.text()
            assert {name for name in asked if f"\n{name}{{" not in text} == set()


async def test_known_prefixes_are_not_sent_again(split: Split) -> None:
    """A second prompt with a common prefix: the decode node is granted only what it lacks, and the
    text stays right.
    """
    prefix, tail_one, tail_two = prompts([512, 100, 150], seed=2)
    async with aiohttp.ClientSession() as session:
        await split.forget_prefixes(session)
        await split.ask(session, prefix + tail_one, 4)
        before = len(split.transfers("receive"))
        answer = await split.ask(session, prefix + tail_two, 8)
        record = split.transfers("receive")[before]
        await split.forget_prefixes(session)
        plain = await split.ask_one_engine(session, "prefill-0", prefix + tail_two, 8)
    assert answer["token_ids"] == plain["token_ids"]
    assert (record["first_block"], record["pages"]) == (4, 2 * LAYERS)


async def test_openai_client_streams(split: Split) -> None:
    """The official client gets a streamed chat whose text equals the one that is not streamed, and
    its usage.
    """
    client = openai.AsyncOpenAI(base_url=split.url + "/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    asked: Any = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 24}
    whole = await client.chat.completions.create(**asked)
    text, usage = "", None
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    await client.close()
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


async def test_answers_are_those_of_one_engine(
    split: Split, summary: Callable[[str], None]
) -> None:
    """Some rows of the conformance suite (``conformance/``): status, body and every event."""
    limit = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit) as session:
        url = (await split.nodes())["prefill-0"]["engine_url"]
        outcomes = await run(OneCluster(session, split, url), REAL_ROWS, limit=2)
    summary(f"conformance, real model: {counted(outcomes.values())}")
    transfers = split.transfers("receive")
    problems = {
        key: [*outcome.problems, *transfer_problems(outcome, transfers, BLOCK)]
        for key, outcome in outcomes.items()
    }
    assert not any(problems.values()), problems


async def test_a_seed_and_a_prompt_of_several_steps(split: Split) -> None:
    """One engine, which throws away what it samples before the prompt's end, uses up nothing of the
    seed by that, nor does it die: its answer is the cluster's, whose decode node samples once.
    """
    (prompt,) = prompts([700], seed=31)
    body = {"model": "m", "prompt": prompt, "seed": 9, "temperature": 1, "max_tokens": 6}
    async with aiohttp.ClientSession() as session:
        url = (await split.nodes())["prefill-0"]["engine_url"]
        replies = await OneCluster(session, split, url).ask("/v1/completions", body)
    texts = [json.loads(reply.raw)["choices"][0]["text"] for reply in replies]
    assert [reply.status for reply in replies] == [200, 200]
    assert texts[0] == texts[1] != ""


async def test_refusals_reach_the_client_and_leave_nothing(split: Split) -> None:
    """What an engine refuses keeps its status and its words; nothing is held afterwards."""
    async with aiohttp.ClientSession() as session:
        for body, status in (
            ({"model": "m", "prompt": [5] * 3000, "max_tokens": 4}, 400),
            ({"model": "m", "prompt": "hello", "max_tokens": 4, "temperature": -3}, 400),
            ({"model": "other", "prompt": "hello"}, 404),
            ({"model": "m", "prompt": 7.5}, 400),
        ):
            async with session.post(split.url + "/v1/completions", json=body) as answer:
                found = await answer.json()
                assert (answer.status, "message" in found["error"]) == (status, True), found
        await split.forget_prefixes(session)
    await split.wait_until_idle()


async def test_a_client_that_leaves_frees_both_sides(split: Split) -> None:
    """Connections closed at any point of a request: both engines are idle again soon after."""
    async with aiohttp.ClientSession() as session:
        for delay_s, prompt in zip(
            [0.0, 0.02, 0.1, 0.3, 0.8, 1.5], prompts([900] * 6, seed=3), strict=True
        ):
            task = asyncio.create_task(split.ask(session, prompt, 64))
            await asyncio.wait([task], timeout=delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await split.wait_until_idle()
        (prompt,) = prompts([300], seed=4)
        answer = await split.ask(session, prompt, 4)
        await split.forget_prefixes(session)
        plain = await split.ask_one_engine(session, "prefill-0", prompt, 4)
    assert answer["token_ids"] == plain["token_ids"]


async def test_prefill_engine_killed_in_mid_prefill(split: Split) -> None:
    """kill -9 of the whole prefill engine while it computes: the decode node answers all the same,
    and the node comes back under a new incarnation.
    """
    (prompt,) = prompts([1500], seed=5)
    old = (await split.nodes())["prefill-0"]["incarnation"]
    engine = split.up.pids(old)
    assert engine
    async with aiohttp.ClientSession() as session:
        task = asyncio.create_task(split.ask(session, prompt, 4))
        await asyncio.wait([task], timeout=1.0)
        for pid in engine:
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                process.kill()
        answer = await task
        plain = await split.ask_one_engine(session, "decode-0", prompt, 4)
        assert answer["token_ids"] == plain["token_ids"]

        async def restarted() -> bool:
            node = (await split.nodes()).get("prefill-0", {})
            return bool(node.get("is_usable")) and node["incarnation"] != old

        deadline = asyncio.get_running_loop().time() + START_LIMIT_S
        while not await restarted():
            assert asyncio.get_running_loop().time() < deadline, split.up.story()
            await asyncio.sleep(0.5)
        (prompt,) = prompts([400], seed=6)
        before = len(split.transfers("receive"))
        await split.ask(session, prompt, 4)
        wait_for(
            lambda: len(split.transfers("receive")) > before, 40, "a transfer from the new engine"
        )
        assert split.transfers("receive")[-1]["outcome"] == "landed"


async def test_nothing_outlives_a_killed_up(split: Split) -> None:
    """After a SIGKILL of `up` neither the agents nor the engines below it are left."""
    tree = psutil.Process(split.up.process.pid).children(recursive=True)
    assert len(tree) >= 8
    kill([split.up.process.pid])
    assert psutil.wait_procs(tree, timeout=30)[1] == []
    split.up.wait_until_nothing_is_left(10)

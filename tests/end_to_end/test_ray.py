"""Mock engines on a Ray cluster of two hosts, which both are this machine: up from anywhere, again
after an interruption, through the loss of an agent, an engine and a whole host, and down with
nothing left.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from support.mock_cluster import alone, prompt_of
from support.on_ray import OnRay
from support.ray_hosts import RayHosts
from support.up_process import kill, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)

NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
CLUSTER = """
engine: mock
model: {path: mock}
router: {port: 0, replicas: 2, queue_timeout_s: 10}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 512}
  transfer: {transport: tcp}
  placement: {strategy: STRICT_SPREAD}
decode: {<<: *pool, placement: {strategy: SPREAD}}
cache: {tiers: [{type: cpu, capacity_bytes: 8 MiB}]}
supervision: {drain_timeout_s: 1, stop_timeout_s: 2, restart_delay_s: 0.1}
"""
REFUSED = CLUSTER.replace("engine: mock\nmodel: {path: mock}", "model: {path: /no/such/model}")
REFUSED += "security: {secret_file: ~/cluster.secret}\n"
ANSWER_LIMIT_S = 30.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    """Two hosts with eight CPUs for Ray each."""
    with RayHosts(2) as hosts:
        yield hosts


@pytest.fixture
def on_ray(hosts: RayHosts, tmp_path: Path) -> Iterator[OnRay]:
    """A cluster of a name of its own, which leaves nothing."""
    cluster = OnRay(hosts, tmp_path, CLUSTER, NODES)
    try:
        yield cluster
    finally:
        cluster.close()


@asynccontextmanager
async def asking(url: str, at_a_time: int = 4) -> AsyncIterator[dict[str, int]]:
    """Clients ask meanwhile: each gets its right text, or an error, and each within its limit.
    Yields how many of both there were.
    """
    counts = {"right": 0, "errors": 0}
    is_over = False

    async def ask(session: aiohttp.ClientSession, client: int) -> None:
        number = 0
        while not is_over:
            number += 1
            prompt = prompt_of(60 + number * 37 % 300, start=client * 1000 + number)
            body = {"model": "mock", "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
            try:
                async with session.post(f"{url}/completions", json=body) as response:
                    answer = await response.json()
            except aiohttp.ClientConnectionError:  # The router has been killed
                counts["errors"] += 1
                await asyncio.sleep(0.05)
                continue
            if response.status == 200:
                assert answer["choices"][0]["text"] == alone(prompt)
                counts["right"] += 1
            else:
                assert response.status in (500, 502, 503), answer
                counts["errors"] += 1
                await asyncio.sleep(0.05)

    limit = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit) as session, asyncio.TaskGroup() as group:
        for client in range(at_a_time):
            group.create_task(ask(session, client))
        try:
            yield counts
        finally:
            is_over = True


async def test_a_cluster_lives_through_losses_and_an_interrupted_up(
    on_ray: OnRay, summary: Callable[[str], None]
) -> None:
    """`up` is killed while engines load: another one, on another machine, adopts what is there, and
    a third one with another YAML is refused. An agent, an engine, a whole host and the router are
    killed with -9 under load: answers are right or errors, in time, and all nodes come back, those
    of the lost host on one that is added. After `down` nothing is left.
    """
    hosts = on_ray.hosts
    first = on_ray.up("two")
    wait_for(lambda: "prefill-0" in first.output(), 120, "the first words", on_ray.story)
    kill([first.process.pid])
    first.wait_for_end()
    up = on_ray.up("one")
    up.wait_until_serving()
    assert "runs on this Ray cluster already" in up.output()
    before = on_ray.incarnations()
    assert set(before) == set(NODES)
    url, spare = (router["url"] for router in on_ray.status()["routers"])
    assert {urlsplit(url).hostname, urlsplit(spare).hostname} == set(hosts.addresses)
    other = on_ray.yaml(CLUSTER.replace("block_size: 32", "block_size: 64"), hosts.address)
    refused = on_ray.run("up", str(other), machine="two")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "prefill.engine_args.block_size: 32 runs, 64 is in the YAML" in refused.stderr
    assert on_ray.incarnations() == before
    assert_nobody_tells_the_secret(on_ray)

    async with asking(url) as counts:
        await on_ray.until(lambda: counts["right"] > 20)
        kill([on_ray.pid(" node decode-0 ")])
        kill([on_ray.pid(before["prefill-1"])])
        await on_ray.until(lambda: on_ray.is_renewed(before, "decode-0", "prefill-1"))
        (lost,) = set(on_ray.addresses().values()) - {hosts.first}
        await asyncio.to_thread(hosts.kill, lost)
        right = counts["right"]
        await on_ray.until(lambda: counts["right"] > right + 20)
        added = hosts.add()
        await on_ray.until(on_ray.is_whole)
        assert set(on_ray.addresses().values()) == {added, hosts.first}
        await scale(on_ray, counts)
        lost_requests = counts["errors"]
        kill([on_ray.pid(" router ")])
        right = counts["right"]
        await on_ray.until(lambda: counts["right"] > right + 20)
    assert lost_requests <= counts["right"] / 20
    summary(f"on Ray: {counts['right']} right answers, {lost_requests} errors by lost nodes")
    down = await asyncio.to_thread(on_ray.run, "down", on_ray.name)
    assert down.returncode == 0, down.stderr
    assert up.wait_for_end() == 0, up.output()
    on_ray.assert_nothing_is_left()


def assert_nobody_tells_the_secret(on_ray: OnRay) -> None:
    """It is on no command line, in no environment and in no file of the hosts and of Ray but those
    of its own.
    """
    (secret,) = [path.read_text() for path in on_ray.hosts.folder.rglob("router.secret")]
    for process in on_ray.hosts.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            assert secret not in " ".join(process.cmdline())
            assert secret not in process.environ().values()
    looked_at = 0
    for folder in (on_ray.hosts.folder, on_ray.folder):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".secret":
                looked_at += 1
                assert secret.encode() not in path.read_bytes(), path
    assert looked_at > 20


async def scale(on_ray: OnRay, counts: dict[str, int]) -> None:
    """Under load the decode pool gets a third node and loses it again, without an error; `up` on
    another machine takes the cluster as it is, and the last node's room is given back.
    """
    errors = counts["errors"]
    before = on_ray.incarnations()
    grown = await asyncio.to_thread(on_ray.run, "scale", "decode", "3")
    assert grown.returncode == 0, grown.stderr + grown.stdout
    assert "decode-2 serves" in grown.stdout
    again = await asyncio.to_thread(on_ray.run, "up", str(on_ray.config), "--detach", machine="two")
    assert again.returncode == 0, again.stderr + again.stdout
    assert "router-1 is lost with its host" in again.stdout
    assert [node["node"] for node in on_ray.status("two")["nodes"]] == [*NODES, "decode-2"]
    assert set(on_ray.incarnations()) == {*NODES, "decode-2"}
    right = counts["right"]
    await on_ray.until(lambda: counts["right"] > right + 20)
    shrunk = await asyncio.to_thread(on_ray.run, "scale", "decode", "2")
    assert shrunk.returncode == 0, shrunk.stderr + shrunk.stdout
    assert on_ray.incarnations() == before
    assert counts["errors"] == errors
    assert "decode-2" not in on_ray.hosts.actors(on_ray.name)
    assert len(on_ray.hosts.groups()) == 3


def test_what_a_host_lacks_is_refused_with_its_name(on_ray: OnRay) -> None:
    """No model's folder anywhere, and another cluster secret on the second host: `up` says both,
    each with the host, starts nothing, and gives back the room it had reserved. An address without
    a Ray cluster is refused at once.
    """
    hosts = on_ray.hosts
    first, second = hosts.addresses
    homes = [on_ray.folder, hosts.home(first), hosts.home(second)]
    one, other = secrets.token_hex(32), secrets.token_hex(32)
    for home, secret in zip(homes, [one, one, other], strict=True):
        path = home / "cluster.secret"
        path.touch(mode=0o600)
        path.write_text(secret)
    at_home = {"HOME": str(on_ray.folder)}
    refused = on_ray.run("up", str(on_ray.yaml(REFUSED, hosts.address)), **at_home)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    for address in (first, second):
        assert f"({address}): model.path: there is no model folder /no/such" in refused.stderr
    assert f"({second}): security.secret_file: it holds another cluster secret" in refused.stderr
    assert refused.stderr.count("another cluster secret") == 1
    on_ray.assert_nothing_is_left()
    nowhere = on_ray.run("up", str(on_ray.yaml(REFUSED, "127.0.0.1:9")), **at_home)
    assert nowhere.returncode == 2
    assert "no Ray cluster can be reached at 127.0.0.1:9 (" in nowhere.stderr


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_router_moves_when_its_host_is_lost(on_ray: OnRay) -> None:
    """It was not on the host of `up`, which starts it on one that is added, and the nodes again:
    the commands find it there.
    """
    hosts = on_ray.hosts
    wish = f'router: {{label_selector: {{place: "!{hosts.first}"}}}}'
    config = on_ray.yaml(CLUSTER, hosts.address, wish)
    up = on_ray.up(config=config)
    up.wait_until_serving()
    (lost,) = set(hosts.addresses) - {hosts.first}
    assert f"http://{lost}:" in on_ray.status()["url"]
    hosts.kill(lost)
    added = hosts.add()
    await on_ray.until(on_ray.is_whole, 200)
    assert f"http://{added}:" in on_ray.status()["url"]
    assert on_ray.run("down", on_ray.name).returncode == 0
    assert up.wait_for_end() == 0, up.output()
    on_ray.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_pairs_share_a_host(on_ray: OnRay) -> None:
    """With `ray.pair_by: host` each prefill node has its decode node beside it."""
    config = on_ray.yaml(
        CLUSTER.replace("  placement: {strategy: STRICT_SPREAD}\n", ""),
        on_ray.hosts.address,
        "pair_by: host",
    )
    up = on_ray.run("up", "--detach", str(config))
    assert up.returncode == 0, up.stderr + on_ray.story()
    places = on_ray.addresses()
    for number in range(2):
        assert places[f"prefill-{number}"] == places[f"decode-{number}"]
    assert on_ray.run("down", on_ray.name).returncode == 0
    on_ray.assert_nothing_is_left()

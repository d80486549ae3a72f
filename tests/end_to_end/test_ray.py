"""Mock engines on a Ray cluster of two hosts, which both are this machine: up from anywhere, again
after an interruption, through the loss of an agent, an engine and a whole host, and down with
nothing left.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from support.mock_cluster import alone, prompt_of
from support.ray_hosts import RayHosts
from support.up_process import UpProcess, kill, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)

NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
CLUSTER = """
name: {name}
engine: {engine}
launcher: ray
ray: {{address: "{address}"}}
model: {{path: {model}}}
router: {{port: 0, queue_timeout_s: 10}}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 4 MiB
  engine_args: {{block_size: 32, max_model_len: 512}}
  transfer: {{transport: tcp}}
  placement: {{strategy: STRICT_SPREAD}}
decode: *pool
cache: {{tiers: [{{type: cpu, capacity_bytes: 8 MiB}}]}}
supervision: {{drain_timeout_s: 1, stop_timeout_s: 2, restart_delay_s: 0.1}}
{more}
"""
ANSWER_LIMIT_S = 30.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    """Two hosts with eight CPUs for Ray each."""
    with RayHosts(2) as hosts:
        yield hosts


@dataclass
class OnRay:
    """One cluster, and the machine from which it is handled."""

    hosts: RayHosts
    folder: Path
    name: str
    more: str = ""
    engine: str = "mock"
    model: str = "mock"
    address: str = ""
    ups: list[UpProcess] = field(default_factory=list)

    @property
    def config(self) -> Path:
        """The YAML, written anew."""
        path = self.folder / f"{self.name}.yaml"
        path.write_text(
            CLUSTER.format(
                name=self.name,
                engine=self.engine,
                model=self.model,
                address=self.address or self.hosts.address,
                more=self.more,
            )
        )
        return path

    def up(self, machine: str = "one") -> UpProcess:
        """`splitserve up` in the foreground."""
        folder = self.folder / machine
        folder.mkdir(exist_ok=True)
        self.ups.append(UpProcess(self.config, folder))
        return self.ups[-1]

    def run(
        self, *arguments: str, machine: str = "one", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Another command there."""
        env = {**os.environ, **environ, "XDG_STATE_HOME": str(self.folder / machine / "state")}
        return subprocess.run(
            [*UpProcess.command(), *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def status(self, machine: str = "one") -> dict[str, Any]:
        """As `splitserve status --json` tells it."""
        found: list[dict[str, Any]] = json.loads(
            self.run("status", "--json", machine=machine).stdout
        )["clusters"]
        return found[0] if found else {}

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the router says of its nodes; none while it does not answer."""
        state = self.folder / "one" / "state" / "splitserve"
        record = json.loads((state / f"{self.name}.json").read_bytes())
        token = (state / self.name / "operator.token").read_text()
        request = urllib.request.Request(
            f"{record['url']}/internal/status", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found: dict[str, dict[str, Any]] = json.load(answer)["nodes"]
        except OSError:
            return {}
        return found

    def wait_until_usable(self, names: tuple[str, ...] = NODES, limit_s: float = 60) -> None:
        """The router uses these nodes."""

        def is_so() -> bool:
            nodes = self.nodes()
            return all(nodes.get(name, {}).get("is_usable") for name in names)

        wait_for(is_so, limit_s, f"{names}", self.story)

    def incarnations(self) -> dict[str, str]:
        """Of the nodes that the router has."""
        return {name: node["incarnation"] for name, node in self.nodes().items()}

    def story(self) -> str:
        """What `up` said, and all logs."""
        return "\n".join([*(up.output() for up in self.ups), self.hosts.logs()])

    def pid(self, words: str) -> int:
        """Of the one process on the hosts with these words in its command line."""
        (found,) = self.hosts.served(words)
        return found.pid


@pytest.fixture
def on_ray(hosts: RayHosts, tmp_path: Path) -> Iterator[OnRay]:
    """A cluster of a name of its own, which leaves nothing."""
    cluster = OnRay(hosts, tmp_path, f"c{secrets.token_hex(3)}")
    try:
        yield cluster
    finally:
        for up in cluster.ups:
            up.close()
        cluster.address = ""
        cluster.run("down", str(cluster.config))


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


async def test_a_cluster_lives_through_losses_and_an_interrupted_up(on_ray: OnRay) -> None:
    """`up` is killed while engines load: another one, on another machine, adopts what is there.
    Commands work from there. An agent, an engine, the router and a whole host are killed with -9
    under load: answers are right or errors, in time, and all nodes come back, those of the lost
    host on one that is added. After `down` nothing is left.
    """
    hosts = on_ray.hosts
    first = on_ray.up("two")
    wait_for(lambda: "prefill-0" in first.output(), 40, "the first words", on_ray.story)
    kill([first.process.pid])
    first.wait_for_end()
    up = on_ray.up("one")
    up.wait_until_serving()
    assert "runs on this Ray cluster already" in up.output()
    before = on_ray.incarnations()
    assert set(before) == set(NODES)
    url = on_ray.status()["url"]

    async with asking(url) as counts:
        await until(lambda: counts["right"] > 20, on_ray)
        kill([on_ray.pid(" node decode-0 ")])
        kill([on_ray.pid(before["prefill-1"])])
        await until(lambda: is_renewed(on_ray, before, "decode-0", "prefill-1"), on_ray)
        lost = other_host(on_ray)
        await asyncio.to_thread(hosts.kill, lost)
        right = counts["right"]
        await until(lambda: counts["right"] > right + 20, on_ray)
        added = hosts.add()
        await until(lambda: all(on_ray.nodes().get(n, {}).get("is_usable") for n in NODES), on_ray)
        assert {address_of(node) for node in on_ray.nodes().values()} == {added, hosts.first}
        kill([on_ray.pid(" router ")])
        right = counts["right"]
        await until(lambda: counts["right"] > right + 20, on_ray)
    assert counts["right"] > counts["errors"]
    down = on_ray.run("down", on_ray.name)
    assert down.returncode == 0, down.stderr
    assert up.wait_for_end() == 0, up.output()
    assert_nothing_is_left(on_ray)


def test_what_a_host_lacks_is_refused_with_its_name(on_ray: OnRay) -> None:
    """No model's folder anywhere, and another cluster secret on the second host: `up` says both,
    each with the host, starts nothing, and gives back the room it had reserved. An address without
    a Ray cluster is refused at once.
    """
    hosts = on_ray.hosts
    on_ray.engine, on_ray.model = "vllm", "/no/such/model"
    on_ray.more = "security: {secret_file: ~/cluster.secret}"
    homes = [on_ray.folder, *(hosts.home(address) for address in hosts.addresses)]
    one, other = secrets.token_hex(32), secrets.token_hex(32)
    for home, secret in zip(homes, [one, one, other], strict=True):
        path = home / "cluster.secret"
        path.touch(mode=0o600)
        path.write_text(secret)
    refused = on_ray.run("up", str(on_ray.config), HOME=str(on_ray.folder))
    assert refused.returncode == 2, refused.stdout + refused.stderr
    first, second = hosts.addresses
    for address in (first, second):
        assert f"({address}): model.path: /no/such/model" in refused.stderr
    assert f"({second}): security.secret_file: it holds another cluster secret" in refused.stderr
    assert refused.stderr.count("another cluster secret") == 1
    assert_nothing_is_left(on_ray)
    on_ray.address = "127.0.0.1:9"
    nowhere = on_ray.run("up", str(on_ray.config), HOME=str(on_ray.folder))
    assert nowhere.returncode == 2
    assert "no Ray cluster can be reached at 127.0.0.1:9 (" in nowhere.stderr


async def until(question: Callable[[], bool], on_ray: OnRay, limit_s: float = 60) -> None:
    """It is true; clients go on asking meanwhile."""
    await asyncio.to_thread(wait_for, question, limit_s, "what the test waits for", on_ray.story)


def is_renewed(on_ray: OnRay, before: dict[str, str], *names: str) -> bool:
    """Whether other incarnations of these nodes serve."""
    nodes = on_ray.nodes()
    return all(
        nodes.get(name, {}).get("is_usable") and nodes[name]["incarnation"] != before[name]
        for name in names
    )


def address_of(node: dict[str, Any]) -> str:
    """Of the host on which the node's engine runs."""
    return str(urlsplit(node["engine_url"]).hostname)


def other_host(on_ray: OnRay) -> str:
    """The host on which there is no router."""
    addresses = {address_of(node) for node in on_ray.nodes().values()}
    (found,) = addresses - {on_ray.hosts.first}
    return found


def assert_nothing_is_left(on_ray: OnRay) -> None:
    """No process, no actor, no placement group; no secret on the disks of hosts that live."""
    assert on_ray.hosts.served() == []
    assert on_ray.hosts.actors(on_ray.name) == []
    assert on_ray.hosts.groups() == []
    for address in on_ray.hosts.addresses:
        assert not list(on_ray.hosts.home(address).glob("splitserve/**/*.secret"))
    assert on_ray.status() == {}

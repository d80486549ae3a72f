"""A cluster as it runs on several machines: on IPv6 and names with TLS, and its processes started
one by one in two network namespaces, which stand for two machines.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import ssl
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from support.certificates import LOCAL_NAMES, Authority
from support.mock_cluster import alone, prompt_of
from support.up_process import UpProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

SPLITSERVE = [sys.executable, "-m", "splitserve.orchestrator.cli.main"]
KEY_ENV = "TEST_MANY_HOSTS_KEY"
POOL = "kv_cache_bytes: 4 MiB, engine_args: {block_size: 32, max_model_len: 512}"
ONE_MACHINE = """
name: named
engine: mock
model: {{path: mock}}
router: {{host: "::1", port: 0}}
prefill: {{host: localhost, {pool}, transfer: {{transport: tcp, host: "::1"}}}}
decode: {{hosts: ["::1"], {pool}, transfer: {{transport: tcp}}}}
security:
  secret_file: {secret}
  tls: {tls}
  api_keys: [{{tenant: a, key_env: {key_env}}}]
supervision: {{drain_timeout_s: 1, stop_timeout_s: 2}}
"""
TWO_MACHINES = """
name: apart
engine: mock
model: {{path: mock}}
router: {{replicas: 2, hosts: [{router}, {prefill}], port: 21000}}
prefill: {{hosts: [{prefill}], {pool}, transfer: {{transport: tcp}}}}
decode: {{hosts: [{router}], {pool}, transfer: {{transport: tcp}}}}
security:
  tls: {tls}
  api_keys: [{{tenant: a, key_env: {key_env}}}]
supervision: {{drain_timeout_s: 1, stop_timeout_s: 2}}
"""
PROMPT = prompt_of(100, start=3)
ASK = """
import json, sys, urllib.request, ssl
url, ca, key = sys.argv[1:]
body = json.dumps(json.load(sys.stdin)).encode()
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
request = urllib.request.Request(url + "/v1/completions", body, headers)
context = ssl.create_default_context(cafile=ca)
with urllib.request.urlopen(request, timeout=20, context=context) as answer:
    print(answer.read().decode())
"""


def _body() -> dict[str, Any]:
    return {"model": "mock", "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def key() -> str:
    """A client's key."""
    return f"client-{secrets.token_hex(12)}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of both clusters."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cluster secret."""
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


@pytest.fixture(scope="module")
def named(
    tmp_path_factory: pytest.TempPathFactory, authority: Authority, secret_file: Path, key: str
) -> Iterator[UpProcess]:
    """A cluster on ``::1`` and ``localhost`` with TLS, which serves."""
    folder = tmp_path_factory.mktemp("named")
    config = folder / "cluster.yaml"
    tls = authority.issue("named").yaml
    config.write_text(ONE_MACHINE.format(pool=POOL, secret=secret_file, tls=tls, key_env=KEY_ENV))
    up = UpProcess(config, folder, {KEY_ENV: key})
    try:
        up.wait_until_serving()
        yield up
    finally:
        up.close()


async def test_a_cluster_on_ipv6_and_names_serves_https(
    named: UpProcess, authority: Authority, key: str
) -> None:
    """Its certificate is verified by the client and among its processes; the prompt's KV crosses by
    IPv6; plain HTTP gets no answer.
    """
    status = await asyncio.to_thread(named.status)
    assert status is not None
    assert status["url"].startswith("https://[::1]:")
    urls = sorted(node["engine_url"].rpartition(":")[0] for node in status["nodes"])
    assert urls == ["https://[::1]", "https://localhost"]
    context = ssl.create_default_context(cafile=authority.path)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(
            f"{status['url']}/completions", json=_body(), ssl=context
        ) as response:
            answer = await response.json()
            request_id = response.headers["x-request-id"]
        assert answer["choices"][0]["text"] == alone(PROMPT)
        root = status["url"].removesuffix("/v1")
        url = f"{root}/internal/timeline/{request_id}"
        async with session.get(url, headers=named.operator(), ssl=context) as response:
            assert (await response.json())["decision"] == "split"
        url = f"{root}/internal/http_sd"
        async with session.get(url, headers=named.operator(), ssl=context) as response:
            targets = await response.json()
        assert {target["labels"]["__scheme__"] for target in targets} == {"https"}
        assert sorted(target["targets"][0].rpartition(":")[0] for target in targets) == [
            "[::1]",
            "[::1]",
            "localhost",
        ]
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"{root.replace('https', 'http')}/health")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"{root}/health")


def test_commands_verify_the_router(named: UpProcess) -> None:
    """What asks the router does so by HTTPS, too."""
    flipped = named.run("flip", "prefill-0", "prefill")
    assert flipped.returncode == 0, flipped.stderr
    assert named.run("status", "--audit").returncode == 0


def test_no_secret_is_where_somebody_looks(named: UpProcess, secret_file: Path, key: str) -> None:
    """Neither the cluster secret nor a client's key is on a command line, in an engine's
    environment, in a log, in what the router or a command tells, or in an open file.
    """
    secret = secret_file.read_text()
    told = []
    for process in named.processes():
        told.append(" ".join(process.cmdline()))
        environ = process.environ()
        assert secret not in environ.values()
        if "engines.mock.server" in told[-1] or "agent.guard" in told[-1]:
            assert key not in environ.values()
    config = str(named.output_path.with_name("cluster.yaml"))
    for arguments in (
        ["status", "--json"],
        ["up", config, "--dry-run"],
        ["doctor", config, "--quick"],
    ):
        result = named.run(*arguments)
        told += [result.stdout, result.stderr]
    told += [path.read_text(errors="replace") for path in [*named.logs(), named.output_path]]
    state = Path(named.env["XDG_STATE_HOME"])
    for path in state.rglob("*"):
        if path.is_file() and path.suffix == ".secret":
            assert path.stat().st_mode & 0o777 == 0o600
        elif path.is_file():
            told.append(path.read_text(errors="replace"))
    assert len(told) > 10
    assert not [text for text in told if secret in text or key in text]


class Machines:
    """Two network namespaces with an address each, in one network; the first also has the
    router.
    """

    def __init__(self) -> None:
        mark = secrets.token_hex(2)
        self.names = (f"ss-{mark}-a", f"ss-{mark}-b")
        self.addresses = ("fd77::1", "fd77::2")
        self._devices = (f"ss{mark}a", f"ss{mark}b")

    def __enter__(self) -> Machines:
        try:
            for name in self.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            one, other = self._devices
            _ip("link", "add", one, "netns", self.names[0], "type", "veth", "peer", "name", other,
                "netns", self.names[1])  # fmt: skip
            for name, device, address in zip(
                self.names, self._devices, self.addresses, strict=True
            ):
                _ip("-n", name, "addr", "add", f"{address}/64", "dev", device, "nodad")
                _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def on(self, number: int, *command: str) -> list[str]:
        """The command line that runs on that machine."""
        return ["ip", "netns", "exec", self.names[number], *command]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Apart:
    """A cluster whose processes are started one by one, with a state folder for each machine."""

    def __init__(self, folder: Path, machines: Machines, config: Path, secret: Path) -> None:
        self._folder = folder
        self._machines = machines
        self._config = config
        self._environ = {**os.environ, "SPLITSERVE_SECRET_FILE": str(secret)}
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def environ(self, machine: int, **more: str) -> dict[str, str]:
        state = str(self._folder / f"state-{machine}")
        return {**self._environ, "XDG_STATE_HOME": state, **more}

    @contextmanager
    def running(self, machine: int, *command: str, **environ: str) -> Iterator[None]:
        """`splitserve COMMAND CLUSTER` runs there."""
        name = "-".join(command)
        line = self._machines.on(machine, *SPLITSERVE, *command, str(self._config))
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                line, stdout=log, stderr=log, env=self.environ(machine, **environ)
            )
        self.started[name] = process
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()

    def run(
        self, machine: int, *command: str, given: str = "", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """A command that ends."""
        return subprocess.run(
            self._machines.on(machine, *command),
            env=self.environ(machine, **environ),
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def is_ready(self, machine: int, name: str) -> bool:
        """Whether the node's own machine says so."""
        path = self._folder / f"state-{machine}" / "splitserve" / "apart" / f"{name}.status.json"
        if not path.exists():
            return False
        found = json.loads(path.read_bytes())
        return bool(found["phase"] == "ready" and found["router_connected"])

    def story(self) -> str:
        """All logs."""
        return "\n".join(p.read_text(errors="replace")[-2000:] for p in self._folder.glob("*.log"))


@pytest.mark.timeout(300)
def test_processes_in_two_network_namespaces_serve_together(
    tmp_path: Path, authority: Authority, secret_file: Path, key: str
) -> None:
    """A router and the decode node on one machine, another router and the prefill node on the
    other, IPv6 and TLS between them: both routers' answers are right, the prompt's KV has crossed,
    and the commands of each machine find the router there. A node with another secret, a
    node on the wrong machine and a certificate for another address are refused before an engine
    starts, with the machine and what to do. Stopped, nothing is left.
    """
    with ExitStack() as stack:
        machines = stack.enter_context(Machines())
        one, other = machines.addresses
        config = tmp_path / "cluster.yaml"
        files = authority.issue("apart", [*LOCAL_NAMES, one, other])
        values = {"pool": POOL, "key_env": KEY_ENV, "router": f'"{one}"', "prefill": f'"{other}"'}
        config.write_text(TWO_MACHINES.format(tls=files.yaml, **values))
        cluster = Apart(tmp_path, machines, config, secret_file)
        stack.enter_context(cluster.running(0, "router", **{KEY_ENV: key}))
        stack.enter_context(cluster.running(1, "router", "--index", "1", **{KEY_ENV: key}))
        stack.enter_context(cluster.running(0, "node", "decode-0"))
        stack.enter_context(cluster.running(1, "node", "prefill-0"))
        for machine, name in ((1, "prefill-0"), (0, "decode-0")):
            wait_for(partial(cluster.is_ready, machine, name), 60, name, cluster.story)
        for machine, address in enumerate(machines.addresses):
            status = cluster.run(machine, *SPLITSERVE, "status", "--json")
            (found,) = json.loads(status.stdout)["clusters"]
            phases = {node["node"]: node["phase"] for node in found["nodes"]}
            assert phases == {"prefill-0": "ready", "decode-0": "ready"}
            assert [router["answers"] for router in found["routers"]] == [True, True]
            url = f"https://[{address}]:21000"
            assert found["url"] == f"{url}/v1"
            ask = (sys.executable, "-c", ASK, url, str(authority.path), key)
            asked = cluster.run(1 - machine, *ask, given=json.dumps(_body()))
            assert asked.returncode == 0, f"{asked.stderr}\n{cluster.story()}"
            assert json.loads(asked.stdout)["choices"][0]["text"] == alone(PROMPT)
        log = tmp_path / "router.log"
        split = '"decision":"split","prefill_node":"prefill-0"'
        wait_for(lambda: split in log.read_text(), 30, "the request's line", cluster.story)

        strange = tmp_path / "strange"
        strange.touch(mode=0o600)
        strange.write_text(secrets.token_hex(32))
        node = (*SPLITSERVE, "node", "prefill-0", str(config))
        refused = cluster.run(1, *node, SPLITSERVE_SECRET_FILE=str(strange))
        assert refused.returncode == 2
        assert "another cluster secret" in refused.stderr
        wait_for(lambda: "has another cluster secret" in log.read_text(), 30, "the router's word")
        elsewhere = cluster.run(0, *node)
        assert elsewhere.returncode == 2
        assert f"cannot listen on {other}" in elsewhere.stderr
        authority.issue("apart", [one])
        untrusted = cluster.run(1, *node)
        assert untrusted.returncode == 2
        assert f"would not be trusted as {other}'s (prefill-0)" in untrusted.stderr
        pids = [process.pid for process in cluster.started.values()]
        below = [p for pid in pids for p in psutil.Process(pid).children(recursive=True)]
        assert len(below) > 2
    assert [process.returncode for process in cluster.started.values()] == [0] * 4
    assert not [process for process in below if process.is_running()]

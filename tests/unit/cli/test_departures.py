"""`splitserve drain` and `restart`: what they ask of the router, print, and end with."""

from __future__ import annotations

import asyncio
import os
from typing import IO, TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from router_stubs.cluster import SECRET, stub_cluster

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.agent.status_file import NodeStatus, write_status
from splitserve.orchestrator.cli import departures, running_nodes
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError
from splitserve.orchestrator.config import dump_resolved, parse
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NODES = ("prefill-0", "decode-0", "decode-1")


class FakeCluster:
    """A running `up` with its router: every order is obeyed at the next look at the nodes."""

    def __init__(self, files: ClusterFiles) -> None:
        self.files = files
        self.orders: list[tuple[Any, ...]] = []
        self.silent = 0
        """How many questions get no answer."""
        self.later: list[Callable[[], None]] = []
        """What happens after each of the next looks."""
        self.nodes: dict[str, dict[str, Any]] = {}
        self.then: Callable[[str, bool], None] = self.obey
        for name in NODES:
            self.serve(name, 1)

    def serve(self, name: str, life: int) -> None:
        """A life of a node is ready."""
        self.nodes[name] = {
            "role": name.partition("-")[0],
            "incarnation": f"{name}-{life}",
            "is_usable": True,
            "is_draining": False,
            "prefill_legs": 0,
            "decode_legs": 0,
            "open_transfers": None,
            "leased_blocks": None,
        }
        self.write(name, "ready")

    def write(self, name: str, phase: str, **fields: Any) -> None:
        """What the node's agent says."""
        fixed: dict[str, Any] = {"stage": "", "elapsed_s": 0.0, "incarnation": "", "agent_pid": 1}
        status = NodeStatus(
            node=name, phase=phase, role="", engine_url="", log_path="", **(fixed | fields)
        )
        write_status(self.files.run_dir, status)

    def obey(self, name: str, restart: bool) -> None:
        """The node leaves, or another life of it serves."""
        if restart:
            self.serve(name, 2)
        else:
            del self.nodes[name]
            self.write(name, "left")

    def owe(self, name: str, restart: bool) -> None:
        """As ``obey``, after two looks at what it owes."""
        self.nodes[name] |= {"is_usable": False, "is_draining": True, "decode_legs": 2}
        self.later = [
            lambda: self.nodes[name].update(decode_legs=0, leased_blocks=7),
            lambda: self.obey(name, restart),
        ]


class FakeRouter:
    """Stands in for ``RouterClient``."""

    cluster: FakeCluster

    def __init__(self, files: ClusterFiles, record: ClusterRecord) -> None:
        assert files == self.cluster.files

    def nodes(self) -> dict[str, dict[str, Any]]:
        cluster = self.cluster
        if cluster.silent:
            cluster.silent -= 1
            raise RouterSilentError("it restarts")
        seen = {name: dict(node) for name, node in cluster.nodes.items()}
        if cluster.later:
            cluster.later.pop(0)()
        return seen

    def drain(
        self, node: str, *, restart: bool, force: bool, timeout_s: float | None
    ) -> tuple[str, str]:
        cluster = self.cluster
        if node not in cluster.nodes:
            return "unknown_node", "unknown"
        decode = [name for name, n in cluster.nodes.items() if n["role"] == "decode"]
        if decode == [node] and not force:
            return "last_decode_node", f"{node} is the last decode node"
        cluster.orders.append((node, restart, force, timeout_s))
        cluster.then(node, restart)
        return "draining", f"{node} gets no new work"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """One that runs, called `test`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(running_nodes, "POLL_S", 0.001)
    monkeypatch.setattr(running_nodes, "RouterClient", FakeRouter)
    files = ClusterFiles("test")
    lock: IO[bytes] = files.lock()
    config = parse("engine: mock\nmodel: {path: m}\ndecode: {replicas: 2}\n")
    files.begin_run(dump_resolved(config), "token")
    files.write_record(record())
    FakeRouter.cluster = FakeCluster(files)
    yield FakeRouter.cluster
    lock.close()


def record(url: str = "http://127.0.0.1:1", more_urls: tuple[str, ...] = ()) -> ClusterRecord:
    """What `up` has written; this process is the `up`."""
    return ClusterRecord(
        name="test",
        run="r",
        pid=os.getpid(),
        source="s",
        url=url,
        more_urls=more_urls,
        nodes=NODES,
        phase="serving",
        started=0.0,
        log_dir="",
    )


def run(*arguments: str) -> Result:
    """Run `splitserve` in this process."""
    return CliRunner().invoke(main, arguments)


def test_a_node_is_drained(cluster: FakeCluster) -> None:
    """Without --wait the command returns at once."""
    cluster.then = cluster.owe
    result = run("drain", "decode-1", "--timeout", "9", "--cluster", "test")
    assert result.exit_code == 0, result.output
    assert cluster.orders == [("decode-1", False, False, 9.0)]
    assert "decode-1 gets no new work" in result.stdout


def test_a_drain_is_waited_for(cluster: FakeCluster) -> None:
    """What is owed is said when it changes; a router that restarts is waited for."""
    cluster.then = cluster.owe
    cluster.silent = 2
    result = run("drain", "decode-1", "--wait")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "decode-1 gets no new work",
        "decode-1: waits for 2 decode legs",
        "decode-1: waits for 7 leased blocks",
        "decode-1 has left",
    ]
    again = run("drain", "decode-1", "--wait")
    assert (again.exit_code, again.stdout) == (0, "decode-1 has left already\n")


def test_nodes_restart_one_after_the_other(cluster: FakeCluster) -> None:
    """All of them, each one awaited before the next."""
    usable: list[list[str]] = []

    def look(name: str, restart: bool) -> None:
        usable.append([n for n, node in cluster.nodes.items() if node["is_usable"]])
        cluster.owe(name, restart)

    cluster.then = look
    result = run("restart", "--rolling")
    assert result.exit_code == 0, result.output
    assert [order[:2] for order in cluster.orders] == [(name, True) for name in NODES]
    assert usable == [list(NODES)] * 3
    assert [line for line in result.stdout.splitlines() if "serves again" in line] != []
    assert {node["incarnation"] for node in cluster.nodes.values()} == {f"{n}-2" for n in NODES}


def test_a_rolling_restart_stops_at_a_node_that_does_not_come_back(cluster: FakeCluster) -> None:
    """The others are left alone, and named."""

    def fail(name: str, restart: bool) -> None:
        del cluster.nodes[name]
        cluster.write(name, "failed", likely_cause="out of memory")

    cluster.then = fail
    result = run("restart", "decode-0", "prefill-0", "decode-1", "--rolling")
    assert result.exit_code == 1
    assert "decode-0 does not come back: failed: out of memory" in result.stderr
    assert "not restarted: prefill-0, decode-1" in result.stderr
    assert [order[0] for order in cluster.orders] == ["decode-0"]


@pytest.mark.parametrize("phase", ["left", "failed"])
def test_a_node_that_is_down_is_started_again(cluster: FakeCluster, phase: str) -> None:
    """By `up`, which is asked by a file; the status that the last agent left is not taken for the
    new one's.
    """
    del cluster.nodes["decode-1"]
    cluster.write("decode-1", phase)

    def start() -> None:
        assert cluster.files.is_wished("decode-1")
        cluster.files.take_wish("decode-1")
        cluster.serve("decode-1", 5)

    cluster.later = [lambda: None, lambda: None, start]
    result = run("restart", "decode-1")
    assert result.exit_code == 0, result.output
    assert cluster.orders == []
    assert "decode-1 is started again" in result.stdout


def test_a_node_that_is_restarting_anyway_is_waited_for(cluster: FakeCluster) -> None:
    """The router does not know it at the moment."""
    del cluster.nodes["prefill-0"]
    cluster.write("prefill-0", "loading", stage="weights")
    cluster.later = [lambda: None] * 2 + [lambda: cluster.serve("prefill-0", 3)]
    result = run("restart", "prefill-0")
    assert result.exit_code == 0, result.output
    assert "prefill-0 is loading: weights; waiting for it" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("drain", "decode-9"), "known: prefill-0, decode-0, decode-1"),
        (("restart", "prefill-0", "x", "--rolling"), "test has no node 'x'"),
        (("restart",), "--rolling"),
        (("restart", "decode-0", "decode-1"), "--rolling"),
        (("drain", "decode-1", "--timeout", "-1"), "--timeout"),
    ],
)
def test_what_is_refused(cluster: FakeCluster, arguments: tuple[str, ...], words: str) -> None:
    """Status 2 with the reason, and nothing is touched."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert cluster.orders == []


def test_the_last_decode_node_is_kept(cluster: FakeCluster) -> None:
    """Before anything is touched; --force does it all the same, also all nodes at once."""
    run("drain", "decode-1")
    cluster.orders.clear()
    for arguments in (("drain", "decode-0"), ("restart", "decode-0")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "add --force" in result.stderr
    rolling = run("restart", "prefill-0", "decode-0", "--rolling")
    assert (rolling.exit_code, cluster.orders) == (2, [])
    forced = run("restart", "prefill-0", "decode-0", "--force")
    assert forced.exit_code == 0, forced.output
    assert [order[:3] for order in cluster.orders] == [
        ("prefill-0", True, True),
        ("decode-0", True, True),
    ]


def test_a_node_that_the_router_does_not_know_cannot_be_drained(cluster: FakeCluster) -> None:
    """Its state says why."""
    del cluster.nodes["decode-1"]
    cluster.write("decode-1", "dead", likely_cause="killed by signal 9")
    result = run("drain", "decode-1")
    assert result.exit_code == 2
    assert "dead: killed by signal 9" in result.stderr


def test_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 3."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run("drain", "decode-0").exit_code == 3
    assert run("restart", "--rolling").exit_code == 3
    assert run("drain", "decode-0", "--cluster", "other").exit_code == 3


async def test_the_router_is_asked_with_the_token_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real router: its nodes, a drain, a refusal; a wrong token and a router that is gone are
    told.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = ClusterFiles("test")
    files.begin_run("{}", operator_token(SECRET))
    async with stub_cluster("p0", "d0", keys={"sk-1": "a"}) as stub:
        client = RouterClient(files, record(stub.url))
        nodes = await asyncio.to_thread(client.nodes)
        assert nodes["p0"]["is_usable"]
        assert set(departures._OWED) < nodes["p0"].keys()

        def drain(node: str) -> tuple[str, str]:
            return client.drain(node, restart=True, force=False, timeout_s=None)

        assert (await asyncio.to_thread(drain, "d0"))[0] == "last_decode_node"
        assert await asyncio.to_thread(drain, "a/b") == (
            "unknown_node",
            "the router knows no node 'a%2Fb'; known: d0, p0",
        )
        assert (await asyncio.to_thread(drain, "p0"))[0] == "draining"
        assert stub.router.core.membership.nodes["p0"].drain is not None
        files.token_path.write_text("wrong")
        for ask in (client.nodes, lambda: drain("p0")):
            with pytest.raises(RouterSilentError, match="401"):
                await asyncio.to_thread(ask)
    with pytest.raises(RouterSilentError, match="does not answer"):
        await asyncio.to_thread(client.nodes)


async def test_every_router_forgets_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gone is left out; while the node takes part at one it is not forgotten."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = ClusterFiles("test")
    files.begin_run("{}", operator_token(SECRET))
    async with stub_cluster("p0", "d0") as first, stub_cluster("p0", "d0", "d1") as second:
        found = record(first.url, more_urls=("http://127.0.0.1:1", second.url))
        client = RouterClient(files, found)
        assert not await asyncio.to_thread(client.forget, "d1")
        assert await asyncio.to_thread(client.forget, "d2")
    with pytest.raises(RouterSilentError, match="does not answer"):
        await asyncio.to_thread(client.forget, "d2")

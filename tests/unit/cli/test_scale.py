"""`splitserve scale`: what it refuses, whom it drains, what it asks of `up`, and what it prints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from splitserve.orchestrator.agent.status_file import NodeStatus, write_status
from splitserve.orchestrator.cli import running_nodes
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.cli.router_client import RouterClient
from splitserve.orchestrator.cli.scale import Scaling
from splitserve.orchestrator.config import dump_resolved, load_resolved, nodes, parse
from splitserve.orchestrator.config.scaling import scaled
from splitserve.orchestrator.launch.files import (
    ClusterFiles,
    ClusterRecord,
    ScaleAnswer,
    ScaleOrder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """
engine: mock
model: {path: m}
prefill: {replicas: 1, cpus: [[0, 1]], port_base: 9000, transfer: {port_base: 9100}}
decode: {replicas: 3, port_base: 9200, transfer: {port_base: 9300}}
"""


class FakeCluster:
    """A running `up` with its router: what is ordered has happened at once."""

    def __init__(self, files: ClusterFiles) -> None:
        self.files = files
        self.nodes: dict[str, dict[str, Any]] = {}
        self.done: list[tuple[str, ...]] = []
        """Drains, orders of sizes and what was forgotten, as they came."""
        self.problems: tuple[str, ...] = ()
        """Why `up` does not do what it is asked for."""
        self.fails = False
        """A new node does not come up."""
        self.asked_twice = True
        """The router has heard of an end before it is asked to forget."""
        for node in nodes(parse(CONFIG)):
            self.serve(node.name)

    def serve(self, name: str) -> None:
        role = name.partition("-")[0]
        self.nodes[name] = {"role": role, "incarnation": name, "is_usable": True}
        self.write(name, "ready")

    def write(self, name: str, phase: str) -> None:
        status = NodeStatus(
            node=name,
            phase=phase,
            role="",
            stage="",
            elapsed_s=0.0,
            incarnation=name,
            agent_pid=1,
            engine_url="",
            log_path="",
        )
        write_status(self.files.run_dir, status)

    def obey(self, order: ScaleOrder) -> None:
        """As `up` does."""
        self.done.append(("size", order.pool, str(order.replicas), str(order.cpus)))
        if not self.problems:
            found = scaled(
                load_resolved(self.files.config_path), order.pool, order.replicas, cpus=order.cpus
            )
            self.files.write_resolved(dump_resolved(found.config))
            for name in found.new:
                self.write(name, "failed") if self.fails else self.serve(name)
        self.files.answer_scale(ScaleAnswer(ticket=order.ticket, problems=self.problems))


class FakeRouter:
    """Stands in for ``RouterClient``."""

    cluster: FakeCluster

    def __init__(self, files: ClusterFiles, record: ClusterRecord) -> None:
        assert files == self.cluster.files

    def nodes(self) -> dict[str, dict[str, Any]]:
        return dict(self.cluster.nodes)

    def drain(self, node: str, **_: Any) -> tuple[str, str]:
        if node not in self.cluster.nodes:
            return "unknown_node", "unknown"
        self.cluster.done.append(("drain", node))
        del self.cluster.nodes[node]
        self.cluster.write(node, "left")
        return "draining", f"{node} gets no new work"

    def forget(self, node: str) -> bool:
        self.cluster.asked_twice = not self.cluster.asked_twice
        if self.cluster.asked_twice:
            self.cluster.done.append(("forget", node))
        return self.cluster.asked_twice


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """One that runs, called `test`: a pinned prefill node and three decode nodes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(running_nodes, "POLL_S", 0.001)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(running_nodes, "RouterClient", FakeRouter)
    monkeypatch.setattr(RouterClient, "forget", FakeRouter.forget)
    monkeypatch.setattr(
        ClusterFiles, "order_scale", lambda files, order: FakeRouter.cluster.obey(order)
    )
    files = ClusterFiles("test")
    with files.lock():
        files.begin_run(dump_resolved(parse(CONFIG)), "token")
        files.write_record(record())
        FakeRouter.cluster = FakeCluster(files)
        yield FakeRouter.cluster


def record(**changes: Any) -> ClusterRecord:
    """What `up` has written; this process is the `up`."""
    found = ClusterRecord(
        name="test",
        run="r",
        pid=os.getpid(),
        source="my cluster.yaml",
        url="http://127.0.0.1:1",
        nodes=tuple(node.name for node in nodes(parse(CONFIG))),
        phase="serving",
        started=0.0,
        log_dir="",
    )
    return msgspec.structs.replace(found, **changes)


def run(*arguments: str) -> Result:
    """Run `splitserve scale` in this process."""
    return CliRunner().invoke(main, ["scale", *arguments])


def test_a_pool_grows(cluster: FakeCluster) -> None:
    """The command returns when every new node serves."""
    result = run("decode", "5")
    assert result.exit_code == 0, result.output
    assert cluster.done == [("size", "decode", "5", "()")]
    assert [line.partition(" (")[0] for line in result.stdout.splitlines()] == [
        "decode-3 serves",
        "decode-4 serves",
    ]
    again = run("decode", "5")
    assert (again.exit_code, again.stdout) == (0, "test has 5 decode nodes already\n")


def test_new_nodes_of_a_pinned_pool_get_cpus(cluster: FakeCluster) -> None:
    """Their own, or those of the others with a note."""
    own = run("prefill", "2", "--cpus", "4-5")
    assert own.exit_code == 0, own.output
    assert cluster.done == [("size", "prefill", "2", "((4, 5),)")]
    assert "prefill-1 serves on CPUs 4-5" in own.stdout
    assert not own.stderr
    shared = run("prefill", "3")
    assert shared.exit_code == 0, shared.output
    assert "prefill-2 serves on CPUs 0-1" in shared.stdout
    assert "prefill-2 share the CPUs of the other prefill nodes" in shared.stderr


def test_a_pool_shrinks_by_its_highest_nodes(cluster: FakeCluster) -> None:
    """They are drained, then their agents end, then the router forgets them; one that has failed
    before owes nothing.
    """
    del cluster.nodes["decode-2"]
    cluster.write("decode-2", "failed")
    result = run("decode", "1")
    assert result.exit_code == 0, result.output
    assert cluster.done == [
        ("drain", "decode-1"),
        ("size", "decode", "1", "()"),
        ("forget", "decode-2"),
        ("forget", "decode-1"),
    ]
    assert result.stdout.splitlines()[-1] == "decode-1 is no part of the cluster any more"


def test_the_last_decode_node_stays(cluster: FakeCluster) -> None:
    """Whatever pool it is of: nothing is drained."""
    cluster.nodes["decode-0"]["role"] = "prefill"
    refused = run("decode", "1")
    assert refused.exit_code == 2
    assert (
        "decode-1 and decode-2 are the last decode nodes: without them no request is answered "
        "(decode-0 prefills now); add --force"
    ) in refused.stderr
    cluster.nodes["decode-1"]["role"] = "prefill"
    assert "decode-2 is the last decode node: without it" in run("decode", "1").stderr
    assert not cluster.done
    assert run("decode", "1", "--force").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("decode", "0"), "a pool keeps at least one node: without a decode node no request is"),
        (("prefill", "0"), "decode nodes can compute prompts themselves"),
        (("decode", "4", "--cpus", "7"), "--cpus: decode.cpus is not in the YAML"),
        (("decode", "4", "--gpus", "0"), "--gpus: decode.gpus is not in the YAML"),
        (("prefill", "3", "--cpus", "7"), "--cpus: 1 list for 2 new nodes; give one for each"),
        (("prefill", "2", "--cpus", "1"), "CPU 1 is given to prefill-0 and prefill-1"),
        (("prefill", "2", "--cpus", "0-99999999999"), "is no list of numbers such as 0-3,6"),
        (("prefill", "2", "--cpus", "6000"), "--cpus: 6000 cannot be used here; this machine"),
        (("prefill", "2", "--cpus", "x"), "'x' is no list of numbers such as 0-3,6"),
        (("prefill", "60"), "prefill-50 HTTP (prefill.port_base); move one of them"),
        (("prefill", "1000000000"), "a pool of more than 1000 nodes"),
        (("decode", "-1"), "NODES must be at least 1"),
        (("decode", "2", "--cpu", "1"), "No such option '--cpu'"),
        (("both", "2"), "'both' is not one of 'prefill', 'decode'"),
    ],
)
def test_what_cannot_be_is_refused(
    cluster: FakeCluster, arguments: tuple[str, ...], reason: str
) -> None:
    """With exit status 2, before anything is done."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert reason in result.stderr
    assert not cluster.done


def test_somebody_elses_nodes_are_not_scaled(cluster: FakeCluster) -> None:
    """The message says how they are."""
    cluster.files.write_record(record(launcher="none"))
    result = run("decode", "4")
    assert result.exit_code == 2
    assert "splitserve render kubernetes 'my cluster.yaml'" in result.stderr
    assert "splitserve node decode-3 'my cluster.yaml'" in result.stderr


def test_a_cluster_that_starts_is_left_alone(cluster: FakeCluster) -> None:
    """It says what it does."""
    cluster.files.write_record(record(phase="starting"))
    result = run("decode", "4")
    assert (result.exit_code, result.stderr.strip()) == (
        2,
        "error: test is starting; wait until it serves",
    )


def test_two_at_once_are_one_after_the_other(cluster: FakeCluster) -> None:
    """The second one is refused."""
    with cluster.files.scale_lock():
        result = run("decode", "4")
    assert result.exit_code == 2
    assert "another `splitserve scale` of test is at work" in result.stderr
    assert run("decode", "4").exit_code == 0


def test_what_up_says_no_to_is_told(cluster: FakeCluster) -> None:
    """And nothing is waited for."""
    cluster.problems = ("port 9206 on 127.0.0.1 is in use",)
    result = run("decode", "4")
    assert result.exit_code == 2
    assert "port 9206 on 127.0.0.1 is in use" in result.stderr


def test_a_new_node_that_fails_is_told(cluster: FakeCluster) -> None:
    """With the command that takes it away again."""
    cluster.fails = True
    result = run("decode", "4")
    assert result.exit_code == 1
    assert "decode-3 does not come up" in result.stderr
    assert "`splitserve scale decode 3` removes it" in result.stderr


def test_nodes_that_do_not_run_are_told_with_the_size(cluster: FakeCluster) -> None:
    """A pool may have its number and be smaller all the same: how they come back is said."""
    cluster.write("decode-1", "left")
    one = run("decode", "3")
    assert one.exit_code == 0
    assert one.stdout == (
        "test has 3 decode nodes already, but decode-1 has left: `splitserve restart decode-1` "
        "brings it back\n"
    )
    cluster.write("decode-2", "failed")
    assert (
        "decode-1 has left, decode-2 has failed: `splitserve restart --rolling decode-1 decode-2"
        in (run("decode", "3").stdout)
    )


def interrupt_while_waiting(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Ctrl-C comes there."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scaling, verb, interrupted)


@pytest.mark.parametrize(
    ("verb", "size", "told"),
    [
        ("nodes", "1", "nothing has been changed"),
        (
            "wait_until_left",
            "1",
            "still leaving: decode-2, decode-1; `splitserve scale decode 1` finishes it, "
            "`splitserve restart NODE` brings back one that has left",
        ),
        (
            "wait_for_new",
            "5",
            "still loading: decode-3, decode-4; `splitserve status test` shows how far, "
            "`splitserve scale decode 3` takes away what is new",
        ),
    ],
)
def test_interrupted_it_says_what_goes_on(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, verb: str, size: str, told: str
) -> None:
    """And what to do, with exit status 130."""
    interrupt_while_waiting(monkeypatch, verb)
    result = run("decode", size)
    assert result.exit_code == 130
    assert result.stderr.strip().splitlines()[-1] == f"interrupted; {told}"
    assert "Aborted" not in result.output


def test_a_cluster_that_is_stopped_meanwhile_is_told(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `down` has taken away is not missed in other words."""

    def stopped(router: FakeRouter) -> dict[str, dict[str, Any]]:
        cluster.files.remove_record()
        monkeypatch.setattr(running_nodes, "is_alive", lambda files, record: False)
        return RouterClient(cluster.files, record()).nodes()

    monkeypatch.setattr(FakeRouter, "nodes", stopped)
    result = run("decode", "1")
    assert result.exit_code == 1
    assert result.stderr.strip() == "error: test has been stopped meanwhile"

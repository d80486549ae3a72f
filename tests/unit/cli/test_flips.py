"""`splitserve flip` and what `status` says of roles."""

from __future__ import annotations

import asyncio
import json
import os
from typing import IO, TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from router_stubs.cluster import SECRET, stub_cluster

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.agent.status_file import NodeStatus, write_status
from splitserve.orchestrator.cli import flips, running_nodes, up
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError
from splitserve.orchestrator.cli.tune_changes import apply_split
from splitserve.orchestrator.config import dump_resolved, parse
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord
from splitserve.orchestrator.tuner.trial import Split

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODES = ("prefill-0", "decode-0", "decode-1")
NOTHING = {"legs": 0, "transfers": 0, "leased_blocks": 0}


class FakeRouter:
    """Stands in for ``RouterClient``: flips what it is told to."""

    verdict = "flipped"
    orders: tuple[tuple[str, str, bool], ...] = ()
    owed: tuple[dict[str, int], ...] = ()
    """What the flipped node owes at each of the next looks; then nothing."""
    roles: dict[str, str] = {}  # noqa: RUF012
    decode_legs: dict[str, int] = {}  # noqa: RUF012
    silent = 0
    autotune: dict[str, Any] | None = None

    def __init__(self, files: ClusterFiles, record: ClusterRecord) -> None:
        assert files.name == record.name == "test"

    def flip(self, node: str, role: str, *, force: bool = False) -> tuple[str, str]:
        FakeRouter.orders += ((node, role, force),)
        if self.verdict == "flipped":
            self.roles[node] = role
        return self.verdict, f"{node}: {self.verdict}"

    def nodes(self, timeout_s: float = 1.0) -> dict[str, dict[str, Any]]:
        if FakeRouter.silent:
            FakeRouter.silent -= 1
            raise RouterSilentError("it restarts")
        owed = {**NOTHING, **(self.owed[0] if self.owed else {})}
        FakeRouter.owed = self.owed[1:]
        return {
            name: {
                "role": role,
                "is_usable": True,
                "is_flipping": any(owed.values()),
                "owed": owed,
                "prefill_legs": 0,
                "decode_legs": self.decode_legs.get(name, 0),
            }
            for name, role in self.roles.items()
        }

    def status(self, timeout_s: float = 1.0) -> dict[str, Any]:
        told = {"autotune": self.autotune} if self.autotune else {}
        return {"nodes": self.nodes(timeout_s), **told}


def record(url: str = "http://127.0.0.1:1") -> ClusterRecord:
    """What `up` has written; this process is the `up`."""
    return ClusterRecord(
        name="test",
        run="r",
        pid=os.getpid(),
        source="s",
        url=url,
        nodes=NODES,
        phase="serving",
        started=0.0,
        log_dir="",
    )


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterFiles]:
    """Those of a running cluster called `test`, whose router is a fake."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(running_nodes, "POLL_S", 0.001)
    monkeypatch.setattr(flips, "SETTLE_S", 0.01)
    for name, value in {"orders": (), "owed": (), "silent": 0, "verdict": "flipped"}.items():
        monkeypatch.setattr(FakeRouter, name, value)
    roles = {name: name.partition("-")[0] for name in NODES}
    monkeypatch.setattr(FakeRouter, "roles", roles)
    for module in (running_nodes, up):
        monkeypatch.setattr(module, "RouterClient", FakeRouter)
    files = ClusterFiles("test")
    lock: IO[bytes] = files.lock()
    config = parse("engine: mock\nmodel: {path: m}\ndecode: {replicas: 2}\n")
    files.begin_run(dump_resolved(config), "token")
    files.write_record(record())
    yield files
    lock.close()


def run(*arguments: str) -> Result:
    """Run `splitserve` in this process."""
    return CliRunner().invoke(main, arguments)


def write(files: ClusterFiles, name: str, role: str, **fields: Any) -> None:
    """What the node's agent says."""
    fixed: dict[str, Any] = {
        "phase": "ready",
        "stage": "",
        "elapsed_s": 0.0,
        "incarnation": "",
        "agent_pid": 1,
        "engine_url": "",
        "log_path": "",
        "router_connected": True,
    }
    status = NodeStatus(node=name, role=role, pool=name.partition("-")[0], **(fixed | fields))
    write_status(files.run_dir, status)


def test_a_node_is_flipped(files: ClusterFiles) -> None:
    """The router's words are printed; without --wait that is all."""
    result = run("flip", "decode-1", "prefill", "--cluster", "test")
    assert (result.exit_code, result.stdout) == (0, "decode-1: flipped\n")
    assert FakeRouter.orders == (("decode-1", "prefill", False),)


def test_a_recommended_split_is_applied(
    files: ClusterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node with the least work changes, what it owes is waited for; then nothing is to do."""
    monkeypatch.setattr(FakeRouter, "decode_legs", {"decode-0": 5, "decode-1": 2})
    FakeRouter.owed = ({}, {}, {"legs": 2}, {"legs": 2}, {"legs": 1})
    config = parse("name: test\nengine: mock\nmodel: {path: m}\ndecode: {replicas: 2}\n")
    for _ in range(2):
        apply_split(config, Split(2, 1))
        assert FakeRouter.orders == (("decode-1", "prefill", False),)
        assert FakeRouter.owed == ()


@pytest.mark.parametrize(
    ("split", "words"),
    [(Split(0, 3), "at least one prefill node"), (Split(2, 2), "3 nodes take part")],
)
def test_a_split_that_cannot_be_applied(files: ClusterFiles, split: Split, words: str) -> None:
    """Said with the reason, and nothing is changed."""
    config = parse("name: test\nengine: mock\nmodel: {path: m}\ndecode: {replicas: 2}\n")
    with pytest.raises(RefusedError, match=words):
        apply_split(config, split)
    assert FakeRouter.orders == ()


def test_a_flip_is_waited_for(files: ClusterFiles) -> None:
    """What is owed is said when it changes; a router that restarts is waited for."""
    FakeRouter.silent = 2
    FakeRouter.owed = ({"legs": 2}, {"legs": 2}, {"transfers": 1, "leased_blocks": 7})
    result = run("flip", "decode-1", "prefill", "--wait")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "decode-1: flipped",
        "decode-1: still owes 2 legs",
        "decode-1: still owes 1 open transfers, 7 leased blocks",
        "decode-1 owes nothing of its old role any more",
    ]


def test_a_role_that_the_node_has_is_no_fault(files: ClusterFiles) -> None:
    """A flip may be said twice; the second one waits for the first."""
    FakeRouter.verdict = "same_role"
    FakeRouter.owed = ({"legs": 1},)
    result = run("flip", "decode-1", "decode", "--wait")
    assert result.exit_code == 0, result.output
    assert "still owes 1 legs" in result.stdout


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("last_prefill_node", "decode-1: last_prefill_node; add --force"),
        ("last_decode_node", "make another node a decode node before"),
        ("not_flippable", "decode-1: not_flippable"),
        ("leaving", "decode-1: leaving"),
        ("unknown_node", "the router has no decode-1 to flip: it is dead: killed by signal 9"),
    ],
)
def test_what_the_router_refuses(files: ClusterFiles, verdict: str, words: str) -> None:
    """Status 2, with the reason and what to do."""
    FakeRouter.verdict = verdict
    write(files, "decode-1", "decode", phase="dead", likely_cause="killed by signal 9")
    result = run("flip", "decode-1", "prefill", "--wait")
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decode-9", "prefill"), "known: prefill-0, decode-0, decode-1"),
        (("decode-1", "both"), "'both' is not one of"),
        (("decode-1",), "Missing argument 'ROLE'"),
    ],
)
def test_what_is_refused_before(files: ClusterFiles, arguments: tuple[str], words: str) -> None:
    """Status 2; the router is not asked."""
    result = run("flip", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr.replace("{prefill|decode}", "ROLE")
    assert FakeRouter.orders == ()


def test_somebody_else_flips_it_back(files: ClusterFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is told."""
    monkeypatch.setattr(FakeRouter, "verdict", "same_role")
    result = run("flip", "decode-1", "prefill", "--wait")
    assert result.exit_code == 1
    assert "decode-1 has been made a decode node meanwhile" in result.stderr


def test_status_shows_roles_and_what_is_owed(
    files: ClusterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a flipped node where it came from; whether nodes may change roles; also without a
    router.
    """
    for name in NODES:
        write(files, name, "prefill" if name == "decode-1" else name.partition("-")[0])
    FakeRouter.roles.clear()
    FakeRouter.roles["decode-1"] = "prefill"
    FakeRouter.owed = ({"legs": 3},)
    (cluster,) = json.loads(run("status", "test", "--json").stdout)["clusters"]
    assert [(n["role"], n["pool"]) for n in cluster["nodes"]] == [
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("prefill", "decode"),
    ]
    assert [n["owed"] for n in cluster["nodes"]] == [None, None, NOTHING | {"legs": 3}]
    FakeRouter.owed = ({"legs": 3},)
    monkeypatch.setenv("COLUMNS", "160")
    text = run("status", "test").stdout
    for words in (
        "prefill (was decode)",
        "decode-1 still owes 3 legs of its old role",
        "roles: nodes may change them",
    ):
        assert words in text
    FakeRouter.silent = 1
    write(files, "decode-0", "decode", flip_obstacle="a is 1 but b is 2")
    text = run("status", "test").stdout
    assert "roles: fixed: a is 1 but b is 2" in text
    assert "owes" not in text


@pytest.mark.parametrize(
    ("mode", "decisions", "words"),
    [
        ("advise", [], "autotune: advise; has decided nothing yet"),
        ("on", [{"node": "", "why": "keeps 1:2"}], "autotune: on; keeps 1:2"),
        (
            "advise",
            [{"node": "d0", "why": "d0 becomes prefill: x"}, {"node": "", "why": "older"}],
            "autotune: advise; advises: d0 becomes prefill: x",
        ),
    ],
)
def test_status_shows_what_was_decided_last(
    files: ClusterFiles,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    decisions: list[dict[str, str]],
    words: str,
) -> None:
    """One line; whether it is only advice; nothing where it is off."""
    for name in NODES:
        write(files, name, name.partition("-")[0])
    monkeypatch.setenv("COLUMNS", "160")
    assert "autotune" not in run("status", "test").stdout
    monkeypatch.setattr(FakeRouter, "autotune", {"mode": mode, "decisions": decisions})
    assert words in run("status", "test").stdout


async def test_the_router_is_asked_with_the_token_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real router: a flip, a refusal, and what it owes; a wrong token is told."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    cluster = ClusterFiles("test")
    cluster.begin_run("{}", operator_token(SECRET))
    async with stub_cluster("p0", "d0", "d1") as stub:
        client = RouterClient(cluster, record(stub.url))
        flipped = await asyncio.to_thread(client.flip, "d1", "prefill")
        assert flipped == ("flipped", "d1 takes prefill work from now on")
        verdict, _ = await asyncio.to_thread(client.flip, "d0", "prefill")
        assert verdict == "last_decode_node"
        nodes = await asyncio.to_thread(client.nodes)
        assert (nodes["d1"]["role"], nodes["d1"]["owed"]) == ("prefill", NOTHING)
        cluster.token_path.write_text("wrong")
        with pytest.raises(RouterSilentError, match="401"):
            await asyncio.to_thread(client.flip, "d1", "decode")

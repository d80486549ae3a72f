"""`splitserve profile` as people use it: what it says and what it refuses. The measuring itself is
tested in tests/unit/tuner, and on real processes.
"""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from msgspec import structs
from router_stubs.cluster import SECRET, stub_cluster

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.cli import profile as command
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.cli.probe_client import ProbeClient
from splitserve.orchestrator.config import dump_resolved, parse
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord
from splitserve.orchestrator.tuner.live_watch import LiveWatch
from splitserve.orchestrator.tuner.outcome import Targets
from splitserve.orchestrator.tuner.probing import BusyError, Measured, ProbeError
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    Estimate,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
    parse_profile,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROFILE = Profile(
    model="m",
    engine="mock 1",
    hardware="1 prefill and 1 decode on a processor",
    limits=EngineLimits(
        step_tokens=512, sequences=16, block_tokens=16, total_blocks=1000, max_model_len=4096
    ),
    kv_bytes_per_token=1000,
    prefill=PrefillTime(exactly(0.01), Estimate(0.001, 0.0009, 0.0011), exactly(1e-6), 0.3),
    decode=DecodeTime(exactly(0.02), exactly(0.001), exactly(1e-5), 0.02),
    transfers=(TransferTime("", "", exactly(0.002), exactly(1e9)),),
)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[bytes]]:
    """A cluster named test that seems to run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = ClusterFiles("test")
    lock = files.lock()
    config = parse("name: test\nengine: mock\nmodel: {path: m}\n")
    files.begin_run(dump_resolved(config), operator_token(SECRET))
    files.write_record(
        ClusterRecord(
            name="test",
            run="r",
            pid=os.getpid(),
            source="s",
            url="http://127.0.0.1:1",
            nodes=("p", "d"),
            phase="serving",
            started=0.0,
            log_dir=str(tmp_path),
        )
    )
    yield lock
    lock.close()


def measures(monkeypatch: pytest.MonkeyPatch, outcome: Profile | Exception) -> None:
    """The measuring brings that."""

    async def measure(
        self: object, progress: Callable[[str, float], None]
    ) -> tuple[Profile, Measured]:
        progress("prompt of 16 tokens", 0.3)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, Measured(left_out=["x: d was busy"], rounds=2)

    monkeypatch.setattr(command._Run, "measure", measure)


@pytest.mark.usefixtures("running")
def test_shows_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part with its unit and band, what was left out, and a warning for large errors."""
    measures(monkeypatch, PROFILE)
    result = CliRunner().invoke(main, ["profile"])
    assert result.exit_code == 0, result.output
    for words in (
        "m on mock 1, 1 prefill and 1 decode on a processor",
        "per token 1000 µs 900 to 1100",
        "1000 MB/s",
        "1 left out, the last one: x: d was busy",
        "wrong by 30%",
    ):
        assert words in " ".join(result.output.split())
    path = tmp_path / "splitserve" / "test" / "profile.json"
    assert parse_profile(path.read_bytes(), "p") == PROFILE
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("running")
def test_shows_what_neighbours_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each kind of step, where nodes share a host; nothing of it where none does."""
    words = "per busy neighbour"
    measures(monkeypatch, PROFILE)
    assert words not in CliRunner().invoke(main, ["profile"]).output
    decode = structs.replace(PROFILE.decode, neighbour=Estimate(0.25, 0.2, 0.3))
    measures(monkeypatch, structs.replace(PROFILE, nodes_per_host=2, decode=decode))
    lines = CliRunner().invoke(main, ["profile"]).output.splitlines()
    shown = [" ".join(line.split()) for line in lines if words in line]
    assert shown == [f"{words} 0 % 0 to 0", f"{words} 25 % 20 to 30"]


@pytest.mark.usefixtures("running")
def test_prints_the_profile_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With --json, beside the file that was asked for."""
    measures(monkeypatch, PROFILE)
    out = tmp_path / "p.json"
    result = CliRunner().invoke(main, ["profile", "test", "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert parse_profile(result.stdout.encode(), "stdout") == PROFILE
    assert parse_profile(out.read_bytes(), "file") == PROFILE


@pytest.mark.usefixtures("running")
def test_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Status 1, the reason, and no file."""
    measures(monkeypatch, ProbeError("no decode node takes work"))
    result = CliRunner().invoke(main, ["profile"])
    assert result.exit_code == 1
    assert "no decode node takes work" in result.output
    assert not (tmp_path / "splitserve" / "test" / "profile.json").exists()


@pytest.mark.usefixtures("running")
def test_a_router_that_is_away() -> None:
    """Nobody listens where the cluster should: the command says so."""
    result = CliRunner().invoke(main, ["profile"])
    assert result.exit_code == 1
    assert "the router on http://127.0.0.1:1 does not answer" in result.output


def test_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 3, by name and by YAML."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert CliRunner().invoke(main, ["profile"]).exit_code == 3
    yaml = tmp_path / "c.yaml"
    yaml.write_text("name: other\nengine: mock\nmodel: {path: m}\n")
    result = CliRunner().invoke(main, ["profile", str(yaml)])
    assert result.exit_code == 3
    assert "no cluster named 'other' is running" in result.output


async def test_the_client_of_probes() -> None:
    """Tokens get their times; a busy node, one that is not there and a broken engine are told
    apart; the status counts legs.
    """
    async with stub_cluster("p0", "d0") as cluster:
        token, watch = operator_token(SECRET), LiveWatch(Targets())
        async with ProbeClient(cluster.url, token, watch, answer_limit_s=10) as client:
            assert await client.placed_legs() == {"p0": 0, "d0": 0}
            with pytest.raises(ProbeError, match="status 404: a probe names one node"):
                await client.ask([1], 1, decode="d9")
            cluster.router.core.membership.nodes["d0"].decode_legs = 1
            with pytest.raises(BusyError, match="1 requests of clients are on d0"):
                await client.ask([1], 1, decode="d0")
            cluster.router.core.membership.nodes["d0"].decode_legs = 0
            with pytest.raises(ProbeError, match="answered a probe with 0 of 9 tokens"):
                await client.ask([1], 9, decode="d0")  # the stub tells no ids
        async with ProbeClient(cluster.url, "wrong", watch, answer_limit_s=10) as client:
            with pytest.raises(ProbeError, match="status 401"):
                await client.ask([1], 1, decode="d0")


async def test_the_client_stops_when_clients_suffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the watch says ends the measuring."""
    watch = LiveWatch(Targets())

    def look(timelines: Any) -> str:
        return "3 of 3 requests have missed"

    monkeypatch.setattr(watch, "look", look)
    async with (
        stub_cluster("d0") as cluster,
        ProbeClient(cluster.url, operator_token(SECRET), watch, answer_limit_s=10) as client,
    ):
        with pytest.raises(ProbeError, match="stopped: 3 of 3 requests have missed; nothing was"):
            await client.placed_legs()

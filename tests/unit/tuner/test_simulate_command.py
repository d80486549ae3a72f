"""``splitserve simulate`` on the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from support.simulated import PROFILE
from support.tuner_profile import FAST

from splitserve.orchestrator.cli.errors import EXIT_FAILED, EXIT_REFUSED
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.launch.files import ClusterFiles
from splitserve.orchestrator.tuner.profile import write_profile

if TYPE_CHECKING:
    from pathlib import Path

MIX = ["--isl", "300:0.5", "--osl", "20", "--rate", "2", "--requests", "60"]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """The path of a profile."""
    path = tmp_path / "profile.json"
    path.write_bytes(write_profile(PROFILE))
    return str(path)


def test_prints_a_table(profile: str) -> None:
    """Goodput, percentiles of the times and how busy each pool was."""
    pair = ["--prefill", "1", "--decode", "1", "--ttft-ms", "800", "--itl-ms", "60"]
    result = CliRunner().invoke(main, ["simulate", "--profile", profile, *MIX, *pair])
    assert result.exit_code == 0, result.output
    for words in ("1 prefill and 1 decode nodes: 60 requests at", "first token", "single gaps"):
        assert words in result.output
    for words in ("good requests/s,", "prefill nodes computed", "decode nodes computed"):
        assert words in result.output


def test_json_is_the_same_for_the_same_seed(profile: str) -> None:
    """One object of figures; a stricter target makes fewer requests good and changes no time."""
    args = [
        "simulate",
        "--profile",
        profile,
        *MIX,
        "--prefill",
        "0",
        "--decode",
        "2",
        "--json",
        "--noise",
        "0.1",
    ]
    found, again, other = (
        json.loads(CliRunner().invoke(main, [*args, *more]).output)
        for more in ([], [], ["--ttft-ms", "300"])
    )
    assert found == again
    assert (found["requests"], found["failed"], found["share_good"]) == (60, 0, 1.0)
    assert found["ttft_ms"] == other["ttft_ms"]
    assert 0 < other["share_good"] < 1
    assert set(found["busy"]) == {"decode"}


def test_runs_a_trace(profile: str, tmp_path: Path) -> None:
    """A recorded trace, faster than it was; the second request finds the first one's blocks."""
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
    trace.write_text(
        "".join(json.dumps({"timestamp": at, **line}) + "\n" for at in (0, 60_000, 120_000))
    )
    args = ["--trace", str(trace), "--prefill", "1", "--decode", "1", "--json", "--rate", "0.1"]
    result = CliRunner().invoke(main, ["simulate", "--profile", profile, *args])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["rate_per_s"] == pytest.approx(0.1)
    assert found["ttft_ms"]["p50"] < found["ttft_ms"]["p99"] / 3


def test_takes_nodes_and_profile_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many nodes as the YAML says, with its last profile; without one that is said."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nengine: mock\nmodel: {path: mock}\n"
        "prefill: {kv_cache_bytes: 64 MB, engine_args: &args {block_size: 32}}\n"
        "decode: {replicas: 2, kv_cache_bytes: 64 MB, engine_args: *args}\n"
    )
    result = CliRunner().invoke(main, ["simulate", str(path), *MIX])
    assert result.exit_code == EXIT_REFUSED
    assert "splitserve profile mine" in result.output
    own = ClusterFiles("mine").profile_path
    own.parent.mkdir(parents=True)
    own.write_bytes(write_profile(FAST))
    result = CliRunner().invoke(main, ["simulate", str(path), *MIX])
    assert result.exit_code == 0, result.output
    assert "1 prefill and 2 decode nodes: 60 requests" in result.output
    result = CliRunner().invoke(main, ["simulate", str(path), *MIX, "--prefill", "0"])
    assert "2 nodes, no split" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "name a cluster (a YAML file or a built-in name), or --profile FILE"),
        (["--profile", "{profile}"], "--prefill, --decode"),
        (["{profile}"], "a profile is given with --profile"),
    ],
)
def test_what_is_missing_is_named(profile: str, args: list[str], words: str) -> None:
    """A cluster, or what it would have told."""
    given = [each.format(profile=profile) for each in args]
    result = CliRunner().invoke(main, ["simulate", *given, *MIX])
    assert result.exit_code == EXIT_REFUSED
    assert words in result.output


def test_requests_that_engines_refuse_are_told(profile: str, tmp_path: Path) -> None:
    """Of a trace, in a warning: the figures count them as failed."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * at,
            "input_length": tokens,
            "output_length": 5,
            "hash_ids": [100 * at + block for block in range(-(-tokens // 512))],
        }
        for at, tokens in enumerate((100, 9000, 200))
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    args = ["--trace", str(trace), "--prefill", "1", "--decode", "1"]
    result = CliRunner().invoke(main, ["simulate", "--profile", profile, *args])
    assert result.exit_code == 0, result.output
    assert "warning: engines refuse 1 of the 3 requests" in result.stderr
    assert "1 were refused or given up" in result.stdout


@pytest.mark.parametrize(
    ("change", "args", "status", "words"),
    [
        ({"version": 7}, MIX, EXIT_REFUSED, "format version 7 is not known"),
        ({"transfers": []}, MIX, EXIT_REFUSED, "$.transfers is empty"),
        ({}, ["--isl", "10"], EXIT_REFUSED, "--isl, --osl and --rate together"),
        ({}, ["--isl", "100000", "--osl", "100", "--rate", "1"], EXIT_REFUSED, "max_model_len"),
        ({}, ["--trace", "/nowhere.jsonl"], EXIT_FAILED, "/nowhere.jsonl: No such file"),
    ],
)
def test_says_what_is_wrong(
    profile: str,
    tmp_path: Path,
    change: dict[str, object],
    args: list[str],
    status: int,
    words: str,
) -> None:
    """A wrong profile, missing options and a missing file are told in one line."""
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**json.loads((tmp_path / "profile.json").read_bytes()), **change}))
    result = CliRunner().invoke(
        main, ["simulate", "--profile", str(path), *args, "--prefill", "1", "--decode", "1"]
    )
    assert result.exit_code == status
    assert words in result.output

"""``splitserve tune``: what it prints, draws, writes and refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner
from support.tuner_profile import FAST

from splitserve.orchestrator.cli.errors import EXIT_REFUSED, TellingGroup
from splitserve.orchestrator.cli.tune import tune_command
from splitserve.orchestrator.config import load
from splitserve.orchestrator.tuner.profile import Profile, write_profile

if TYPE_CHECKING:
    from pathlib import Path

MIX = ("--isl", "1000:0.5", "--osl", "20", "--rate", "12")
TARGETS = ("--ttft-ms", "400", "--itl-ms", "20")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster runs, and small workloads are enough."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("splitserve.orchestrator.tuner.tuning.FIRST_PASS_REQUESTS", 600)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A YAML of three mock nodes, with a comment."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# Ours\nname: mine\nengine: mock\nmodel: {path: mock}\n"
        "prefill: {kv_cache_bytes: 64 MB, engine_args: &args {block_size: 32}}\n"
        "decode:\n  replicas: 2  # two\n  kv_cache_bytes: 64 MB\n  engine_args: *args\n"
    )
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_in(tmp_path, FAST)


def profile_in(folder: Path, profile: Profile) -> Path:
    path = folder / "profile.json"
    path.write_bytes(write_profile(profile))
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    group = TellingGroup(commands={"tune": tune_command})
    result = CliRunner().invoke(group, ["tune", "--jobs", "1", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def found(*arguments: object) -> Any:
    code, out, err = run("--json", *arguments)
    assert code == 0, err
    return json.loads(out)


def test_the_table_and_the_advice_are_printed(cluster: Path, profile: Path) -> None:
    """Every split with its figures, what runs, what is recommended, and why."""
    code, out, err = run(cluster, "--profile", profile, *MIX, *TARGETS)
    assert (code, err) == (0, "")
    for expected in (
        "3 aggregated",
        "1:2",
        "2:1",
        "TTFT s",
        "ITL ms",
        "->",
        "Recommended:",
        "Why:",
    ):
        assert expected in out
    assert "targets: TTFT 400 ms, ITL 20 ms" in out


def test_json_has_every_split(cluster: Path, profile: Path) -> None:
    """With goodput, percentiles and shares; the recommended one is one of them."""
    result = found(cluster, "--profile", profile, *MIX, *TARGETS, "--threshold", 0)
    splits = [(row["prefill"], row["decode"]) for row in result["splits"]]
    assert splits == [(0, 3), (1, 2), (2, 1)]
    assert result["current"] == {"prefill": 1, "decode": 2, "min_uncached_tokens": 0}
    best = max(row["goodput_per_s"] for row in result["splits"])
    assert result["goodput_per_s"] >= 0.95 * best
    assert result["splits"][0]["busy_prefill"] is None
    assert 0 < result["splits"][1]["busy_prefill"] <= 1


def test_another_number_of_nodes_has_no_current_split(cluster: Path, profile: Path) -> None:
    """What runs is not among them."""
    result = found(cluster, "--profile", profile, *MIX, *TARGETS, "--nodes", 2)
    assert result["current"] is None
    assert result["gain_over_current"] is None
    assert [row["decode"] for row in result["splits"]][:2] == [2, 1]


def test_targets_that_no_ratio_meets_name_the_best_reachable(cluster: Path, profile: Path) -> None:
    """The least times and with which split they are reached; no error."""
    arguments = (cluster, "--profile", profile, *MIX, "--ttft-ms", 1)
    code, out, _ = run(*arguments)
    assert code == 0
    assert "No ratio meets the targets" in out
    assert "The least p90 of the TTFT is" in out
    assert not found(*arguments)["targets_met"]


@pytest.mark.parametrize("option", ["--write", "--apply"])
def test_a_load_beyond_the_nodes_changes_nothing(
    cluster: Path, profile: Path, tmp_path: Path, option: str
) -> None:
    """No split is recommended, marked, drawn, written or applied; what would help is said."""
    before, picture = cluster.read_text(), tmp_path / "tuned.svg"
    arguments = (cluster, "--profile", profile, *MIX, "--ttft-ms", 1)
    code, out, err = run(*arguments, "--out", picture, option)
    assert code == EXIT_REFUSED
    assert "Nothing is recommended: this load is beyond 3 nodes" in out
    assert "Recommended:" not in out
    assert not any(line.startswith("-> ") for line in out.splitlines())
    assert f"{option}: nothing is changed: this load is beyond 3 nodes" in err
    assert "Lower --rate, add nodes" in err
    assert cluster.read_text() == before
    assert ">recommended<" not in picture.read_text()
    result = found(*arguments)
    assert (result["recommended"], result["goodput_per_s"]) == (None, None)


def test_what_the_engines_do_not_take_is_refused_or_told(cluster: Path, profile: Path) -> None:
    """Prompts beyond ``max_model_len`` are refused; of a mix the share that was cut is noted."""
    arguments = (cluster, "--profile", profile, "--osl", 100, "--rate", 1, *TARGETS)
    code, out, err = run(*arguments, "--isl", 100_000)
    assert (code, out) == (EXIT_REFUSED, "")
    assert "prompts of 100,000 and answers of 100 tokens are longer" in err
    code, out, _ = run(*arguments, "--isl", "2000:0.8")
    assert code == 0
    assert "% of the requests were cut to fit into max_model_len, 4,096 tokens" in out


def test_the_picture_has_four_charts(cluster: Path, profile: Path, tmp_path: Path) -> None:
    """Valid SVG with the targets, the recommendation, and a point for every split."""
    picture = tmp_path / "tuned.svg"
    code, _, err = run(cluster, "--profile", profile, *MIX, *TARGETS, "--out", picture)
    assert (code, err) == (0, f"the charts are in {picture}\n")
    root = ElementTree.fromstring(picture.read_text())
    charts = root.findall(f"{SVG}g")
    assert len(charts) == 4
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"aggregated", "1:2", "2:1", "recommended", "target 400 ms", "target 20 ms"} <= set(
        texts
    )
    assert all(len(chart.findall(f"{SVG}circle")) >= 3 for chart in charts)


def test_the_recommendation_is_written(cluster: Path, profile: Path) -> None:
    """Only the sizes of the pools change in the file; a second time nothing does."""
    before = cluster.read_text()
    arguments = (cluster, "--profile", profile, "--isl", 3500, "--osl", 20, "--rate", 4.5)
    arguments += ("--ttft-ms", 2000, "--itl-ms", 12, "--threshold", 0, "--write")
    result = found(*arguments)["recommended"]
    assert result["prefill"] == 2
    config = load(cluster)
    assert (config.prefill.replicas, config.decode.replicas) == (2, 1)
    expected = before.replace("prefill: {", "prefill: {replicas: 2, ")
    assert cluster.read_text() == expected.replace("replicas: 2  # two", "replicas: 1  # two")
    assert found(*arguments)["gain_over_current"] is None


def test_not_to_disaggregate_is_not_written(cluster: Path, profile: Path) -> None:
    """The advice is printed, the file stays, and the status says that."""
    before = cluster.read_text()
    mix = ("--isl", 300, "--osl", 1, "--rate", 60)
    code, out, err = run(cluster, "--profile", profile, *mix, "--ttft-ms", 150, "--write")
    assert "do not disaggregate" in out
    assert code == EXIT_REFUSED
    assert "at least one prefill node" in err
    assert cluster.read_text() == before


def test_a_built_in_cluster_is_not_written(tmp_path: Path) -> None:
    """The message says how to get a file."""
    limits = msgspec.structs.replace(FAST.limits, total_blocks=(16 << 20) // 32_000)
    profile = profile_in(tmp_path, msgspec.structs.replace(FAST, limits=limits))
    arguments = ("mock-2p2d", "--profile", profile, "--isl", 3000, "--osl", 200, "--rate", 6)
    code, _, err = run(*arguments, "--itl-ms", 14, "--write")
    assert code == EXIT_REFUSED
    assert "splitserve config show mock-2p2d" in err


def test_nothing_runs_to_be_changed(cluster: Path, profile: Path) -> None:
    """``--apply`` says so."""
    arguments = ("--isl", 3000, "--osl", 200, "--rate", 4.5, "--itl-ms", 14, "--apply")
    code, _, err = run(cluster, "--profile", profile, *arguments)
    assert code == EXIT_REFUSED
    assert "no cluster named 'mine' is running" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (TARGETS, "give --trace FILE, or --isl, --osl and --rate together"),
        ((*TARGETS, "--isl", "10", "--osl", "10"), "give --trace FILE"),
        ((*TARGETS, *MIX, "--trace", "x.jsonl"), "not both"),
        (MIX, "without a target"),
        ((*MIX, "--ttft-ms", "0"), "a target is a time above 0"),
        ((*MIX, "--itl-ms", "nan"), "a target is a time above 0"),
        ((*TARGETS, "--isl", "-5", "--osl", "10", "--rate", "1"), "--isl: a mean length"),
        ((*TARGETS, "--isl", "ten", "--osl", "10", "--rate", "1"), "'ten' is no length"),
        ((*TARGETS, "--isl", "5", "--osl", "1e12", "--rate", "1"), "--osl: a mean length"),
        ((*TARGETS, "--isl", "5", "--osl", "5", "--rate", "0"), "a rate is more than 0"),
        ((*TARGETS, *MIX, "--out", "x.png"), "name a file.svg"),
    ],
)
def test_what_cannot_be_is_refused(
    cluster: Path, profile: Path, arguments: tuple[str, ...], expected: str
) -> None:
    """With a sentence and the status of a refusal; no traceback."""
    code, out, err = run(cluster, "--profile", profile, *arguments)
    assert (code, out) == (EXIT_REFUSED, "")
    assert err.startswith("error: ")
    assert expected in err


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"model": "llama"}, "model llama, and the cluster has mock"),
        ({"engine": "vllm 0.32.0"}, "engine vllm, and the cluster has mock"),
        (
            {"limits": msgspec.structs.replace(FAST.limits, block_tokens=16)},
            "prefill.engine_args.block_size 16, and the cluster has 32",
        ),
        (
            {"fingerprint": {"dtype": "bfloat16"}},
            "prefill.engine_args.dtype bfloat16, and the cluster has float32",
        ),
        (
            {"limits": msgspec.structs.replace(FAST.limits, total_blocks=3000)},
            "3000 blocks of KV per node, and prefill.kv_cache_bytes holds 2000",
        ),
    ],
)
def test_the_profile_of_another_cluster_is_refused(
    cluster: Path, tmp_path: Path, other: dict[str, Any], expected: str
) -> None:
    """The first key that differs is named with both values."""
    path = profile_in(tmp_path, msgspec.structs.replace(FAST, **other))
    code, _, err = run(cluster, "--profile", path, *MIX, *TARGETS)
    assert code == EXIT_REFUSED
    assert f"{path} is not a profile of mine: it was measured with {expected}" in err


@pytest.mark.parametrize(
    ("running", "code", "expected"),
    [
        ({}, 0, ""),
        ({"weights": "b"}, EXIT_REFUSED, "measured with weights a, and decode-0 has b"),
        ({"hardware": "a GPU"}, 0, "was measured on none, and nodes run on a GPU; measure again"),
    ],
)
def test_running_nodes_are_compared_with_the_profile(
    cluster: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    running: dict[str, str],
    code: int,
    expected: str,
) -> None:
    """Other weights are refused with both values; other hardware is said."""
    node = {
        "role": "prefill",
        "hardware": running.get("hardware", "none"),
        "fingerprint": {"weights": running.get("weights", "a")},
    }
    nodes = {"prefill-0": node, "decode-0": {**node, "role": "decode"}}
    monkeypatch.setattr("splitserve.orchestrator.cli.tune.running_nodes", lambda config: nodes)
    measured = msgspec.structs.replace(
        FAST, fingerprint={"weights": "a"}, hardware="1 prefill and 1 decode on none"
    )
    path = profile_in(tmp_path, measured)
    found, _, err = run(cluster, "--profile", path, *MIX, *TARGETS)
    assert found == code, err
    assert expected in err
    assert bool(err) == bool(expected)


def test_bad_files_are_told(cluster: Path, profile: Path, tmp_path: Path) -> None:
    """No profile yet, a damaged one, a trace that is none or empty."""
    code, _, err = run(cluster, *MIX, *TARGETS)
    assert code == EXIT_REFUSED
    assert "splitserve profile mine" in err
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    code, _, err = run(cluster, "--profile", bad, *MIX, *TARGETS)
    assert code == EXIT_REFUSED
    assert f"{bad}: Object missing required field" in err
    for text, expected in (("", "no requests"), ("hello\n", "line 1")):
        (tmp_path / "trace.jsonl").write_text(text)
        trace = ("--trace", tmp_path / "trace.jsonl")
        code, _, err = run(cluster, "--profile", profile, *trace, *TARGETS)
        assert code == EXIT_REFUSED
        assert expected in err


def test_a_trace_is_tuned_for_at_another_rate(cluster: Path, profile: Path, tmp_path: Path) -> None:
    """Its requests come as often as asked; its blocks are as large as said."""
    lines = [
        {"timestamp": 3000 * (n // 10), "input_length": 100, "output_length": 5, "hash_ids": [n]}
        for n in range(100)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    arguments = (cluster, "--profile", profile, "--trace", path, *TARGETS, "--block-tokens", 100)
    assert found(*arguments)["rate_per_s"] == pytest.approx(100 / 30, rel=0.02)
    assert found(*arguments, "--rate", 20)["rate_per_s"] == pytest.approx(20)

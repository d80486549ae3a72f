"""``splitserve bench``: what the load generator is told, and what is made of its results. The
generator itself runs in ``tests/end_to_end/test_mock_terminal.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from splitserve.orchestrator.cli import bench, bench_report, bench_server, bench_tool
from splitserve.orchestrator.cli.bench_load import Load, targets_of, trace_load
from splitserve.orchestrator.cli.bench_server import Server
from splitserve.orchestrator.cli.bench_tool import Measured, ToolError
from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.config import dump_resolved, parse
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOONCAKE = (
    {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1, 2]},
    {"timestamp": 500, "input_length": 9, "output_length": 0, "hash_ids": [1, 2, 3]},
    {"timestamp": 2000, "input_length": 6, "output_length": 90, "hash_ids": [7]},
)
"""Blocks of four tokens; the last request has no number for its partial one."""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.680590,3,10
2023-11-16 18:15:50.680590,0,4
"""
LOG = (
    {"event": "request", "received_unix_s": 12.5, "prompt_tokens_estimate": 4, "prompt_tokens": 6,
     "output_tokens": 3, "output_limit_tokens": 8},
    {"event": "request", "received_unix_s": 10.0, "prompt_tokens_estimate": 4,
     "prompt_tokens": None, "output_tokens": None, "output_limit_tokens": 8},
)  # fmt: skip


def loaded(path: Path, folder: Path, **changes: Any) -> tuple[Load, list[dict[str, Any]]]:
    """The load of a trace, and the lines that the generator reads."""
    options: dict[str, Any] = {
        "rate_per_s": None, "count": None, "limit_tokens": 64, "limit_s": 60.0, "folder": folder,
    }  # fmt: skip
    load = trace_load(path, 4, **(options | changes))
    lines = (folder / "trace.jsonl").read_text().splitlines()
    return load, [json.loads(line) for line in lines]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_trace_keeps_its_times_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    """Blocks that are shared keep one number; the others get numbers of their own."""
    path = write_lines(tmp_path / "t.jsonl", MOONCAKE)
    load, lines = loaded(path, tmp_path, limit_tokens=None)
    assert [line["timestamp"] for line in lines] == [0, 0.5, 2]
    assert [line["input_length"] for line in lines] == [5, 9, 6]
    assert [line["output_length"] for line in lines] == [2, 1, 90]
    assert [line["hash_ids"] for line in lines] == [[1, 2], [1, 2, 3], [7, -1]]
    assert load.requests == 3
    assert "timed_trace" in load.arguments
    assert load.arguments[load.arguments.index("--timed-trace-chunk-hash-size") + 1] == "4"
    assert "3 requests" in load.notes[0]
    assert "within 2 s (1 per second), each at its own time" in load.notes[0]


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    """Requests longer than the model takes would only be refused."""
    path = write_lines(tmp_path / "t.jsonl", MOONCAKE)
    load, lines = loaded(path, tmp_path, limit_tokens=64)
    assert len(lines) == load.requests == 2
    assert load.notes[1].startswith("left out: 1 requests that are longer than the 64 tokens")
    with pytest.raises(RefusedError, match="no request fits into the 5 tokens"):
        loaded(path, tmp_path, limit_tokens=5)


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"rate_per_s": 2.0}, [0, 0.25, 1]),
        ({"count": 2}, [0, 0.5]),
        ({"limit_s": 2.0}, [0, 0.5, 2]),
    ],
)
def test_a_trace_may_be_faster_or_shorter(
    tmp_path: Path, changes: dict[str, Any], times: list[float]
) -> None:
    """A rate scales all times; a count takes the first ones."""
    path = write_lines(tmp_path / "t.jsonl", MOONCAKE)
    _, lines = loaded(path, tmp_path, **{"limit_tokens": None, **changes})
    assert [line["timestamp"] for line in lines] == pytest.approx(times)


def test_a_trace_that_takes_too_long_is_refused_before_it_runs(tmp_path: Path) -> None:
    """The message says what to do."""
    path = write_lines(tmp_path / "t.jsonl", MOONCAKE)
    with pytest.raises(RefusedError, match="--request-rate"):
        loaded(path, tmp_path, limit_tokens=None, limit_s=1.9)


def test_other_forms_of_traces(tmp_path: Path) -> None:
    """Azure's rows and a router's log have no blocks: no prompt begins like another. Empty prompts
    get a token, since engines refuse them.
    """
    azure = tmp_path / "a.csv"
    azure.write_text(AZURE)
    _, lines = loaded(azure, tmp_path)
    assert [(n["timestamp"], n["input_length"], n["hash_ids"]) for n in lines] == [
        (0, 3, [-1]),
        (4, 1, [-2]),
    ]
    _, lines = loaded(write_lines(tmp_path / "l.log", LOG), tmp_path)
    assert [(n["timestamp"], n["output_length"]) for n in lines] == [(0, 8), (2.5, 3)]
    azure.write_text("hello\n")
    with pytest.raises(RefusedError, match="no known format"):
        loaded(azure, tmp_path)


def test_targets() -> None:
    """Several with commas or blanks, or one after the other; anything else is refused."""
    wanted = {"ttft": 200.0, "tpot": 20.5}
    for words in (["ttft:200,tpot:20.5"], ["ttft:200", "tpot:20.5"], ["ttft:200 tpot:20.5"]):
        assert targets_of(words) == wanted
    assert targets_of([]) == {}
    for word in ("itl:3", "ttft", "ttft:-1", "ttft:x", ""):
        with pytest.raises(RefusedError, match="NAME:MILLISECONDS"):
            targets_of([word])


def result(**changes: Any) -> dict[str, Any]:
    """What the generator writes after three requests: 9 tokens in four chunks of two behind the
    first, one token, and a failure.
    """
    return {
        "completed": 2, "failed": 1, "ttfts": [0.1, 0.2, 0.0], "latencies": [0.9, 0.2, 0.0],
        "output_lens": [9, 1, 0], "itls": [[0.2, 0.2, 0.2, 0.2], [], []],
        "start_times": [5.0, 6.0, 7.0], "generated_texts": ["secret", "", ""],
        "errors": ["", "", "Traceback:\n  File\nTooManyRequests: \x1bbusy\n"],
        "request_throughput": 2.0, "mean_ttft_ms": 150.0, "p99_ttft_ms": 200.0,
        "mean_tpot_ms": 100.0, "request_goodput": None,
    } | changes  # fmt: skip


def test_the_time_per_token_does_not_depend_on_chunks() -> None:
    """Eight tokens follow the first in four chunks: 100 ms per token, though chunks come every
    200 ms. An answer of one token has no such time. Bug bank A45.
    """
    assert bench_report.times_per_token(result()) == pytest.approx([100.0])
    split = result(itls=[[0.1] * 8, [], []])
    assert bench_report.times_per_token(split) == bench_report.times_per_token(result())


def test_failures_are_counted_by_their_last_line() -> None:
    """Nothing that a terminal obeys; empty when all is well."""
    said = "1 of 3 requests have failed: TooManyRequests: ?busy (1x)"
    assert bench_report.failures(result()) == said
    assert bench_report.failures(result(failed=0)) == ""
    assert "no reason given" in bench_report.failures(result(errors=["", "", ""]))


def test_the_latest_first_token_is_found() -> None:
    """By its number, which ends the request's id."""
    assert bench_report.slowest(result()) == (1, 200.0)
    assert bench_report.slowest(result(ttfts=[0.0])) is None


@pytest.mark.parametrize("results", [[result()], [result(), result(itls=[[], [], []])]])
def test_the_picture_is_svg(results: list[dict[str, Any]]) -> None:
    """Four charts of one or two servers, also where nothing is known."""
    by_server = {f"server <{n}>": [found] for n, found in enumerate(results)}
    text = bench_report.picture("a & b", by_server, {"ttft": 150.0})
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "target 150 ms" in text
    empty = result(ttfts=[0.0] * 3, itls=[[]] * 3, output_lens=[0] * 3)
    ElementTree.fromstring(bench_report.picture("none", {"a": [empty]}, {}))


def test_names_of_curves_do_not_overlap() -> None:
    """Also where one is an address."""
    by_server = {"http://127.0.0.1:28041": [result()], "b": [result()]}
    tree = ElementTree.fromstring(bench_report.picture("a", by_server, {}))
    texts = list(tree.iter("{http://www.w3.org/2000/svg}text"))
    places = {str(text.text).split(": median")[0]: float(text.get("x", 0)) for text in texts[::-1]}
    assert places["b"] - places["http://127.0.0.1:28041"] > 230


def test_a_comparison_is_of_medians() -> None:
    """With their spread; figures that one side lacks are left out."""
    ours = [result(mean_ttft_ms=ms) for ms in (10.0, 30.0, 20.0)]
    theirs = [result(mean_ttft_ms=40.0, request_throughput=0.0)] * 3
    found = bench_report.ratios(bench_report.medians(ours), bench_report.medians(theirs))
    assert found["mean_ttft_ms"] == 0.5
    assert "request_goodput" not in found
    assert "request_throughput" not in found
    table = bench_report.comparison({"ours": ours, "theirs": theirs})
    assert [*table.columns[1].cells][1] == "20 (10 to 30)"
    assert [*table.columns[3].cells][:2] == ["-", "0.50"]


# The process of the generator


def ran(program: str, limit_s: float = 20.0) -> tuple[list[str], list[str], list[str]]:
    """(what it said, what it complained of, its progress)."""
    shown: list[str] = []
    command = [sys.executable, "-c", program]
    said, complaints = bench_tool._run(command, {}, limit_s, shown.append)
    return said, complaints, shown


def test_a_run_is_read_line_by_line() -> None:
    """Also a progress bar, which is no complaint."""
    program = (
        "import sys; print('a'); sys.stderr.write('  5%|# | 1/20 [00:01]\\r100%|##| [00:02]\\n"
        "hm\\n'); print('b', end='')"
    )
    said, complaints, shown = ran(program)
    assert said == ["a", "b"]
    assert complaints == ["hm"]
    assert [line.strip()[:5] for line in shown] == ["5%|# ", "100%|"]


def test_a_failure_is_shown_with_its_last_lines() -> None:
    """The end of what it complained of, else of what it said."""
    with pytest.raises(ToolError, match=r"exit status 3\n  \| 2\b") as caught:
        ran("import sys; print('x'); [print(n, file=sys.stderr) for n in range(17)]; sys.exit(3)")
    assert caught.value.message.endswith("| 16")
    with pytest.raises(ToolError, match=r"\| said"):
        ran("print('said'); raise SystemExit(1)")


def test_a_run_that_does_not_end_is_ended() -> None:
    """After the limit, and its process is gone."""
    with pytest.raises(ToolError, match=r"not ended after .* --limit-minutes"):
        ran("import signal; print('on', flush=True); signal.pause()", limit_s=0.5)


def test_the_table_is_the_generators() -> None:
    """From its heading to its last line."""
    head, end = "=== Serving Benchmark Result ===", "=" * 50
    lines = ["Namespace(...)", "=" * 9, head, "Successful requests: 3", "--- TTFT ---", end, "bye"]
    assert list(bench_tool._table(lines)) == [head, "Successful requests: 3", "--- TTFT ---", end]


def test_what_a_dataset_needs_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs: the generator's own message would name something else."""
    known = {"vllm", "datasets"}
    monkeypatch.setattr(bench_tool.importlib.util, "find_spec", lambda name: name in known or None)
    assert bench_tool.check_installed("random")
    assert bench_tool.check_installed("hf")
    with pytest.raises(RefusedError, match="pip install pandas"):
        bench_tool.check_installed("custom_image")
    known.clear()
    with pytest.raises(RefusedError, match="vLLM is not installed here"):
        bench_tool.check_installed("random")


def test_keys_go_by_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own key, or none: never the one of the caller's environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "somebody's")
    monkeypatch.setenv("NO_PROXY", "a.example")
    environ = bench_tool.tool_environ("", "127.0.0.1", 2**32 + 5, is_offline=True)
    assert "OPENAI_API_KEY" not in environ
    assert environ["PYTHONHASHSEED"] == "5"
    assert environ["NO_PROXY"] == "a.example,127.0.0.1"
    environ = bench_tool.tool_environ("key", "h", 1, is_offline=False)
    assert environ["OPENAI_API_KEY"] == "key"


# The command

MODELS = {"data": [{"id": "mock", "max_model_len": 2048}]}
YAML = """
name: mock
engine: mock
model: {path: mock}
security: {api_keys: [{tenant: a, key_env: TEST_KEY_A}, {tenant: b, key_env: TEST_KEY_B}]}
"""


class Generator:
    """Stands in for the generator."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, str]]] = []
        self.results = [result()]

    def measure(
        self, arguments: list[str], environ: dict[str, str], limit_s: float, show: object
    ) -> Measured:
        self.calls.append((arguments, environ))
        return Measured(("=== Serving Benchmark Result ===",), self.results[0])


@pytest.fixture
def generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Generator]:
    """A cluster ``mock`` with two API keys runs; the generator is not what it seems."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TEST_KEY_A", "key-a")
    monkeypatch.setenv("TEST_KEY_B", "key-b")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    found = Generator()
    monkeypatch.setattr(bench, "measure", found.measure)
    monkeypatch.setattr(bench, "check_installed", lambda dataset: "1")
    monkeypatch.setattr(bench_server, "_models", lambda url, key, ca_file: (200, MODELS))
    monkeypatch.setattr(bench, "_about", lambda running: {"name": "mock"})
    files = ClusterFiles("mock")
    with files.lock():
        files.begin_run(dump_resolved(parse(YAML)), "token")
        record = ClusterRecord(
            name="mock", run="r", pid=1, source="mock", url="http://127.0.0.1:1", nodes=(),
            phase="serving", started=0.0, log_dir="",
        )  # fmt: skip
        files.write_record(record)
        yield found


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", *words])


def test_the_generator_is_told_what_was_asked_for(generator: Generator, tmp_path: Path) -> None:
    """The ecosystem's own words work, goodput's too; results and picture are written."""
    words = ["mock", "--num-prompts", "3", "--random-input-len", "7", "--random-output-len", "8"]
    words += ["--request-rate", "4", "--max-concurrency", "2", "--seed", "9"]
    words += ["--goodput", "ttft:200", "tpot:20", "--out", "r.json", "--", "--burstiness", "0.5"]
    told = run(*words)
    assert told.exit_code == 0, told.output
    arguments, environ = generator.calls[0]
    line = " ".join(arguments)
    assert "--base-url http://127.0.0.1:1 --endpoint /v1/completions --model mock" in line
    assert "--request-rate 4.0 --random-input-len 7 --random-output-len 8" in line
    assert "--max-concurrency 2 --goodput ttft:200 tpot:20 --num-prompts 3 --burstiness 0.5" in line
    assert "--seed 9" in line
    assert "key-" not in line
    assert environ["OPENAI_API_KEY"] == "key-a"
    written = json.loads((tmp_path / "r.json").read_bytes())
    assert written["seed"] == 9
    assert written["goodput_ms"] == {"ttft": 200, "tpot": 20}
    assert "secret" not in json.dumps(written)
    assert (tmp_path / "r.svg").exists()
    assert "1 of 3 requests have failed" in told.output
    prefix = arguments[arguments.index("--request-id-prefix") + 1]
    assert f"`splitserve trace {prefix}1 mock` shows why" in told.output


def test_each_run_draws_other_prompts(generator: Generator) -> None:
    """Or engines would have them cached from the last run."""
    for _ in range(2):
        assert run("--out", "r.json").exit_code == 0
    seeds = {call[0][call[0].index("--seed") + 1] for call in generator.calls}
    assert len(seeds) == 2


def test_another_server_gets_the_same_in_turns(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who is first changes; each round has its seed; nobody gets the other one's key."""
    monkeypatch.setenv("OPENAI_API_KEY", "key-b")
    monkeypatch.setenv("COMPARE_API_KEY", "theirs")
    told = run("--compare", "http://other:9/v1", "--rounds", "2", "--seed", "5", "--out", "r.json")
    assert told.exit_code == 0, told.output
    asked = [
        (a[a.index("--base-url") + 1], a[a.index("--seed") + 1], e["OPENAI_API_KEY"])
        for a, e in generator.calls
    ]
    ours, theirs = "http://127.0.0.1:1", "http://other:9"
    assert asked == [
        (ours, "5", "key-b"),
        (theirs, "5", "theirs"),
        (theirs, "6", "theirs"),
        (ours, "6", "key-b"),
    ]
    assert "medians of 2 rounds" in told.output
    assert json.loads((tmp_path / "r.json").read_bytes())["ratios"]["mean_ttft_ms"] == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--goodput", "itl:3"], "NAME:MILLISECONDS"),
        (
            ["--random-input-len", "2000"],
            "2128 tokens together, but the cluster's model takes 2048",
        ),
        (["--trace", "nothing.jsonl"], "nothing.jsonl: No such file"),
        (["--trace", "t", "--dataset-name", "custom"], "not both"),
        (["--trace", "t", "--backend", "openai-chat"], "leave out --backend"),
        (["--out", "r.txt"], "ends in .json"),
        (["--out", "nowhere/r.json"], "in a folder that is there"),
        (["--compare", "other:9"], "write an address such as"),
        (["--compare", "http://u:p@other:9"], "set COMPARE_API_KEY instead"),
        (["--compare", "http://o:9", "--compare-model", "x"], "does not serve 'x'; it serves mock"),
        (["mock", "mock"], "neither a cluster nor an option"),
        (["other"], "no cluster named 'other' is running"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    generator: Generator, words: list[str], said: str
) -> None:
    """The message says what to do; no request is sent, no file written."""
    told = run(*words)
    assert told.exit_code in (1, 2, 3)
    assert said in told.output
    assert generator.calls == []
    assert not [*Path.cwd().glob("*.json")]


def test_keys_that_cannot_be_read_are_asked_for(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the environment does instead."""
    monkeypatch.delenv("TEST_KEY_B")
    assert "set OPENAI_API_KEY to one of its own" in run("--out", "r.json").output
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    assert run("--out", "r.json").exit_code == 0
    assert generator.calls[0][1]["OPENAI_API_KEY"] == "mine"


def test_a_run_without_any_answer_has_failed(generator: Generator) -> None:
    """With the reasons, and without files."""
    generator.results = [result(completed=0, failed=3)]
    told = run("--out", "r.json")
    assert told.exit_code == 1
    assert "3 of 3 requests have failed: TooManyRequests" in told.output
    assert not Path("r.json").exists()


def test_servers_are_asked_for_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and limit; refusals name the variable of the key."""
    answers: dict[str, Any] = {"status": 200, "body": MODELS}
    monkeypatch.setattr(
        bench_server, "_models", lambda url, key, ca_file: (answers["status"], answers["body"])
    )
    server = bench_server.compared_server("http://o:9/v1/", None)
    assert server == Server("http://o:9", "http://o:9", "mock", 2048, "")
    for status, body, said in (
        (401, {}, "COMPARE_API_KEY"),
        (200, {"data": []}, "names no model"),
        (503, {}, "answers 503"),
    ):
        answers.update(status=status, body=body)
        with pytest.raises(RefusedError, match=said):
            bench_server.compared_server("http://o:9", None)

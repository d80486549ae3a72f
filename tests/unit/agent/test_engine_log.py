"""What an engine prints: its stage, the likely cause of its end, and no secret in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.orchestrator.agent import engine_log
from splitserve.orchestrator.agent.engine_log import EngineLog, likely_cause, stage_after

VLLM_START = (
    ("INFO [api_server.py] vLLM API server version 0.32.0", "starting"),
    ("INFO [cpu_model_runner.py:68] Starting to load model /m...", "loading weights"),
    ("Loading safetensors checkpoint shards:  50% Completed | 1/2", "loading weights (50 %)"),
    ("INFO [default_loader.py] Loading weights took 0.52 seconds", "kv cache"),
    ("INFO [kv_cache_utils.py] CPU KV cache size: 21,701 tokens", "kv cache"),
    ("INFO [cpu_model_runner.py:87] Warming up model for the compilation...", "warm-up"),
    (
        "INFO [core.py] init engine (profile, create kv cache, warmup model) took 1 s",
        "starting server",
    ),
    ("INFO Loading weights took 3 seconds", "starting server"),
)


def test_the_stages_of_a_start() -> None:
    """Each line of a start leads to its stage, and no stage is gone back to."""
    stage = "starting"
    for line, expected in VLLM_START:
        stage = stage_after(stage, line)
        assert stage == expected, line


@pytest.mark.parametrize(
    ("line", "status", "expected"),
    [
        ("OSError: [Errno 98] Address already in use", 1, "a port is in use"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", 1, "out of memory"),
        ("ModuleNotFoundError: No module named 'vllm'", 1, "No module named 'vllm'"),
        ("api_server.py: error: unrecognized arguments: --foo 3", 2, "--foo 3"),
        ("OSError: /m does not appear to have a file named config.json", 1, "the model is missing"),
        ("ValueError: bfloat16 is not supported on this CPU", 1, "dtype: float32"),
        ("ValueError: the model's max_model_len (8192) is larger than", 1, "max_model_len"),
        (
            "RuntimeError: Worker failed with error 'cannot import name 'X' from 'y' (/z)', please",
            1,
            "import name 'X'",
        ),
        (
            "(EngineCore pid=3) ERROR 11-30 03:27:44 [core.py:15] ValueError: too odd",
            1,
            "ended by ValueError: too odd",
        ),
        ("something else", 137, "killed by SIGKILL"),
        (
            "(APIServer pid=5) ERROR 12-01 05:40:11 [async_llm.py:906] vllm.v1.engine.exceptions."
            "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the "
            "root cause.",
            1,
            "its engine core process died: killed by hand, by the kernel for lack of memory",
        ),
        ("something else", 139, "ended by signal 11"),
        ("something else", 1, "ended with status 1; see its log"),
    ],
)
def test_the_likely_cause(line: str, status: int, expected: str) -> None:
    """The cause of each usual failure, with what to change."""
    assert expected in likely_cause(["first line", line, "last line"], status)


def test_secrets_do_not_reach_the_file(tmp_path: Path) -> None:
    """Also when the line comes in pieces."""
    log = EngineLog(tmp_path / "engine.log", hide=("s3cret", ""))
    log.feed(b"the key is s3c")
    log.feed(b"ret, really\nand ")
    log.feed(b"more")
    log.close()
    assert (tmp_path / "engine.log").read_text() == "the key is (hidden), really\nand more\n"
    assert list(log.last_lines) == ["the key is (hidden), really", "and more"]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file becomes `.1` and a new one is begun; a line without end is cut."""
    monkeypatch.setattr(engine_log, "LOG_LIMIT_BYTES", 10_000)
    log = EngineLog(tmp_path / "engine.log")
    for _ in range(20):
        log.feed(b"x" * 1500 + b"\n")
    log.feed(b"y" * 100_000)
    log.close()
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert len(sizes) == 2
    assert max(sizes) <= 10_000 + 2_001


def test_the_first_error_is_kept(tmp_path: Path) -> None:
    """Also when hundreds of lines of other processes' complaints follow; a complaint about it is
    none.
    """
    log = EngineLog(tmp_path / "engine.log")
    log.feed(b"(Worker pid=1) ERROR 11-30 03:27:44 [w.py:1] ValueError: too odd\n")
    log.feed(b"RuntimeError: Engine core initialization failed. See root cause above.\n")
    log.feed(b"  at some line\n" * 100)
    log.close()
    assert log.story()[:2] == ("ValueError: too odd", "  at some line")
    assert likely_cause(log.story(), 1) == "ended by ValueError: too odd"


def test_errors_of_requests_long_ago_have_not_ended_it(tmp_path: Path) -> None:
    """An engine that serves prints them, too: only the latest minute's count, and nothing that was
    printed before it served.
    """
    now = 0.0
    log = EngineLog(tmp_path / "engine.log", clock=lambda: now)
    log.feed(b"RuntimeError: tried something else\n")
    log.begin_serving()
    for number in range(20):
        log.feed(b"ValueError: a request was odd %d\n" % number)
    now = 3600.0
    log.feed(b"INFO: fine\n" * 50)
    assert likely_cause(log.story(), 1) == "ended with status 1; see its log"
    log.feed(b"OSError: the device is gone\n" + b"INFO: last words\n" * 50)
    log.close()
    assert likely_cause(log.story(), 1) == "ended by OSError: the device is gone"


def test_what_was_killed_has_not_said_why() -> None:
    """What it printed before is not the cause."""
    lines = ["ValueError: a prompt is longer than max_model_len"]
    assert likely_cause(lines, 137).startswith("killed by SIGKILL")
    assert likely_cause(lines, 134).startswith("`engine_args.max_model_len`")


def test_a_full_disk_does_not_disturb(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Output is still read; what could not be written is counted in the file when there is room
    again.
    """
    log = EngineLog(tmp_path / "engine.log")
    log.feed(b"first\n")
    with Path("/dev/full").open("ab", buffering=0) as full:
        good, log._file = log._file, full
        log.feed(b"Starting to load model\nsecond\n")
        log.note("third")
        log._file = good
    assert log.stage == "loading weights"
    log.feed(b"fourth\n")
    log.close()
    text = (tmp_path / "engine.log").read_text().splitlines()
    assert text == ["first", "[agent] 3 lines could not be written here", "fourth"]
    assert caplog.text.count("cannot write") == 1

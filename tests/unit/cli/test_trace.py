"""``splitserve trace``: waterfalls of recorded timelines, and requests that only the log knows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from splitserve.orchestrator.cli import trace
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.cli.router_client import RouterSilentError
from splitserve.orchestrator.cli.waterfall import parts_of, waterfall
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OLD = {
    "event": "request", "request_id": "bench-1", "id": "f3-1", "received_unix_s": 1796098256.7,
    "endpoint": "chat", "tenant": "", "streaming": True, "prompt_tokens_estimate": 800,
    "prompt_tokens": 812, "output_tokens": 64, "output_limit_tokens": 64, "decision": "split",
    "prefill_node": "prefill-0", "decode_node": "decode-1", "expected_cached_tokens": 512,
    "attempts": 1, "continuations": 0, "dispatched_ms": 0.412, "prefill_answered_ms": 33.1,
    "prefill_status": 200, "first_data_ms": 36.5, "last_data_ms": 140.5, "status": 200,
    "outcome": "ok", "reason": "",
}  # fmt: skip
"""A record without parts."""

SPLIT = OLD | {
    "tenant": "team-a", "queued_ms": 0.1, "reserved_ms": 1.6, "granted_ms": 1.7,
    "prefill_started_ms": 1.6, "prefill_ended_ms": 31.9, "delivered_ms": 32.1, "landed_ms": 32.4,
    "parts": {
        "queue": 0.4, "reserve": 1.2, "prefill": 30.3, "transfer_exposed": 0.5, "first_step": 4.1,
        "decode": 104.0,
    },
    "layer_writes": [
        {"layers": [0, 3], "ms": 14.2, "pages": 40, "bytes": 1_200_000},
        {"layers": [4, 7], "ms": 32.1, "pages": 40, "bytes": 1_200_000},
    ],
    "transfer_pages": 80, "transfer_bytes": 2_400_000, "transfer_hidden_ms": 31.4,
    "transfer_exposed_ms": 0.5, "attempts": 2, "continuations": 1,
    "traceparent": "00-aa-bb-01",
}  # fmt: skip

WATERFALL = """\
bench-1  (the router's own id: f3-1)
ok, status 200
chat, streamed, arrived 2026-12-01 04:10:56.700 UTC, tenant team-a
prompt 812 tokens, 512 of them expected in a cache, answer 64 of at most 64 tokens
split: prefill-0 → decode-1, 2 attempts, continued on another decode node 1x
traceparent 00-aa-bb-01

                           at     took 0                                 45.6 ms
queue                    0 ms   0.4 ms ▍
reserve                0.4 ms   1.2 ms █▏
prefill                1.6 ms  30.3 ms  ███████████████████████████▎
  layers 0-3          14.2 ms   1.2 MB             |
  layers 4-7          32.1 ms   1.2 MB                             |
exposed transfer      31.9 ms   0.5 ms                             ▌
first step            32.4 ms   4.1 ms                              ███▋
decode                36.5 ms   104 ms                                 ████████»
reserved               1.6 ms           |
granted                1.7 ms           |
delivered             32.1 ms                                      |
landed                32.4 ms                                       |
prefill answered      33.1 ms                                       |
first data            36.5 ms                                          |
total                           140 ms

transfer: 80 pages, 2.4 MB, 31.4 ms hidden behind the prefill, 0.5 ms exposed after it
"""

WITHOUT_PARTS = """\
bench-1  (the router's own id: f3-1)
ok, status 200
chat, streamed, arrived 2026-12-01 04:10:56.700 UTC
prompt 812 tokens, 512 of them expected in a cache, answer 64 of at most 64 tokens
split: prefill-0 → decode-1

                           at     took 0                                 45.6 ms
queue                    0 ms  0.41 ms ▍
until first data      0.41 ms  36.1 ms ████████████████████████████████▍
decode                36.5 ms   104 ms                                 ████████»
prefill answered      33.1 ms                                       |
first data            36.5 ms                                          |
total                           140 ms
"""


@pytest.mark.parametrize(("record", "text"), [(SPLIT, WATERFALL), (OLD, WITHOUT_PARTS)])
def test_a_waterfall_in_80_columns(record: dict[str, Any], text: str) -> None:
    """Parts as bars one after the other, moments beneath; the decode, which is long, is cut."""
    shown = "\n".join(line.rstrip() for line in waterfall(record, 80).plain.split("\n")) + "\n"
    assert shown == text


def test_parts_follow_each_other() -> None:
    """Each begins where the last one ended, and the last ends with the request."""
    parts = parts_of(SPLIT)
    assert [part.begin for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert parts[-1].end == pytest.approx(SPLIT["last_data_ms"])
    assert parts_of(SPLIT | {"parts": {"queue": 1.0, "prefill": None, "decode": 2.0}})[1].begin == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill_node": "", "decision": "alone_short"}, "decode-1 alone (short)"),
        ({"outcome": "error", "status": 503, "reason": "no node"}, "error, status 503: no node"),
        (
            {"outcome": "refused", "status": 429, "prefill_node": "", "decode_node": "",
             "dispatched_ms": None, "first_data_ms": None, "last_data_ms": None},
            "sent to no node\n\nit ended before anything was sent to a node",
        ),
        ({"prefill_status": 500}, "the prefill leg was answered 500"),
        ({"prompt_tokens": None, "output_tokens": None}, "prompt about 800 tokens"),
        ({"reason": "\x1b[2J"}, ": ?[2J"),
        ({"parts": {"queue": 0.0, "decode": 0.0}}, "queue"),
        ({"layer_writes": [{"ms": 3.0}, {}]}, "layers ?-?"),
        ({"transfer_hidden_ms": 3.0}, "transfer: - pages, -, 3 ms hidden"),
    ],
)  # fmt: skip
def test_records_that_say_less_or_worse(changes: dict[str, Any], words: str) -> None:
    """What is not known is left out or a dash; failures say why."""
    assert words in waterfall(OLD | changes, 80).plain


def test_an_empty_record_is_shown() -> None:
    """Of another version's router."""
    assert "it ended before" in waterfall({"request_id": "a"}, 80).plain


class FakeRouter:
    """Stands in for ``RouterClient``."""

    timelines: dict[str, Any] = {}  # noqa: RUF012
    is_silent = False

    def __init__(self, *_: object) -> None:
        pass

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        if self.is_silent:
            raise RouterSilentError("the router does not answer")
        return self.timelines.get(request_id)


@pytest.fixture
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a cluster named ``mock``, which runs, and whose router keeps nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(trace, "RouterClient", FakeRouter)
    monkeypatch.setattr(FakeRouter, "timelines", {})
    files = ClusterFiles("mock")
    logs = tmp_path / "logs"
    with files.lock():
        logs.mkdir()
        record = ClusterRecord(
            name="mock", run="r", pid=1, source="mock", url="http://127.0.0.1:1", nodes=(),
            phase="serving", started=0.0, log_dir=str(logs),
        )  # fmt: skip
        files.write_record(record)
        yield logs


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["trace", *words], env={"COLUMNS": "80"})


def write(path: Path, *records: dict[str, Any], before: str = "", after: str = "") -> None:
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    path.write_text(before + lines + after)


def test_the_router_is_asked_first(log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps is shown, or printed as it is."""
    monkeypatch.setattr(FakeRouter, "timelines", {"bench-1": OLD})
    write(log_dir / "router.log", OLD | {"outcome": "error"})
    assert "ok, status 200" in run("bench-1").output
    assert json.loads(run("bench-1", "mock", "--json").output) == OLD


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_log_knows_older_requests(
    log_dir: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """The latest line with the id counts, between the router's other lines, also a broken one."""
    monkeypatch.setattr(FakeRouter, "is_silent", is_silent)
    write(
        log_dir / "router.log",
        OLD | {"outcome": "error"},
        OLD,
        OLD | {"request_id": "bench-11"},
        {"event": "other", "request_id": "bench-1"},
        before="2026-12-01 04:10:56,700 INFO router: a story of bench-1\n",
        after='{"event":"request","request_id":"bench-1","outco',
    )
    result = run("bench-1")
    assert "ok, status 200" in result.output
    assert f"(from {log_dir / 'router.log'})" in result.output


def test_the_logs_of_other_routers_are_read_too(log_dir: Path) -> None:
    """Whichever of several routers served it, and also what ``up`` has moved away."""
    write(log_dir / "router.log", OLD | {"request_id": "bench-2"})
    write(log_dir / "router-1.log", OLD)
    assert f"(from {log_dir / 'router-1.log'})" in run("bench-1").output
    (log_dir / "router-1.log").rename(log_dir / "router-1.log.1")
    write(log_dir / "router-1.log", OLD | {"request_id": "bench-3"})
    assert f"(from {log_dir / 'router-1.log.1'})" in run("bench-1").output


def test_the_log_before_is_read_too(log_dir: Path) -> None:
    """``up`` moves a long log to ``router.log.1``."""
    write(log_dir / "router.log", OLD | {"request_id": "bench-2"})
    write(log_dir / "router.log.1", OLD)
    assert f"(from {log_dir / 'router.log.1'})" in run("bench-1").output


def test_the_routers_own_id_is_known(log_dir: Path) -> None:
    """It stands in other lines of the log."""
    write(log_dir / "router.log", OLD)
    assert run("f3-1").output.startswith("bench-1  ")


def test_a_cluster_that_has_ended_has_its_log(log_dir: Path) -> None:
    """Its files are where its configuration put them."""
    files = ClusterFiles("mock")
    files.remove_record()
    files.config_path.write_text(json.dumps({"observability": {"log_dir": str(log_dir)}}))
    write(log_dir / "router.log", OLD)
    assert "ok, status 200" in run("bench-1", "mock").output


@pytest.mark.parametrize("request_id", ["bench-1", "no such id", "ünbekannt", "a?b", "../x"])
def test_an_unknown_request_is_said_to_be_one(log_dir: Path, request_id: str) -> None:
    """With the places where it was looked for; the exit status is 1."""
    result = run(request_id)
    assert result.exit_code == 1
    assert f"no request {request_id!r} is known" in result.output
    assert str(log_dir / "router.log") in result.output

"""``splitserve top``: frames of recorded statuses, and a router that goes and comes back."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from splitserve.orchestrator.cli import top
from splitserve.orchestrator.cli.figures import age, bar, count, duration, percentile
from splitserve.orchestrator.cli.router_client import RouterSilentError
from splitserve.orchestrator.cli.top_frame import Cluster, Size, absence, frame
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

if TYPE_CHECKING:
    from rich.text import Text

NOW = 1_796_098_262.0
CLUSTER = Cluster("mock-2p2d", "http://127.0.0.1:8000", "serving", NOW - 7400)
CLOSED = {"prefill": {"state": "closed"}, "decode": {"state": "closed"}}
NODE = {
    "role": "prefill", "pool": "prefill", "phase": "ready", "is_usable": True,
    "is_draining": False, "is_flipping": False, "is_connected": True, "is_silent": False,
    "prefill_legs": 1, "decode_legs": 0, "running": 1, "waiting": 0, "total_blocks": 512,
    "free_blocks": 330, "open_transfers": 2, "quarantined_transfers": 0, "breakers": CLOSED,
}  # fmt: skip


def request(number: int, **changes: Any) -> dict[str, Any]:
    """The record of a request that ended ``number`` seconds ago."""
    return {
        "event": "request", "request_id": f"bench-1a2b-{number}", "id": f"f3-{number}",
        "received_unix_s": NOW - number - 0.14, "endpoint": "chat", "tenant": "",
        "streaming": True, "prompt_tokens_estimate": 800, "prompt_tokens": 812,
        "output_tokens": 64, "decision": "split", "prefill_node": "prefill-0",
        "decode_node": "decode-1", "first_data_ms": 30.0 + number, "last_data_ms": 140.0,
        "status": 200, "outcome": "ok", "reason": "",
    } | changes  # fmt: skip


STATUS = {
    "is_stopping": False,
    "requests": {
        "waiting": 3, "running": 5, "waiting_by_tenant": {"team-a": 2, "team-b": 1},
        "queue_limit_requests": 256,
    },
    "nodes": {
        "decode-0": NODE | {"role": "decode", "decode_legs": 4, "prefill_legs": 0, "running": 4,
                            "free_blocks": 12, "quarantined_transfers": 1,
                            "quarantined_blocks": 32},
        "decode-1": NODE | {"role": "decode", "is_draining": True, "running": None,
                            "free_blocks": None, "open_transfers": None},
        "prefill-0": NODE,
    },
    "loading": {"prefill-1": {"stage": "Loading weights", "elapsed_s": 12.3}},
    "returning": ["decode-9"],
    "refused": {"decode-8": "other weights \x1b[31m here"},
    "last_death": {"decode-1": {"exit_status": -9, "likely_cause": "killed by SIGKILL"}},
    "autotune": {"mode": "advise", "decisions": [{"why": "2 decode nodes do", "node": "decode-0"}]},
    "timelines": [
        request(4),
        request(3, decision="alone_short", prefill_node=""),
        request(2, outcome="error", status=503, first_data_ms=None, last_data_ms=None),
        request(1, request_id="x" * 50, endpoint="completions"),
        request(0, endpoint="probe"),
    ],
}  # fmt: skip

FRAME = """\
mock-2p2d  serving  http://127.0.0.1:8000/v1                               up 2h
requests     running 5, waiting 3 of 256 (team-a 2, team-b 1)
in 10 s      0.4 requests/s, 325 prompt and 25.6 answer tokens/s, 1 failed
first token  p50 33 ms, p95 34 ms, max 34 ms (latest 3 streams)

node        role     state         legs run+wait  KV blocks used       transfers
prefill-0   prefill  ready            1      1+0  ███▎       36%   512         2
decode-0    decode   ready            4      4+0  ████████▊  98%   512         2
decode-1    decode   draining         1        -                               -
prefill-1   loading (12 s): Loading weights
decode-9    restarting

autotune     advise; advises: 2 decode nodes do
refused      decode-8: other weights ?[31m here
quarantine   decode-0: 32 blocks of 1 transfers wait for a fence
last death   decode-1: killed by SIGKILL

age  latest requests    on                     ttft   total   tokens outcome
  1s xxxxxxxxxxxxxxxxx… prefill-0→decode-1    31 ms  140 ms   812+64 ok
  2s bench-1a2b-2       prefill-0→decode-1        -       -   812+64 503 error
  3s bench-1a2b-3       decode-1              33 ms  140 ms   812+64 ok
  4s bench-1a2b-4       prefill-0→decode-1    34 ms  140 ms   812+64 ok
"""


def shown(text: Text, width: int) -> str:
    """The text as a terminal without colours shows it."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(text, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_frame_in_80_columns() -> None:
    """Every part of a busy cluster in its place, probes left out, nothing that a terminal obeys."""
    assert shown(frame(CLUSTER, STATUS, NOW, Size(80)), 80) == FRAME


@pytest.mark.parametrize("width", [20, 60, 79, 80, 100, 120, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """Whatever the width, a line stays a line."""
    text = frame(CLUSTER, STATUS, NOW, Size(width)).plain
    assert max(len(line) for line in text.splitlines()) <= width


def test_requests_fill_what_is_left_of_the_height() -> None:
    """A low terminal shows fewer requests, and never more lines than it has."""
    for height in (5, 20, 22, 24, 50):
        lines = frame(CLUSTER, STATUS, NOW, Size(80, height)).plain.splitlines()
        assert len(lines) <= height
    assert "bench-1a2b-4" in frame(CLUSTER, STATUS, NOW, Size(80, 24)).plain
    many = {**STATUS, "timelines": [request(n) for n in range(32)]}
    assert len(frame(CLUSTER, many, NOW, Size(80, 40)).plain.splitlines()) == 40


def test_an_empty_router_has_a_frame() -> None:
    """Nothing is known yet, also by a router that says less than this one."""
    text = frame(CLUSTER, {}, NOW, Size(80)).plain
    assert "running 0, waiting 0" in text
    assert "first token  p50 -, p95 -, max - (latest 0 streams)" in text


def test_rates_count_what_ended_in_the_window() -> None:
    """Requests that ended earlier do not count; where the latest ones do not reach back for all of
    the window, they are taken for as long as they do.
    """
    old = [request(n) for n in range(20, 1, -2)]
    text = frame(CLUSTER, {"timelines": old}, NOW, Size(80)).plain
    assert "0.5 requests/s" in text
    busy = [request(0, received_unix_s=NOW - 4 + n / 8 - 0.14) for n in range(32)]
    text = frame(CLUSTER, {"timelines": busy}, NOW, Size(80)).plain
    assert "8 requests/s" in text


def test_incidents_replace_the_last_deaths() -> None:
    """The latest four, newest first."""
    incidents = [
        {
            "at_unix_s": NOW - 60 + n,
            "kind": "breaker_open",
            "node": f"decode-{n}",
            "text": "3 faults",
            "count": n,
        }
        for n in range(6)
    ]
    text = frame(CLUSTER, {**STATUS, "incidents": incidents}, NOW, Size(80)).plain
    told = [line for line in text.splitlines() if line.startswith("incident")]
    assert told[0] == "incident     04:10:07 breaker open decode-5: 3 faults (5x)"
    assert len(told) == 4
    assert "last death" not in text
    started = {"at_unix_s": NOW, "kind": "router_started", "node": "", "text": "it listens"}
    text = frame(CLUSTER, {"incidents": [started]}, NOW, Size(80)).plain
    assert "incident     04:11:02 router started: it listens\n" in text


def test_the_cache_is_a_line() -> None:
    """Each tier's filling and hits, or what is the matter."""
    tiers = [
        {"name": "cpu", "used_bytes": 5e8, "capacity_bytes": 1e9, "hits": 3, "misses": 1},
        {"name": "s3", "used_bytes": 2e9, "capacity_bytes": None, "hits": 0, "misses": 0},
    ]
    text = frame(CLUSTER, {"cache": {"tiers": tiers, "trouble": ""}}, NOW, Size(80)).plain
    assert "\ncache        cpu 50% full, 75% of 4 hit; s3 2.0 GB\n" in text
    text = frame(CLUSTER, {"cache": {"trouble": "it is silent"}}, NOW, Size(80)).plain
    assert "\ncache        it is silent\n" in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "ready"),
        ({"is_connected": False}, "disconnected"),
        ({"is_silent": True}, "silent"),
        ({"is_flipping": True}, "flipping"),
        ({"is_usable": False, "phase": "dead"}, "dead"),
        ({"breakers": {"prefill": {"state": "open"}}}, "breaker open"),
    ],
)
def test_a_node_has_one_state(changes: dict[str, Any], word: str) -> None:
    """The worst of what is the matter."""
    text = frame(CLUSTER, {"nodes": {"prefill-0": NODE | changes}}, NOW, Size(80)).plain
    assert f"prefill  {word} " in text


def test_the_router_goes_and_comes_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame says so and for how long, and the next one shows the status again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    answers: list[dict[str, Any] | None] = [STATUS, None, None, STATUS]

    class Router:
        def __init__(self, *_: object, keep_alive: bool) -> None:
            assert keep_alive

        def status(self, timeout_s: float) -> dict[str, Any]:
            answer = answers.pop(0)
            if answer is None:
                raise RouterSilentError("nobody listens")
            return answer

        def close(self) -> None:
            pass

    monkeypatch.setattr(top, "RouterClient", Router)
    record = ClusterRecord(
        name="mock", run="r", pid=1, source="mock", url="http://127.0.0.1:1", nodes=(),
        phase="serving", started=0.0, log_dir="",
    )  # fmt: skip
    with ClusterFiles("mock").lock():
        view = top.View(ClusterFiles("mock"), record)
        looks = [view.look(Size(80)).plain for _ in range(3)]
        assert "prefill-0" in looks[0]
        assert "the router does not answer (for 0s); looking for it\nnobody listens" in looks[1]
        assert not view.is_answered
        assert "prefill-0" in view.look(Size(80)).plain
        assert view.is_answered


def test_an_absence_fits() -> None:
    """The reason is cut at the edge."""
    text = absence(CLUSTER, "why " * 100, 75, Size(80)).plain
    assert "(for 75s)" in text
    assert max(map(len, text.splitlines())) == 80


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0.0, "0 ms"), (0.354, "0.35 ms"), (35.04, "35 ms"), (999.4, "999 ms"), (999.6, "1 s"),
        (1240, "1.24 s"), (599_000, "599 s"), (600_000, "10 min"), (None, "-"),
        (float("nan"), "-"),
    ],
)  # fmt: skip
def test_durations(ms: float | None, text: str) -> None:
    """Three digits and a unit, at most seven characters."""
    assert duration(ms) == text
    assert len(text) <= 7


def test_other_figures() -> None:
    """Short, and right at the edges."""
    assert [age(s) for s in (-1, 99, 100, 6000, 86400 * 3)] == ["0s", "99s", "1m", "1h", "3d"]
    assert [count(n) for n in (0, 999, 1000, 12_345, 2e6)] == ["0", "999", "1k", "12.3k", "2M"]
    assert percentile([], 0.5) is None
    assert [percentile([3, 1, 2], p) for p in (0.0, 0.5, 1.0)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("begin", "end", "text"),
    [
        (0.0, 1.0, "████"),
        (0.0, 0.0, "    "),
        (0.0, 1e-6, "▏   "),
        (0.5, 0.75, "  █ "),
        (0.0, 0.125, "▌   "),
        (1.0, 1.0, "    "),
        (0.999, 2.0, "   ▏"),
    ],
)
def test_bars(begin: float, end: float, text: str) -> None:
    """As wide as asked for; what is not nothing is seen."""
    assert bar(begin, end, 4) == text

"""Recorders of a router's requests."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import SECRET, StubCluster, completion, stub_cluster, until

from splitserve.kv_transfer.transfer_params import unseal
from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.core.effects import Timeline
from splitserve.orchestrator.router.prompt_marks import NO_MARKS
from splitserve.orchestrator.router.recordings import (
    HELD_LIMIT_BYTES,
    RECORDERS_LIMIT,
    RECORDING_PATH,
    Recordings,
)
from splitserve.orchestrator.router.token_counts import Tally

if TYPE_CHECKING:
    import aiohttp

OPERATOR = {"Authorization": f"Bearer {operator_token(SECRET)}"}
WORD = "confidential "


async def recorder(cluster: StubCluster) -> aiohttp.ClientResponse:
    """One that the router listens to."""
    response = await cluster.session.get(cluster.url + RECORDING_PATH, headers=OPERATOR)
    assert response.status == 200
    began = await line_of(response)
    assert began["event"] == "began"
    assert abs(began["at_s"] - time.monotonic()) < 5
    return response


async def line_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(await response.content.readline())
    return line


async def test_arrivals_and_ends_are_told() -> None:
    """With marks although nobody routes by them, and no word of the prompt; equal beginnings have
    equal marks.
    """
    async with stub_cluster("p0", "d0", policy={"prefix_routing": False}) as cluster:
        assert not cluster.router.core.wants_marks
        listening = await recorder(cluster)
        marks = []
        for end in ("one", "two"):
            await (await cluster.post(json=completion(prompt=WORD * 100 + end))).read()
            arrived, ended = await line_of(listening), await line_of(listening)
            assert (arrived["event"], ended["event"]) == ("arrived", "ended")
            assert arrived["id"] == ended["id"]
            assert arrived["prompt_bytes"] == 100 * len(WORD) + 3
            assert ended["output_tokens"] == 4
            assert ended["output_limit_tokens"] == 8
            assert "confidential" not in json.dumps([arrived, ended])
            marks.append(arrived["marks"])
        assert marks[0] == marks[1] != ""
        # Legs carry marks only where engines make use of them
        for engine in cluster.engines.values():
            for asked in engine.asked:
                leg = unseal(asked.body["kv_transfer_params"], SECRET)
                assert leg is not None
                assert leg.marks == b""
        listening.close()
        await until(lambda: not cluster.router.recordings.are_on)


async def test_recording_is_for_operators() -> None:
    """And for a few at a time; one that leaves makes room."""
    async with stub_cluster("d0") as cluster:
        for headers in ({}, {"Authorization": "Bearer x"}):
            url = cluster.url + RECORDING_PATH
            assert (await cluster.session.get(url, headers=headers)).status == 401
        at_work = [await recorder(cluster) for _ in range(RECORDERS_LIMIT)]
        refused = await cluster.session.get(url, headers=OPERATOR)
        assert refused.status == 429
        assert "stop one of them" in await refused.text()
        at_work.pop().close()
        await until(lambda: len(cluster.router.recordings._recorders) < RECORDERS_LIMIT)
        await recorder(cluster)


async def test_a_router_that_stops_ends_the_recording() -> None:
    """As a complete answer, at once."""
    async with stub_cluster("d0") as cluster:
        listening = await recorder(cluster)
        await cluster.router.stop()
        assert await listening.content.read() == b""


class Sink:
    """Takes what it is sent."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.is_finished = False
        self.listener: Any = None
        self.room_lines = 10**9

    def send_head(self, status: int, headers: Any, body_bytes: int | None) -> None:
        assert (status, body_bytes) == (200, None)

    def send_body(self, data: bytes, is_last: bool = False) -> None:
        self.lines.append(json.loads(data))
        self.room_lines -= 1
        if self.room_lines == 0:
            self.listener.pause()

    def finish(self) -> None:
        self.is_finished = True

    def abort(self) -> None:
        pytest.fail("a recording is never broken off")


def test_a_slow_recorder_loses_lines() -> None:
    """Those beyond the bound, and it is told how many once it has caught up; the others keep their
    order.
    """
    recordings, sink = Recordings(), Sink()
    recordings.begin(sink)  # type: ignore[arg-type]
    sink.listener.pause()
    count = 0
    while not sink.listener._lost_lines:
        recordings.arrived(str(count), NO_MARKS)
        count += 1
    recordings.arrived("lost too", NO_MARKS)
    assert sink.listener._held_bytes <= HELD_LIMIT_BYTES
    sink.room_lines = 3
    sink.listener.resume()
    assert len(sink.lines) == 1 + 3
    sink.room_lines = 10**9
    sink.listener.resume()
    assert sink.lines[-1] == {"event": "lost", "lines": 2}
    assert [line["id"] for line in sink.lines[1:-1]] == [str(n) for n in range(count - 1)]
    recordings.arrived("next", NO_MARKS)
    assert sink.lines[-1]["id"] == "next"
    recordings.close()
    assert sink.is_finished
    assert not recordings.are_on


def test_an_end_without_counts_tells_the_estimate() -> None:
    """Of the prompt; an answer that never came has no length."""
    recordings, sink = Recordings(), Sink()
    recordings.begin(sink)  # type: ignore[arg-type]
    timeline = Timeline(
        request_id="r", endpoint="chat", tenant="", streaming=True, prompt_tokens=33, received=0.0
    )
    recordings.ended(timeline, Tally("x", None, None, 5))
    assert sink.lines[-1] == {
        "event": "ended",
        "id": "r",
        "input_tokens": 33,
        "output_tokens": None,
        "output_limit_tokens": 5,
    }

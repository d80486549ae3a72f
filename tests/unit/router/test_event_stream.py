"""The live events of a router, for those who watch it."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import SECRET, StubCluster, completion, stub_cluster, until
from router_stubs.engine import send

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.agent.messages import NodeState
from splitserve.orchestrator.core.effects import Timeline
from splitserve.orchestrator.router import event_stream
from splitserve.orchestrator.router.event_stream import (
    EVENTS_PATH,
    HELD_LIMIT_BYTES,
    REQUESTS_PER_S_LIMIT,
    WATCHERS_LIMIT,
    EventStreams,
)
from splitserve.orchestrator.router.incidents import Incidents
from splitserve.orchestrator.router.request_log import RequestLog
from splitserve.orchestrator.router.token_counts import Tally

if TYPE_CHECKING:
    import aiohttp
    from router_stubs.engine import Asked

OPERATOR = {"Authorization": f"Bearer {operator_token(SECRET)}"}


async def watch(cluster: StubCluster, **headers: str) -> aiohttp.ClientResponse:
    """The answer to one that wants to watch."""
    return await cluster.session.get(cluster.url + EVENTS_PATH, headers=headers)


async def event_of(watching: aiohttp.ClientResponse) -> tuple[str, Any]:
    """The next event; comments do not count."""
    async with asyncio.timeout(20):
        while True:
            text = (await watching.content.readuntil(b"\n\n")).decode()
            if text.startswith(":"):
                continue
            name, data = text.rstrip("\n").split("\n")
            return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def next_of(watching: aiohttp.ClientResponse, name: str) -> Any:
    """The next event of that name."""
    while True:
        found, data = await event_of(watching)
        if found == name:
            return data


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second takes 20 ms."""
    monkeypatch.setattr(event_stream, "INTERVAL_S", 0.02)


@pytest.mark.usefixtures("fast")
async def test_everything_at_first_then_what_changes() -> None:
    """The first status has the past; a request that ends comes by itself, and so does an incident;
    a status follows when it has changed.
    """
    async with stub_cluster("p0", "d0") as cluster:
        await (await cluster.post(headers={"X-Request-Id": "before"})).read()
        await cluster.idle()
        watching = await watch(cluster)
        assert watching.headers["content-type"].startswith("text/event-stream")
        assert watching.headers["cache-control"] == "no-store"
        name, first = await event_of(watching)
        assert name == "status"
        assert list(first["nodes"]) == ["d0", "p0"]
        assert [t["request_id"] for t in first["timelines"]] == ["before"]
        assert first["incidents"][0]["kind"] == "router_started"
        assert first["ended"]["requests"] == 0
        await (await cluster.post(headers={"X-Request-Id": "after"})).read()
        told = [await next_of(watching, "request") for _ in range(2)]
        # The first one was not final yet
        assert [(r["request_id"], r["outcome"]) for r in told] == [
            ("before", "ok"),
            ("after", "ok"),
        ]
        status = await next_of(watching, "status")
        assert "timelines" not in status
        while not status["ended"]["requests"]:
            status = await next_of(watching, "status")
        assert status["ended"]["output_tokens"] == 8
        state = NodeState(node="d0", incarnation="d0-1", phase="ready", free_blocks=77)
        await cluster.agents["d0"].say(state)
        while status["nodes"]["d0"]["free_blocks"] != 77:
            status = await next_of(watching, "status")
        await cluster.agents["d0"].socket.close()
        incident = await next_of(watching, "incident")
        assert (incident["kind"], incident["node"]) == ("disconnected", "d0")
        watching.close()
        await until(lambda: not cluster.router.events.are_on)


@pytest.mark.usefixtures("fast")
async def test_what_does_not_change_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """But a comment now and then tells that the connection lives."""
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.05)
    async with stub_cluster("p0", "d0") as cluster:
        watching = await watch(cluster)
        await event_of(watching)
        for _ in range(3):
            assert await watching.content.readuntil(b"\n\n") == b": alive\n\n"
        watching.close()


async def test_who_may_watch() -> None:
    """With API keys on: operators only. A client's key is not enough."""
    async with stub_cluster("d0", keys={"k1": "team"}) as cluster:
        for headers in ({}, {"Authorization": "Bearer k1"}, {"Authorization": "Bearer x"}):
            assert (await watch(cluster, **headers)).status == 401
        watching = await watch(cluster, **OPERATOR)
        assert watching.status == 200
        watching.close()


async def test_there_may_be_some_watchers() -> None:
    """One more is told to come later; one that leaves makes room."""
    async with stub_cluster("d0") as cluster:
        watching = [await watch(cluster) for _ in range(WATCHERS_LIMIT)]
        refused = await watch(cluster)
        assert refused.status == 429
        assert refused.headers["retry-after"]
        assert "watch already" in await refused.text()
        watching.pop().close()
        await until(lambda: len(cluster.router.events._watchers) < WATCHERS_LIMIT)
        again = await watch(cluster)
        assert again.status == 200
        for one in (*watching, again):
            one.close()


async def test_a_router_that_stops_ends_the_stream() -> None:
    """As a complete answer, at once."""
    async with stub_cluster("d0") as cluster:
        watching = await watch(cluster)
        await event_of(watching)
        await cluster.router.stop()
        async with asyncio.timeout(20):
            await watching.content.read()
        assert watching.content.at_eof()


async def test_a_client_that_reads_nothing() -> None:
    """Is cut off when the connection and its bound are full, and takes nothing with it."""
    async with stub_cluster("d0") as cluster:
        events, incidents = cluster.router.events, cluster.router.incidents
        with socket.create_connection(("127.0.0.1", cluster.router.port)) as client:
            client.sendall(f"GET {EVENTS_PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            await until(lambda: events.are_on)
            for number in range(100_000):
                incidents.note("died", f"node-{number}", "x" * 400)
                if number % 100 == 0:
                    await asyncio.sleep(0)
                if not events.are_on:
                    break
            assert not events.are_on
        assert (await (await cluster.post()).read()).endswith(b"[DONE]\n\n")


async def test_nobody_watches() -> None:
    """Then nothing is asked and nothing is armed; the one who has left leaves nothing."""
    async with stub_cluster("p0", "d0") as cluster:
        events = cluster.router.events
        assert (events.are_on, events._timer) == (False, None)
        await (await cluster.post()).read()
        assert events._ended.requests == 0
        watching = await watch(cluster)
        watching.close()
        await until(lambda: not events.are_on)
        await until(lambda: events._timer is None)


async def test_an_engine_fault_is_shown_as_failed() -> None:
    """And a refusal by the engine is not."""

    async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await send(writer, statuses.pop(), b'{"error":{"message":"no"}}')

    statuses = [500, 400]
    async with stub_cluster("d0") as cluster:
        cluster.engines["d0"].answer = refuse
        watching = await watch(cluster)
        for _ in range(2):
            await (await cluster.post(json=completion())).read()
        records = [await next_of(watching, "request") for _ in range(2)]
        assert [record["status"] for record in records] == [400, 500]
        assert cluster.router.events._ended.failed == 1
        watching.close()


class Sink:
    """A connection in which nobody reads when told so."""

    def __init__(self) -> None:
        self.listener: Any = None
        self.sent: list[bytes] = []
        self.end = ""
        self.room = 10**9
        """Events after which the connection is full."""

    def send_head(self, status: int, headers: Any, body_bytes: int | None) -> None:
        assert (status, body_bytes) == (200, None)

    def send_body(self, data: bytes, is_last: bool = False) -> None:
        self.sent.append(data)
        self.room -= 1
        if self.room == 0:
            self.listener.pause()

    def finish(self) -> None:
        self.end = "finished"

    def abort(self) -> None:
        self.end = "aborted"


def ended(number: int, **changes: Any) -> tuple[Timeline, Tally]:
    fields: dict[str, Any] = {
        "request_id": str(number),
        "endpoint": "chat",
        "tenant": "",
        "streaming": True,
        "prompt_tokens": 10,
        "received": 0.0,
        "outcome": "ok",
        "status": 200,
    }
    return Timeline(**(fields | changes)), Tally(f"client-{number}", None, 3, 5)


def end(streams: EventStreams, *numbers: int, **changes: Any) -> None:
    """Requests of those numbers have ended, and are final."""
    for number in numbers:
        streams._log.add(*ended(number, **changes))
    streams._log.flush()


def streams_and_sink() -> tuple[EventStreams, Sink]:
    streams, sink = EventStreams(dict, RequestLog(None, 10), Incidents()), Sink()
    streams.begin(sink)  # type: ignore[arg-type]
    return streams, sink


async def test_more_requests_than_anybody_can_read() -> None:
    """So many a second are shown; the rest is counted, and failed ones come through for longer."""
    streams, sink = streams_and_sink()
    end(streams, *range(3 * REQUESTS_PER_S_LIMIT), expected_cached_tokens=4)
    assert len(sink.sent) == 1 + REQUESTS_PER_S_LIMIT
    end(streams, *range(3 * REQUESTS_PER_S_LIMIT), outcome="error", status=503)
    assert len(sink.sent) == 1 + 2 * REQUESTS_PER_S_LIMIT
    streams._tick()
    status = json.loads(sink.sent[-1].partition(b"data: ")[2])
    assert status["ended"] == {
        "requests": 6 * REQUESTS_PER_S_LIMIT,
        "failed": 3 * REQUESTS_PER_S_LIMIT,
        "left_out": 4 * REQUESTS_PER_S_LIMIT,
        "prompt_tokens": 60 * REQUESTS_PER_S_LIMIT,
        "expected_cached_tokens": 12 * REQUESTS_PER_S_LIMIT,
        "output_tokens": 18 * REQUESTS_PER_S_LIMIT,
    }
    end(streams, 0)
    assert sink.sent[-1].startswith(b"event: request\n")
    streams.close()
    assert sink.end == "finished"


async def test_a_slow_watcher_gets_what_it_missed_in_order() -> None:
    """As soon as it reads again; of statuses only the latest one."""
    streams, sink = streams_and_sink()
    sink.listener.pause()
    for number in range(5):
        end(streams, number)
        streams._tell_status()
    assert len(sink.sent) == 1
    sink.room = 2
    sink.listener.resume()
    assert len(sink.sent) == 3
    sink.listener.resume()
    *told, status = [json.loads(data.partition(b"data: ")[2]) for data in sink.sent[1:]]
    assert [record["id"] for record in told] == list("01234")
    assert status["ended"]["requests"] == 5
    end(streams, 5)
    assert len(sink.sent) == 8
    streams.close()


async def test_a_status_takes_little_of_the_routers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes long comes less often."""

    def snapshot() -> dict[str, Any]:
        clock.now += 0.1
        return {}

    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(event_stream, "time", SimpleNamespace(monotonic=lambda: clock.now))
    streams, sink = EventStreams(snapshot, RequestLog(None, 10), Incidents()), Sink()
    streams.begin(sink)  # type: ignore[arg-type]
    assert streams._timer is not None
    loop = asyncio.get_running_loop()
    interval_s = event_stream.INTERVAL_S
    assert streams._timer.when() - loop.time() == pytest.approx(interval_s, abs=0.1)
    streams._timer.cancel()
    streams._tick()
    assert streams._timer.when() - loop.time() == pytest.approx(5.0, abs=0.1)
    streams.close()


async def test_one_that_does_not_read_is_cut_off() -> None:
    """At its bound; the others go on, and it may come again."""
    streams, sink = streams_and_sink()
    other = Sink()
    streams.begin(other)  # type: ignore[arg-type]
    sink.listener.pause()
    incident = "x" * 400
    for number in range(HELD_LIMIT_BYTES // 400 + 1):
        streams._incidents.note("died", f"node-{number}", incident)
        if sink.end:
            break
    assert sink.end == "aborted"
    assert sink.listener._held_bytes == 0
    assert len(streams._watchers) == 1
    before = len(other.sent)
    streams._incidents.note("died", "d0", "again")
    assert len(other.sent) == before + 1
    sink.listener.client_gone()
    streams.close()

"""Engines that fail by their own fault, or close connections as they may: what the router makes of
it, and what it shows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from router_stubs.cluster import StubCluster, completion, stub_cluster, until
from router_stubs.engine import Asked, plain_answer, send

from splitserve.orchestrator.config import ClusterConfig
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.breaker import BreakerLimits
from splitserve.orchestrator.router import core_driver
from splitserve.orchestrator.router.app import limits_of
from splitserve.orchestrator.router.engine_client import EngineClient

if TYPE_CHECKING:
    import pytest

UVICORN_KEEP_ALIVE_S = 5.0
"""After that time vLLM's HTTP server closes an idle connection."""
ALONE = completion(n=2)
"""Goes to a decode node only."""


async def failing(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Status 500 to everything."""
    await send(writer, 500, b'{"error": "broken"}')


async def breaker_metric(cluster: StubCluster, name: str) -> str:
    """The value of that sample."""
    text = await (await cluster.session.get(cluster.url + "/metrics")).text()
    return next(line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name))


async def test_a_failing_node_is_shut_out_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    """No client notices; status, metrics and one line of the log per change tell it; when it serves
    again it gets work again.
    """
    caplog.set_level(logging.INFO)
    state = 'splitserve_node_breaker_state{leg="decode",node="d0"}'
    policy = {"breaker": {"failures": 2, "open_s": 0.05}}
    async with stub_cluster("d0", "d1", policy=policy) as cluster:
        cluster.engines["d0"].answer = failing
        loop = asyncio.get_running_loop()
        end = loop.time() + 30
        node = cluster.router.core.membership.nodes["d0"]
        while node.decode_breaker.state.value == "closed":
            assert loop.time() < end
            assert (await cluster.post(json=ALONE)).status == 200
        assert await breaker_metric(cluster, state) in ("1.0", "2.0")
        assert (
            caplog.text.count("d0: breaker of decode legs is open: the decode node answered") == 1
        )
        url = cluster.url + "/internal/status"
        shown = (await (await cluster.session.get(url)).json())["nodes"]["d0"]["breakers"]
        assert shown["prefill"] == {"state": "closed", "openings": 0, "latest_fault": ""}
        assert shown["decode"]["latest_fault"] == "the decode node answered 500"
        cluster.engines["d0"].answer = plain_answer
        while node.decode_breaker.state.value != "closed":
            assert loop.time() < end
            assert (await cluster.post(json=ALONE)).status == 200
        assert await breaker_metric(cluster, state) == "0.0"
        assert "d0: breaker of decode legs is closed" in caplog.text


async def test_connections_closed_just_as_they_are_reused_cost_no_request() -> None:
    """Both engines close every kept connection when the next request arrives on it: each request is
    answered all the same, and no breaker notices.
    """
    async with stub_cluster("p0", "d0") as cluster:
        served: dict[object, int] = {}

        async def once(asked: Asked, writer: asyncio.StreamWriter) -> None:
            served[writer] = served.get(writer, 0) + 1
            if served[writer] > 1:
                writer.transport.abort()
            else:
                await plain_answer(asked, writer)

        for engine in cluster.engines.values():
            engine.answer = once
        for _ in range(20):
            response = await cluster.post()
            assert response.status == 200
            assert (await response.read()).endswith(b"[DONE]\n\n")
            await cluster.idle()
        assert max(served.values()) == 2
        for node in cluster.router.core.membership.nodes.values():
            assert node.prefill_breaker.is_clean
            assert node.decode_breaker.is_clean


async def test_an_engine_that_restarts_between_two_requests_is_not_missed() -> None:
    """Its old connections are gone, the new process listens on the same port."""
    async with stub_cluster("p0", "d0") as cluster:
        for _ in range(3):
            assert (await cluster.post()).status == 200
            await cluster.idle()
            for engine in cluster.engines.values():
                await engine.stop()
                await engine.start(engine.port)
        assert (await cluster.post()).status == 200
        await cluster.idle()


def test_the_yaml_reaches_the_core() -> None:
    """Every key of the breaker, and the tenants' weights."""
    config = ClusterConfig.model_validate(
        {
            "engine": "mock",
            "model": {"path": "x"},
            "policy": {
                "breaker": {"failures": 7, "window_s": 8.0, "open_s": 9.0, "open_limit_s": 10.0}
            },
            "security": {"api_keys": [{"tenant": "a", "key_env": "K", "weight": 3.0}]},
        }
    )
    limits = limits_of(config)
    assert limits.breaker == BreakerLimits(7, 8.0, 9.0, 10.0)
    assert limits.tenant_weights == {"a": 3.0}


def test_idle_connections_are_given_up_before_the_engine_does() -> None:
    """By a margin of a second at least."""
    assert EngineClient.idle_limit_s <= UVICORN_KEEP_ALIVE_S - 1


async def test_a_hung_engine_holds_nothing_that_others_need() -> None:
    """Many requests hang on one engine; those for another one are answered on their own
    connections.
    """
    async with stub_cluster("d0", "d1") as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        cluster.engines["d0"].answer = hang
        tasks = [asyncio.ensure_future(cluster.post(json=ALONE)) for _ in range(60)]
        hung, well = cluster.engines["d0"].asked, cluster.engines["d1"].asked
        await until(lambda: len(hung) + len(well) == 60, 20)
        await until(lambda: sum(task.done() for task in tasks) == len(well), 20)
        assert len(hung) >= 1
        for task in tasks:
            if task.done():
                assert (await task).status == 200
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await cluster.idle()


async def test_a_late_timer_lets_nothing_be_sent_that_has_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop was busy past a waiting request's deadline, and the next event is the slot that it
    waited for: it gets its 503, and no engine gets it.
    """
    settings = {"queue_timeout_s": 30.0, "prefill_ahead_requests": 0, "prefill_batch_tokens": 0}
    async with stub_cluster("p0", "d0", **settings) as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        for engine in cluster.engines.values():
            engine.answer = hang
        core, driver = cluster.router.core, cluster.router.driver
        first = asyncio.ensure_future(cluster.post())
        await until(lambda: len(core.requests) == 1)
        waiting = asyncio.ensure_future(cluster.post())
        await until(lambda: len(core.queue) == 1)
        (running,) = (r for r in core.requests.values() if r.has_prefill_leg)
        real = time.monotonic
        monkeypatch.setattr(core_driver.time, "monotonic", lambda: real() + 31)
        driver.tell(ev.PrefillAnswered(running.id, 1, 200))
        monkeypatch.undo()
        assert (await waiting).status == 503
        assert len(cluster.engines["d0"].asked) == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await cluster.idle()

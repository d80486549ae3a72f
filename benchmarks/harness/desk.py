"""A router without sockets: its routes, core and legs, with a client and engines that are not
there. What it takes for a request is CPU time of one thread, which other processes hardly change.
"""

from __future__ import annotations

import random
import time
from typing import IO, TYPE_CHECKING, Any

from harness.fake_engines import HELD_MARKS, MODEL

if TYPE_CHECKING:
    from harness.http_load import Row

NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
BLOCKS = 1_000_000


class NoConnection:
    """Where a client would be."""

    listener: Any = None

    def send_head(self, *told: object) -> None:
        """Nobody reads it."""

    send_body = answer = send_head

    def finish(self) -> None:
        """Nobody waits."""

    abort = finish


class NoEngines:
    """Where the engines would be: takes every leg, answers none."""

    def send(self, address: Any, payload: Any, listener: Any) -> Any:
        """A leg that is out."""
        from splitserve.orchestrator.router.engine_client import Leg

        return Leg(self, address, payload, listener)  # type: ignore[arg-type]


class NoProcess:
    """Where a process would be that is told of requests that have ended."""

    is_running = True

    def send(self, frame: bytes, requests: int) -> bool:
        """It takes them all."""
        return True


class Desk:
    """One router, to be used inside a running event loop. ``log`` takes a line per request;
    ``sample_ratio`` of the requests are traced, None without traces.
    """

    def __init__(
        self,
        *,
        prefix_routing: bool,
        log: IO[bytes] | None = None,
        sample_ratio: float | None = None,
    ) -> None:
        from splitserve.orchestrator.agent.messages import NodeDescription, NodeState
        from splitserve.orchestrator.config import ClusterConfig
        from splitserve.orchestrator.core import events as ev
        from splitserve.orchestrator.core.router_core import RouterCore
        from splitserve.orchestrator.observe.trace_context import TraceIds
        from splitserve.orchestrator.router.agents import AgentHub
        from splitserve.orchestrator.router.api import Api
        from splitserve.orchestrator.router.app import limits_of
        from splitserve.orchestrator.router.core_driver import CoreDriver
        from splitserve.orchestrator.router.event_stream import EventStreams
        from splitserve.orchestrator.router.incidents import Incidents
        from splitserve.orchestrator.router.metrics import RouterMetrics
        from splitserve.orchestrator.router.recordings import Recordings
        from splitserve.orchestrator.router.request_log import RequestLog
        from splitserve.orchestrator.router.scrapes import Scrapes
        from splitserve.orchestrator.router.tenants import Tenants

        self._events = ev
        config = ClusterConfig.model_validate(
            {
                "engine": "mock",
                "model": {"path": MODEL},
                "policy": {"prefix_routing": prefix_routing},
            }
        )
        core, secret = RouterCore(limits_of(config)), bytes(32)
        incidents = Incidents()
        agents = AgentHub(secret, incidents)
        metrics = RouterMetrics(core)
        trace_ids = None if sample_ratio is None else TraceIds(sample_ratio, random.Random(1))
        process: Any = NoProcess()
        spans = None if sample_ratio is None else process
        self._log = request_log = RequestLog(log, 1_024, spans, process)
        request_log.on_final.append(metrics.account_for)
        events = EventStreams(dict, request_log, incidents)

        def on_end(timeline: Any, tally: Any) -> None:
            metrics.observe(timeline)
            request_log.add(timeline, tally, agents.facts_of(timeline))

        engines: Any = NoEngines()
        self._driver = CoreDriver(core, engines, agents, secret, on_end, incidents)
        agents.driver = self._driver
        tenants = Tenants({}, secret)
        self._api = Api(
            self._driver,
            tenants,
            metrics,
            request_log,
            agents.transfers,
            MODEL,
            frozenset(),
            None,
            Recordings(),
            dict,
            incidents,
            events,
            Scrapes(metrics, None),
            trace_ids=trace_ids,
        )
        self._states = []
        for name in NODES:
            role = name.partition("-")[0]
            described = NodeDescription(
                node=name,
                pool=role,
                incarnation=name,
                engine_url="http://127.0.0.1:1",
                engine_api_key="k",
                control_addresses=("tcp://127.0.0.1:2",),
                model=MODEL,
                max_model_len=32_768,
                block_tokens=16,
                total_blocks=BLOCKS,
                tensor_parallel=1,
                transport="tcp",
                fingerprint={},
                reports_prefixes=True,
            )
            state = NodeState(node=name, incarnation=name, phase="ready", free_blocks=BLOCKS)
            source = random.Random(name)
            held = tuple((source.randbytes(8), 100) for _ in range(HELD_MARKS))
            self._driver.tell(ev.NodeJoined(described, role))
            self._states.append(state)
            self._driver.tell(ev.NodeReported(state))
            self._driver.tell(ev.NodePrefixesReported(name, name, True, held, ()))

    def serve(self, row: Row, requests: int) -> float:
        """Microseconds of CPU time of one request, from its body to its end; requests that are not
        split raise ``ValueError``.
        """
        from splitserve.orchestrator.router.http_request import HttpRequest

        headers = [(b"content-type", b"application/json")]
        request = HttpRequest("POST", "/v1/completions", headers, row.body(), True, True)
        ev, tell = self._events, self._driver.tell
        for state in self._states:  # Nobody has fallen silent
            tell(ev.NodeReported(state))
        start_ns = time.thread_time_ns()
        for _ in range(requests):
            connection = NoConnection()
            self._api.handle(request, connection)  # type: ignore[arg-type]
            if len(self._driver.exchanges) != 1:
                raise ValueError("the request was not placed")
            own_id = connection.listener.id
            tell(ev.PrefillAnswered(own_id, 1, 200))
            tell(ev.FirstDataArrived(own_id, 1))
            tell(ev.DecodeEnded(own_id, 1))
        self._log.flush()
        took_ns = time.thread_time_ns() - start_ns
        if self._driver.exchanges:
            raise ValueError("a request has not ended")
        return took_ns / requests / 1e3

    def close(self) -> None:
        """No timer fires any more."""
        self._driver.close()

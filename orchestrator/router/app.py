"""Puts a router together and runs it: core, engine client, agents, server; from its start to a
bounded stop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import IO, TYPE_CHECKING

from aiohttp import web

from splitserve.orchestrator.config.nodes import POOLS, bracketed, scheme_of
from splitserve.orchestrator.config.tls import ServerTls, client_context
from splitserve.orchestrator.core.breaker import BreakerLimits
from splitserve.orchestrator.core.events import CacheLost, RouterDraining, RouterStopping
from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.core.router_core import RouterCore
from splitserve.orchestrator.observe.trace_context import TraceIds
from splitserve.orchestrator.router.agents import AgentHub
from splitserve.orchestrator.router.api import AGENTS_PATH, Api
from splitserve.orchestrator.router.cache_api import CacheApi
from splitserve.orchestrator.router.cache_glance import CacheGlance
from splitserve.orchestrator.router.cache_watch import CacheWatch
from splitserve.orchestrator.router.core_driver import CoreDriver
from splitserve.orchestrator.router.endpoints import CHAT, COMPLETIONS, FORWARDED_NAMES
from splitserve.orchestrator.router.engine_client import EngineClient
from splitserve.orchestrator.router.event_stream import EventStreams
from splitserve.orchestrator.router.http_server import HttpServer
from splitserve.orchestrator.router.incidents import Incidents
from splitserve.orchestrator.router.metrics import RouterMetrics
from splitserve.orchestrator.router.probes import PROBE
from splitserve.orchestrator.router.record_pipe import RecordPipe, log_pipe, span_pipe
from splitserve.orchestrator.router.recordings import Recordings
from splitserve.orchestrator.router.request_log import RequestLog
from splitserve.orchestrator.router.scrapes import Scrapes
from splitserve.orchestrator.router.status import snapshot_of
from splitserve.orchestrator.router.tenants import Tenants

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.core.effects import Timeline
    from splitserve.orchestrator.core.events import Event
    from splitserve.orchestrator.router.autotune import Autotune
    from splitserve.orchestrator.router.token_counts import Tally

_log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 2.0
"""Time that the last bytes of ended answers get to leave."""


_PARSER_FLAGS = {
    "reasoning_parser",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "reasoning_config",
}


class CannotListenError(Exception):
    """The address of the router cannot be had; the message says which and why."""


@dataclass
class Router:
    """A running router. Made by ``start``; ``stop`` ends it."""

    core: RouterCore
    driver: CoreDriver
    agents: AgentHub
    client: EngineClient
    log: RequestLog
    port: int
    recordings: Recordings
    incidents: Incidents
    events: EventStreams
    api: Api
    _server: HttpServer
    _websockets: web.Server
    _watch: CacheWatch | None = None
    _cache: CacheApi | None = None
    _glance: CacheGlance | None = None
    _autotune: Autotune | None = None
    _spans: RecordPipe | None = None
    _scrapes: Scrapes | None = None
    _log_writer: RecordPipe | None = None

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing more and let what runs finish, for at most ``timeout_s``."""
        self.driver.tell(RouterDraining())
        await self.driver.wait_until_idle(timeout_s)

    async def stop(self) -> None:
        """End every request with an error, close every connection; takes a few seconds at most."""
        if self._watch is not None:
            self._watch.stop()
        self.driver.tell(RouterStopping())
        if self._cache is not None:
            self._cache.close()
        if self._scrapes is not None:
            self._scrapes.close()
        if self._glance is not None:
            self._glance.close()
        if self._autotune is not None:
            self._autotune.stop()
        self.recordings.close()
        self.events.close()
        await self._server.close(FLUSH_TIMEOUT_S)
        self.agents.close()
        await self._websockets.shutdown(FLUSH_TIMEOUT_S)
        self.driver.close()
        self.client.close()
        self.log.flush()
        pipes = [pipe for pipe in (self._spans, self._log_writer) if pipe is not None]
        await asyncio.gather(*(pipe.stop() for pipe in pipes))


async def start(
    config: ClusterConfig,
    secret: bytes,
    tenant_by_key: Mapping[str, str],
    log_stream: IO[bytes] | None = None,
    index: int = 0,
    *,
    writes_log_apart: bool = False,
) -> Router:
    """Listen as the configuration says, as the router ``index`` of the cluster.
    ``writes_log_apart``: a process of its own writes to ``log_stream``, which has a descriptor.
    Raises ``CannotListenError`` when the port is taken.
    """
    core = RouterCore(limits_of(config))
    incidents = Incidents()
    agents = AgentHub(secret, incidents, scheme=scheme_of(config))
    ttft_ms = config.policy.autotune.ttft_ms
    metrics = RouterMetrics(
        core, deaths=agents.deaths, ttft_target_s=None if ttft_ms is None else ttft_ms / 1000
    )
    tracing = config.observability.tracing
    trace_ids = spans = None
    if tracing is not None:
        trace_ids = TraceIds(tracing.sample_ratio, Random())
        spans = span_pipe(tracing, config.router.port, config.model.name)
        metrics.count_traces(spans)
    log_writer = log_pipe(log_stream) if log_stream is not None and writes_log_apart else None
    log = RequestLog(log_stream, config.observability.timeline_requests, spans, log_writer)
    log.on_final.append(metrics.account_for)
    tls = config.security.tls
    client = EngineClient(
        connect_timeout_s=config.router.connect_timeout_s, tls=client_context(tls)
    )

    recordings = Recordings()

    def on_end(timeline: Timeline, tally: Tally) -> None:
        metrics.observe(timeline)
        log.add(timeline, tally, agents.facts_of(timeline))
        if timeline.endpoint in FORWARDED_NAMES:
            return
        if recordings.are_on and timeline.endpoint != PROBE:
            recordings.ended(timeline, tally)
        if autotune is not None:
            autotune.ended(timeline, tally)

    driver = CoreDriver(core, client, agents, secret, on_end, incidents)
    core.peers.index = index
    autotune = _autotune_of(config, driver)
    agents.driver = driver
    tenants = Tenants(tenant_by_key, secret)
    continuable = continuable_endpoints(config)
    cache = CacheApi(config.cache, driver, tenants) if config.cache is not None else None
    glance = CacheGlance(cache.stat) if cache is not None else None
    scrapes = Scrapes(metrics, config.cache.socket_path if config.cache is not None else None)
    if cache is not None:
        metrics.show_cache()
    snapshot = partial(snapshot_of, core, agents, autotune, glance)
    events = EventStreams(snapshot, log, incidents)
    api = Api(
        driver,
        tenants,
        metrics,
        log,
        agents.transfers,
        config.model.name,
        continuable,
        cache,
        recordings,
        snapshot,
        incidents,
        events,
        scrapes,
        config.decode.engine_args.adapters,
        scheme_of(config),
        trace_ids,
        no_prompt_logprobs(config),
    )
    websockets = web.Server(agents.serve, access_log=None)
    server = HttpServer(
        api.handle, config.router.max_body_bytes, api.admit, websockets, AGENTS_PATH
    )
    try:
        port = await server.listen(
            config.router.host, config.router.port, ServerTls(tls) if tls is not None else None
        )
    except OSError as error:
        address = f"{bracketed(config.router.host)}:{config.router.port}"
        raise CannotListenError(f"cannot listen on {address} (router.port): {error}") from error
    address = f"{bracketed(config.router.host)}:{port}"
    _log.info("listening on %s://%s", scheme_of(config), address)
    incidents.note("router_started", "", f"the router listens on {address}")
    watch = None
    if config.cache is not None:
        assert config.cache.socket_path is not None, "the paths are filled in by `up`"
        path = Path(config.cache.socket_path)

        def heard(event: Event) -> None:
            if isinstance(event, CacheLost):
                incidents.note("cache_lost", "", f"the cache server of {event.host} is gone")
            driver.tell(event)

        watch = CacheWatch(path, socket.gethostname(), heard)
        watch.start()
    if autotune is not None:
        autotune.start()
    for pipe in (spans, log_writer):
        if pipe is not None:
            pipe.start()
    return Router(
        core,
        driver,
        agents,
        client,
        log,
        port,
        recordings,
        incidents,
        events,
        api,
        server,
        websockets,
        watch,
        cache,
        glance,
        autotune,
        spans,
        scrapes,
        log_writer,
    )


def _autotune_of(config: ClusterConfig, driver: CoreDriver) -> Autotune | None:
    if config.policy.autotune.mode == "off":
        return None
    # It brings numpy, which a router needs for nothing else
    from splitserve.orchestrator.router.autotune import autotune_of

    return autotune_of(config, driver)


def continuable_endpoints(config: ClusterConfig) -> frozenset[str]:
    """Endpoints whose streams another engine may go on with. Not chat when the engines parse
    answers (tools, reasoning): a parser would have to have seen the answer's beginning.
    """
    flags = {key.replace("-", "_") for key in config.decode.engine_args.passed_on}
    return frozenset({COMPLETIONS} if flags & _PARSER_FLAGS else {COMPLETIONS, CHAT})


def no_prompt_logprobs(config: ClusterConfig) -> str:
    """Why a request must not ask for the prompt's logprobs, empty when it may: vLLM 0.32 looks
    every position of the prompt up as if it were one of the answer (``PunicaWrapperCPU``'s
    ``add_lora_logits``), and ends.
    """
    if config.engine_of("decode") != "vllm" or config.decode.gpus is not None:
        return ""
    flags = {key.replace("-", "_"): on for key, on in config.decode.engine_args.passed_on.items()}
    if not flags.get("enable_lora"):
        return ""
    return (
        "logprobs of the prompt (prompt_logprobs, or echo with logprobs) would end an engine that "
        "runs on CPU with enable_lora; ask without them, or serve without adapters"
    )


def limits_of(config: ClusterConfig) -> CoreLimits:
    """The core's bounds as the cluster YAML sets them."""
    router, policy = config.router, config.policy
    breaker = policy.breaker
    return CoreLimits(
        queue_limit_requests=router.queue_limit_requests,
        queue_timeout_s=router.queue_timeout_s,
        first_token_deadline_s=router.first_token_deadline_s,
        request_deadline_s=router.request_deadline_s,
        node_silence_limit_s=router.node_silence_limit_s,
        node_return_limit_s=config.supervision.stop_timeout_s
        + max(config.pool(pool).startup_timeout_s for pool in POOLS),
        lease_s=config.prefill.transfer.lease_s,
        max_attempts=policy.max_attempts,
        placement=PlacementLimits(
            prefill_ahead_requests=router.prefill_ahead_requests,
            prefill_batch_tokens=router.prefill_batch_tokens,
            min_uncached_tokens=policy.conditional.min_uncached_tokens,
            own_prompt_limit_tokens=policy.own_prompt_limit_tokens,
            prefix_routing=policy.prefix_routing,
        ),
        breaker=BreakerLimits(
            failures=breaker.failures,
            window_s=breaker.window_s,
            open_s=breaker.open_s,
            open_limit_s=breaker.open_limit_s,
        ),
        tenant_weights={key.tenant: key.weight for key in config.security.api_keys},
    )


async def run(
    config: ClusterConfig,
    secret: bytes,
    tenant_by_key: Mapping[str, str],
    index: int = 0,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and stop; a second signal ends the drain."""
    wants_log = config.observability.log_level in ("debug", "info")
    log_stream = sys.stdout.buffer if wants_log else None
    router = await start(config, secret, tenant_by_key, log_stream, index, writes_log_apart=True)
    signals: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, None)
    await signals.get()
    _log.info("stopping")
    drain = asyncio.ensure_future(router.drain(config.supervision.drain_timeout_s))
    again = asyncio.ensure_future(signals.get())
    await asyncio.wait((drain, again), return_when=asyncio.FIRST_COMPLETED)
    drain.cancel()
    again.cancel()
    await router.stop()

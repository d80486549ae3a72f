"""The process beside one engine: starts it, watches it, reports it to the routers, obeys them,
restarts it.

Each start of the engine is a *life* with an incarnation id of its own. A life ends when every
process of the engine is proven gone; only then is ``EngineDied`` sent and only then can the next
life begin. A node whose first engine never became ready ends (its configuration is wrong, and
trying again would hide it); after that an engine that dies is started again, with a growing delay
and a bound.

The agent is not in the data path: when it dies its guard ends the engine, and whoever started the
agent starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING

from msgspec import structs

from splitserve.orchestrator.agent.adapters import loaded_adapters
from splitserve.orchestrator.agent.description import describe
from splitserve.orchestrator.agent.engine_http import EngineHttp
from splitserve.orchestrator.agent.engine_log import EngineLog, likely_cause
from splitserve.orchestrator.agent.engine_process import EngineProcess, engine_environment
from splitserve.orchestrator.agent.health import Health
from splitserve.orchestrator.agent.last_life import LastLife
from splitserve.orchestrator.agent.life import Life
from splitserve.orchestrator.agent.messages import (
    AgentHello,
    Dismiss,
    Drain,
    EndEngine,
    EngineDied,
    LoadingProgress,
    NodeState,
    RefuseNode,
    SetRole,
    TellLoad,
    ToAgent,
    Welcome,
)
from splitserve.orchestrator.agent.order_relay import OrderRelay
from splitserve.orchestrator.agent.prefix_reports import PrefixReports
from splitserve.orchestrator.agent.readiness import (
    ENDPOINT_ERRORS,
    Endpoint,
    WrongEngineError,
    answer_of,
    wait_until_ready,
    warm_up,
)
from splitserve.orchestrator.agent.report_task import report_task
from splitserve.orchestrator.agent.restart_budget import RestartBudget
from splitserve.orchestrator.agent.routers import Routers, SeenRouter
from splitserve.orchestrator.agent.status_file import (
    NodeStatus,
    last_role_order,
    with_life,
    write_status,
)
from splitserve.orchestrator.agent.transfer_reports import TransferReports
from splitserve.orchestrator.config.flips import flip_obstacle
from splitserve.orchestrator.engines.command import engine_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from splitserve.orchestrator.config import ClusterConfig, NodeConfig
    from splitserve.orchestrator.observe.transfer_spans import TransferSpans

_log = logging.getLogger(__name__)

STATE_INTERVAL_S = 0.5
_FLUSH_S = 1.0

EXIT_STOPPED = 0
"""Asked to stop, or drained."""
EXIT_FAULT = 1
"""The agent itself failed; its log says how."""
EXIT_ENGINE_FAILED = 3
"""The engine never became ready, or died too often: starting the agent again would not help."""


class Agent:
    """Runs one node until it is stopped, drained, or its engine has failed for good."""

    def __init__(
        self,
        config: ClusterConfig,
        node: NodeConfig,
        *,
        model: str,
        secret: bytes,
        router_urls: Sequence[str],
        run_dir: Path,
        log_dir: Path,
        connect_endpoint: Callable[[str, bytes], Endpoint],
        spans: TransferSpans | None = None,
    ) -> None:
        self.node = node
        role, self.role_epoch = last_role_order(run_dir, node.name)
        self.role = role or node.pool
        self.phase = "loading"
        self._config = config
        self._flip_obstacle = flip_obstacle(config)
        self._model = model
        self._secret = secret
        self._run_dir = run_dir
        self._last_life = LastLife(run_dir, node.name)
        self._secret_path = run_dir / f"{node.name}.secret"
        self._log_path = log_dir / f"{node.name}.log"
        self._connect_endpoint = connect_endpoint
        self._routers = Routers(router_urls, secret, self._on_message, tls=config.security.tls)
        self._budget = RestartBudget.of(config.supervision)
        self._restarts = 0
        self._has_served = False
        self._life: Life | None = None
        self._can_write_status = True
        self._died: EngineDied | None = None
        self._stop = asyncio.Event()
        self._exit_status = EXIT_STOPPED
        self._is_ending = False
        self._leaving: asyncio.Future[None] | None = None
        self.relay = OrderRelay()
        """An engine that does not answer holds up only what waits here."""
        self._prefixes = PrefixReports(node.name, self._routers)
        self._transfers = TransferReports(node.name, self._routers, spans)
        self._spans = spans

    def stop(self) -> None:
        """Begin to stop. A node that serves is drained first, for at most ``drain_timeout_s`` and
        while there is a router for that; a second call stops it at once. Then its engine gets
        ``stop_timeout_s`` to end.
        """
        life = self._life
        serves = life is not None and life.endpoint is not None and self._routers.connected
        if life is None or not serves or self._leaving is not None:
            self._stop.set()
            return
        _log.info("asked to stop: %s gets no new work and serves what it has", self.node.name)
        if life.drain is None or life.drain.restarts:
            life.drain = Drain(incarnation=life.incarnation, restarts=False)
            self._set_phase("draining")
        self._leaving = asyncio.ensure_future(self._leave())

    def health(self) -> Health:
        """What a supervisor's probes are told."""
        has_started = self._has_served or (self._life is not None and self._life.was_ready)
        is_used = self._routers.any_uses(self._life)
        refused = "" if is_used else self._routers.refused
        return Health.of(has_started, self.phase, is_used, refused)

    async def _leave(self) -> None:
        """The drain has an end, and nobody is waited for who is gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.supervision.drain_timeout_s):
                await self._routers.lost()
        self._stop.set()

    async def run(self) -> int:
        """Returns an exit status when the node has ended; nothing of the engine lives then."""
        links = asyncio.create_task(self._routers.run())
        links.add_done_callback(self._on_links_ended)
        relay = asyncio.create_task(self.relay.run())
        try:
            if (missed := self._last_life.unreported()) is not None:
                self._has_served = True
                self._routers.died(missed)
                self._last_life.end()
            while True:
                life = await self._live()
                self._has_served |= life.was_ready
                if self._stop.is_set():
                    return self._stopped()
                if life.drain is not None and not life.drain.restarts:
                    self._set_phase("left")
                    return EXIT_STOPPED
                if life.is_dismissed:
                    continue
                delay = self._budget.take(time.monotonic()) if self._has_served else None
                if delay is None:
                    self._set_phase("failed")
                    return EXIT_ENGINE_FAILED
                _log.warning("engine of %s restarts in %.0f s", self.node.name, delay)
                self._restarts += 1
                await self._sleep(delay)
                if self._stop.is_set():
                    return self._stopped()
        finally:
            relay.cancel()
            self._secret_path.unlink(missing_ok=True)
            if self._leaving is not None:
                self._leaving.cancel()
            await self._end(links)

    def _stopped(self) -> int:
        """A node that somebody has stopped stays away until it is asked back, as after a drain."""
        if self._exit_status == EXIT_STOPPED:
            self._set_phase("left")
        return self._exit_status

    def _on_links_ended(self, links: asyncio.Task[None]) -> None:
        """Links run for ever; when one fails the node cannot be told anything, so it ends."""
        if self._is_ending:
            return
        cause = None if links.cancelled() else links.exception()
        _log.error("a link to a router failed", exc_info=cause)
        self._exit_status = EXIT_FAULT
        self._stop.set()

    async def _live(self) -> Life:
        """One life, until nothing of its engine is left."""
        life = self._start_engine()
        self._life = life
        self._set_phase("loading")
        watch = asyncio.create_task(self._watch(life))
        gone = asyncio.create_task(life.engine.gone())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((watch, gone, stop, life.end), return_when=asyncio.FIRST_COMPLETED)
        verdict = ""
        if life.end.done():
            verdict = f"a router ended it: {life.end.result()}"
        elif watch.done() and not watch.cancelled():
            verdict = self._verdict_of(watch)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        if life.end.done():
            await life.engine.kill()
        elif not gone.done():
            await life.engine.stop(self._config.supervision.stop_timeout_s)
        exit_status = await gone
        stop.cancel()
        self._bury(life, exit_status, verdict)
        return life

    def _verdict_of(self, watch: asyncio.Task[str]) -> str:
        """Why watching ended before the engine did."""
        error = watch.exception()
        if error is not None:
            _log.error("watching the engine failed", exc_info=error)
            return f"the agent could not watch its engine: {error}"
        return watch.result()

    def _start_engine(self) -> Life:
        incarnation = f"{self.node.name}-{secrets.token_hex(6)}"
        api_key = secrets.token_urlsafe(24)
        command = engine_command(self._config, self.node, self._model, incarnation)
        log = EngineLog(self._log_path, hide=(self._secret.hex(), api_key))
        log.note(f"start of {incarnation}: {' '.join(command.argv)}")
        self._last_life.begin(incarnation)
        environ = engine_environment(
            self._config, self.node.name, self._secret_path, self._secret, api_key
        )
        engine = EngineProcess.start(command, environ, self.node.cpus, log, self._on_stage)
        return Life(
            self.node.name,
            incarnation,
            api_key,
            time.monotonic(),
            engine,
            warm_up=command.warm_up,
        )

    async def _watch(self, life: Life) -> str:
        """Wait for readiness, then report state twice a second. Returns why the engine must be
        ended; "" when the routers have dismissed it.
        """
        limit = self.node.settings.startup_timeout_s
        progress = asyncio.create_task(self._report_progress())
        try:
            async with asyncio.timeout(limit):
                tls = self._config.security.tls
                engine = EngineHttp(self.node.engine_url, life.api_key, tls)
                life.endpoint, description = await wait_until_ready(
                    engine,
                    lambda: self._connect_endpoint(self.node.endpoint_address, self._secret),
                    life.incarnation,
                )
                if life.warm_up is not None:
                    await warm_up(engine, life.warm_up)
                adapters = await loaded_adapters(engine)
        except TimeoutError:
            return f"not ready within startup_timeout_s = {limit:.0f} s"
        except WrongEngineError as error:
            return str(error)
        finally:
            progress.cancel()
        life.was_ready = True
        life.engine.log.begin_serving()
        described = describe(
            self._config, self.node, life, description, self._flip_obstacle, adapters
        )
        hello = AgentHello(description=described, role=self.role, role_epoch=self.role_epoch)
        self._routers.hello(hello, life)
        self._set_phase("ready")
        reports = []
        if description.reports_prefixes:
            reports.append(report_task(self._prefixes.run(life.endpoint, life.incarnation)))
        if description.reports_transfers:
            reports.append(report_task(self._transfers.run(life.endpoint, life.incarnation)))
        try:
            return await self._report_states(life, life.endpoint)
        finally:
            for report in reports:
                report.cancel()
            endpoint, life.endpoint = life.endpoint, None
            endpoint.close()

    async def _report_progress(self) -> None:
        while True:
            self._on_stage()
            await asyncio.sleep(STATE_INTERVAL_S)

    async def _report_states(self, life: Life, endpoint: Endpoint) -> str:
        silence_limit = self._config.supervision.engine_silence_limit_s
        life.last_answer = time.monotonic()
        while True:
            # What is asked after it says what the routers' last leg has left
            dismissal = self._routers.dismissal(life)
            try:
                status = await answer_of(endpoint.status())
            except ENDPOINT_ERRORS:
                if time.monotonic() - life.last_answer > silence_limit:
                    return (
                        "its endpoint was silent for engine_silence_limit_s = "
                        f"{silence_limit:.0f} s"
                    )
            else:
                life.last_answer, life.latest = time.monotonic(), status
                self._report()
                life.owed_nothing = dismissal is not None and status.owes_nothing
            if dismissal is not None and (dismissal.at_once or life.owed_nothing):
                life.is_dismissed = True
                return ""
            await asyncio.sleep(STATE_INTERVAL_S)

    def _bury(self, life: Life, exit_status: int, verdict: str) -> None:
        """Nothing of this life is left: say so."""
        self._life = None
        self._routers.hello(None, None)
        self._last_life.end()
        lines = life.engine.log.story()
        cause = verdict or likely_cause(lines, exit_status)
        if life.is_dismissed:
            cause = "drained" if life.owed_nothing else "ended by an operator before it was drained"
        elif self._stop.is_set() and not verdict:
            cause = "stopped"
        self._died = EngineDied(
            node=self.node.name,
            incarnation=life.incarnation,
            exit_status=exit_status,
            likely_cause=cause,
            last_lines=lines,
            was_ordered=life.is_dismissed,
            owed_nothing=life.owed_nothing,
        )
        self._routers.died(self._died)
        self._set_phase("dead", life)

    async def _on_message(self, router: SeenRouter, message: ToAgent) -> None:
        """Obey that router."""
        life = self._life
        match message:
            case Welcome():
                self._routers.heard(router, message, life)
                self._prefixes.welcome()
            case RefuseNode(reason=reason):
                self._routers.heard(router, message, life)
                _log.error("a router will not use %s: %s", self.node.name, reason)
            case TellLoad():
                self._routers.load(router, message, life)
            case SetRole():
                self._take_role(message)
            case Drain() if life is not None and life.incarnation == message.incarnation:
                life.drain = message
                self._set_phase("draining")
            case Dismiss() if life is not None and life.incarnation == message.incarnation:
                life.dismissals[router.number] = message
            case EndEngine(incarnation=incarnation, reason=reason):
                if life is not None and life.incarnation == incarnation and not life.end.done():
                    _log.warning("killing the engine %s: %s", incarnation, reason)
                    life.end.set_result(reason)
            case _ if life is not None and life.endpoint is not None:
                self.relay.put(life, message)
            case _:
                _log.debug("nothing to do for %r: no engine is ready", message)

    def _take_role(self, order: SetRole) -> None:
        """The first order of a number is obeyed; all routers are told what the role is now, the one
        whose order came too late included.
        """
        if order.epoch > self.role_epoch:
            self.role, self.role_epoch = order.role, order.epoch
            self._routers.set_role(order.role, order.epoch)
        elif order.role != self.role:
            _log.info(
                "order %d to take the role %s came too late: %s is a %s node by order %d",
                order.epoch,
                order.role,
                self.node.name,
                self.role,
                self.role_epoch,
            )
        self._report()

    def _set_phase(self, phase: str, life: Life | None = None) -> None:
        self.phase = phase
        self._report(life)

    def _on_stage(self) -> None:
        life = self._life
        if life is None or life.was_ready:
            return
        elapsed = time.monotonic() - life.started
        self._routers.fresh(
            LoadingProgress(node=self.node.name, stage=life.engine.log.stage, elapsed_s=elapsed)
        )
        self._write_status(life)

    def _report(self, life: Life | None = None) -> None:
        """Send and write the state of ``life`` (default: the one that runs)."""
        life = life or self._life
        self._write_status(life)
        if life is None:
            return
        told = structs.asdict(life.latest) if life.latest is not None else {}
        if told and self._spans is not None:
            counts = structs.asdict(self._spans.counts)
            told["counters"] |= {f"traces_{name}": float(n) for name, n in counts.items()}
        self._routers.fresh(NodeState(
            node=self.node.name,
            incarnation=life.incarnation,
            phase=self.phase,
            role=self.role,
            role_epoch=self.role_epoch,
            restarts=life.drain is not None and life.drain.restarts,
            **told,
        ))  # fmt: skip

    def _write_status(self, life: Life | None) -> None:
        """For ``status``; a full disk must not end a healthy engine."""
        told = NodeStatus(
            node=self.node.name,
            phase=self.phase,
            role=self.role,
            role_epoch=self.role_epoch,
            pool=self.node.pool,
            flip_obstacle=self._flip_obstacle,
            agent_pid=os.getpid(),
            engine_url=self.node.engine_url,
            log_path=str(self._log_path),
            restarts=self._restarts,
            router_connected=self._routers.all_know(life),
            refused=self._routers.refused,
        )
        died = self._died if self.phase in ("dead", "failed") else None
        try:
            write_status(self._run_dir, with_life(told, life, died))
        except OSError as error:
            if self._can_write_status:
                _log.error("cannot write the status of %s: %s", self.node.name, error)
            self._can_write_status = False
        else:
            self._can_write_status = True

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    async def _end(self, links: asyncio.Task[None]) -> None:
        """Give the last reports a moment to leave, then close the links."""
        self._is_ending = True
        await self._routers.flush(_FLUSH_S)
        links.cancel()
        await asyncio.gather(links, return_exceptions=True)

"""The launcher of ``up`` for a Ray cluster: it brings up what is missing of the cluster, watches
it, and takes it down. All that it knows can be asked for again: another ``up`` may take its place.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.config import (
    ConfigError,
    dump_resolved,
    nodes,
    router_urls,
    shared_secret,
)
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.config.tls import client_context
from splitserve.orchestrator.launch.base import ClusterStatus, StartError
from splitserve.orchestrator.launch.child_logs import shortened
from splitserve.orchestrator.launch.children import cancel
from splitserve.orchestrator.launch.ray.bring_up import Wanted, bring_up
from splitserve.orchestrator.launch.ray.host_process import status_of
from splitserve.orchestrator.launch.ray.keeper import CACHE_PREFIX
from splitserve.orchestrator.launch.ray.order import ROUTER, hosted, is_ours, router_names, sized
from splitserve.orchestrator.launch.ray.ray_cluster import (
    SilentActorError,
    connect,
    take_back_signals,
)
from splitserve.orchestrator.launch.ray.take_down import take_down
from splitserve.orchestrator.launch.router_health import router_health

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.files import ClusterFiles
    from splitserve.orchestrator.launch.ray.bring_up import Brought
    from splitserve.orchestrator.launch.ray.ray_cluster import RayCluster

T = TypeVar("T")
Report = dict[str, Any]

_POLL_S = 1.0
_ASK_LIMIT_S = 2.0
_AT_A_TIME = 32
_HOST_LOSS_LIMIT_S = 40.0
"""An actor's death is known before that of its host, which takes Ray 15 s by default."""


class RayLauncher:
    """A cluster on Ray. ``say`` gets one line for each thing a person should know."""

    def __init__(
        self,
        config: ClusterConfig,
        files: ClusterFiles,
        *,
        run: str,
        secret: bytes,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.files = files
        self.run = run
        self.urls: tuple[str, ...] = ()
        """Of the routers, once it is known where they run."""
        self.is_adopted = False
        self.logs = f"on each host, in {logs_of(config)}"
        self._secret = secret
        self._say = say
        self._tls = client_context(config.security.tls)
        self._given_up = threading.Event()
        self._hurried = threading.Event()
        self._cluster: RayCluster | None = None
        self._brought: Brought | None = None
        self._may_end = False
        """What is on the Ray cluster under this name is this launcher's to take down."""
        self._reports: dict[str, Report] = {}
        """What each actor said last; none of those that do not answer now."""
        self._router_gone_at: float | None = None
        """Since when there has been no actor of any router; monotonic."""
        self._router_hosts: dict[str, str] = {}
        """By router that has spoken: its host's id in Ray."""
        self._is_moving = False
        self._poll_task: asyncio.Task[None] | None = None
        self._noted: set[str] = set()
        self._edition = 0
        """Of the sizes in ``config``."""

    async def start(self) -> None:
        """See ``Launcher``. May be cancelled; what has been started then is there for ``stop``."""
        await self._in_thread(self._connect)
        take_back_signals()
        self._took(await self._in_thread(self._bring_up))
        self._poll_task = asyncio.create_task(self._poll())

    async def status(self) -> ClusterStatus:
        """See ``Launcher``."""
        found = {}
        for node in nodes(self.config):
            report = self._reports.get(node.name)
            status = status_of(report) if report is not None else None
            if status is not None and self._brought is not None and self._brought.lost_routers:
                # It says whether it is connected to every router, the lost one too
                status = msgspec.structs.replace(status, router_connected=True)
            found[node.name] = status
        names = self._router_names
        states = dict(
            zip(names, await asyncio.gather(*map(self._router_state, names)), strict=True)
        )
        return ClusterStatus(
            router=states.pop(ROUTER),
            more_routers=states,
            nodes=found,
            cache=self._cache_state(),
        )

    def failure(self) -> StartError | None:
        """See ``Launcher``."""
        if (lost := self._lost()) is not None:
            return lost
        for name, report in self._reports.items():
            if report["state"] == "failed":
                return _failure_of(name, report)
            status = status_of(report)
            if status is not None and status.refused:
                return StartError(f"the router will not use {name}: {status.refused}")
        return None

    def broken(self) -> StartError | None:
        """See ``Launcher``."""
        if (lost := self._lost()) is not None:
            return lost
        routers = [self._reports.get(name) for name in self._router_names]
        failed = [r for r in routers if r is not None and r["state"] == "failed"]
        if len(failed) == len(routers):
            return _failure_of(ROUTER, failed[0])
        if self._router_is_gone() and not self._is_moving:
            return StartError(
                "the router's actor has ended: Ray has started it again "
                f"{self.config.supervision.restart_limit} times (supervision.restart_limit)"
            )
        for role in POOLS:
            names = [node.name for node in nodes(self.config) if self._role_of(node.name) == role]
            reports = [self._reports.get(name) for name in names]
            failed = [r for r in reports if r is not None and r["state"] == "failed"]
            gone = [r for r in reports if r is not None and r["state"] in ("failed", "left")]
            if failed and len(gone) == len(names):
                return _failure_of(f"the last {role} node", failed[-1])
        return None

    async def stop(self, drain_s: float) -> None:
        """See ``Launcher``. What another ``up`` has started is left alone unless it was adopted."""
        await cancel(self._poll_task)
        cluster = self._cluster
        if cluster is None:
            return
        try:
            if self._may_end:
                await asyncio.to_thread(
                    take_down,
                    cluster,
                    self.config,
                    drain_s=drain_s,
                    say=self._say,
                    is_hurried=self._hurried.is_set,
                )
        finally:
            await asyncio.to_thread(cluster.close)

    async def leave(self) -> None:
        """Not watched any more; everything runs on."""
        await cancel(self._poll_task)
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)

    def hurry(self) -> None:
        """A stop under way no longer waits for anybody."""
        self._hurried.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; when this is cancelled it has ended all the same."""
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._given_up.set()
            await asyncio.gather(task, return_exceptions=True)
            raise

    def _connect(self) -> None:
        self._cluster = connect(self.config)

    def _bring_up(self) -> Brought:
        assert self._cluster is not None
        try:
            shared_secret(self.config, os.environ)
            is_given = True
        except ConfigError:
            is_given = False
        if self._brought is None:
            self._may_end = not any(is_ours(name) for name in self._cluster.names())
        wanted = Wanted(
            self.config,
            self.run,
            self._secret,
            is_given,
            os.environ,
            self._say,
            self._given_up.is_set,
        )
        return bring_up(self._cluster, wanted)

    def _took(self, brought: Brought) -> None:
        """The cluster is this one's, and the commands on this machine know it."""
        self._brought = brought
        self._may_end = True
        self.is_adopted = brought.is_adopted
        self.run, self._secret = brought.order.run, brought.secret
        self.config = sized(self.config, brought.order.sizes)
        self._edition = brought.order.edition
        self.urls = router_urls(hosted(brought.order, brought.order.router_hosts[0]))
        self.files.begin_run(dump_resolved(self.config), operator_token(self._secret))

    def _router_is_gone(self) -> bool:
        """For longer than Ray may take to notice that a host is lost."""
        gone_at = self._router_gone_at
        return gone_at is not None and time.monotonic() > gone_at + _HOST_LOSS_LIMIT_S

    def _lost(self) -> StartError | None:
        """Whether the Ray cluster itself has gone."""
        if self._poll_task is None or not self._poll_task.done() or self._poll_task.cancelled():
            return None
        return StartError(f"the Ray cluster cannot be asked: {self._poll_task.exception()!r}")

    async def _poll(self) -> None:
        """Keep what the actors say up to date."""
        assert self._cluster is not None
        cluster = self._cluster
        with ThreadPoolExecutor(_AT_A_TIME, "splitserve-ray-poll") as pool:
            loop = asyncio.get_running_loop()
            while True:
                names = [n for n in await loop.run_in_executor(pool, cluster.names) if is_ours(n)]
                asked = [loop.run_in_executor(pool, _report, cluster, name) for name in names]
                found = dict(zip(names, await asyncio.gather(*asked), strict=True))
                self._reports = {name: r for name, r in found.items() if r is not None}
                for name in self._router_names:
                    if name in self._reports:
                        self._router_hosts[name] = self._reports[name]["host_id"]
                if any(name in names for name in self._router_names):
                    self._router_gone_at = None
                else:
                    self._router_gone_at = self._router_gone_at or time.monotonic()
                    await self._replace_routers(cluster)
                self._tell_notes()
                self._follow()
                await asyncio.sleep(_POLL_S)

    async def _replace_routers(self, cluster: RayCluster) -> None:
        """Routers all of whose hosts are lost start on others, and the nodes learn where."""
        hosts = {host.id for host in await asyncio.to_thread(cluster.hosts)}
        had = set(self._router_hosts.values())
        if not had or had & hosts:
            return
        if not self._is_moving:
            self._say("the router's host is lost: it starts on another one, and the nodes anew")
        self._is_moving = True
        try:
            self._took(await asyncio.to_thread(self._bring_up))
        except (ConfigError, StartError) as error:
            self._note(f"the router cannot be started yet: {error}")
            return
        self._is_moving = False
        self._say(f"the router is on {self.urls[0]} now")

    def _follow(self) -> None:
        """`splitserve scale`, wherever it was called, has changed the sizes."""
        if not self._reports:
            return
        latest = max(self._reports.values(), key=lambda report: int(report["edition"]))
        if latest["edition"] <= self._edition:
            return
        self._edition, self.config = latest["edition"], sized(self.config, latest["sizes"])
        self.files.write_resolved(dump_resolved(self.config))
        counts = " and ".join(f"{self.config.pool(pool).replicas} {pool}" for pool in POOLS)
        self._say(f"the cluster has {counts} nodes from now on")

    def _note(self, line: str) -> None:
        """Say it, once."""
        if line not in self._noted:
            self._noted.add(line)
            self._say(line)

    def _tell_notes(self) -> None:
        for report in self._reports.values():
            for note in report["notes"]:
                self._note(f"warning: on {report['host']} ({report['address']}): {note}")

    @property
    def _router_names(self) -> list[str]:
        return router_names(self.config.router.replicas)

    async def _router_state(self, name: str) -> str:
        report = self._reports.get(name)
        if report is not None and report["state"] in ("failed", "dead"):
            return str(report["state"])
        if self._brought is None:
            return "starting"
        if name in self._brought.lost_routers:
            return "lost"
        return await router_health(self.urls[self._router_names.index(name)], self._tls)

    def _cache_state(self) -> str:
        """The worst of all hosts that have nodes."""
        if self.config.cache is None:
            return ""
        caches = [r for name, r in self._reports.items() if name.startswith(CACHE_PREFIX)]
        for state in ("failed", "dead"):
            if any(report["state"] == state for report in caches):
                return state
        names = {node.name for node in nodes(self.config)}
        hosts = {report["host_id"] for name, report in self._reports.items() if name in names}
        ready = {report["host_id"] for report in caches if report.get("is_ready")}
        return "ready" if ready and hosts <= ready else "starting"

    def _role_of(self, name: str) -> str:
        """What the node does now."""
        report = self._reports.get(name)
        status = status_of(report) if report is not None else None
        return (status.role if status is not None else "") or name.rpartition("-")[0]


def logs_of(config: ClusterConfig) -> str:
    """Where the hosts have the logs, as far as it can be said for all of them."""
    default = f"~/.local/state/splitserve/_ray/{config.name}/splitserve/{config.name}/logs"
    return config.observability.log_dir or default


def _report(cluster: RayCluster, name: str) -> Report | None:
    try:
        found: Report = cluster.ask(name, "report", limit_s=_ASK_LIMIT_S)
    except SilentActorError:
        return None
    return found


def _failure_of(what: str, report: Report) -> StartError:
    where = f"on {report['host']} ({report['address']})"
    status = status_of(report)
    if status is not None and status.phase == "failed":
        return StartError(
            f"the engine of {what} failed {where}: {status.likely_cause} (exit status "
            f"{status.exit_status}); its log is {status.log_path}",
            shortened(status.last_lines),
        )
    return StartError(f"{what} failed {where}: {report['why']}", tuple(report.get("tail", ())))

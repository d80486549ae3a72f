"""All processes of a cluster on this machine, as children of ``up``.

The cache server starts first and ends last. When it dies the engines go on without it, and find it
again; when it stays down they compute everything. An agent that is killed takes its engine with it
(its guard sees to that).
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from splitserve.kv_transfer.cache.settings import CACHE_SECRET_ENV
from splitserve.kv_transfer.cache.socket_path import is_listening
from splitserve.kv_transfer.channel import SECRET_FILE_ENV
from splitserve.orchestrator.agent.agent import EXIT_ENGINE_FAILED, EXIT_STOPPED
from splitserve.orchestrator.agent.processes import (
    NODE_MARKER_ENV,
    RUN_MARKER_ENV,
    become_subreaper,
    kill_descendants,
)
from splitserve.orchestrator.agent.restart_budget import RestartBudget
from splitserve.orchestrator.agent.status_file import last_role, read_status, status_path
from splitserve.orchestrator.config import (
    SECRET_ENV,
    ConfigError,
    cache_secret,
    dump_resolved,
    nodes,
    router_urls,
    secret_variables,
)
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.config.tls import client_context
from splitserve.orchestrator.launch.base import ClusterStatus, StartError
from splitserve.orchestrator.launch.cache_settings import cache_settings
from splitserve.orchestrator.launch.child_logs import shortened, tail
from splitserve.orchestrator.launch.children import Child, Children, cancel, ending, sweep
from splitserve.orchestrator.launch.files import write_private
from splitserve.orchestrator.launch.ports import taken_ports
from splitserve.orchestrator.launch.router_health import router_health

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.config import CacheConfig, ClusterConfig
    from splitserve.orchestrator.launch.files import ClusterFiles

ROUTER = "router"
CACHE = "cache"
CACHE_PROGRAM = "splitserve.kv_transfer.cache"
ROUTER_EXIT_REFUSED = 2
"""The router cannot use the configuration or the secrets it was given."""
CACHE_EXIT_REFUSED = 2
"""The cache server cannot use its settings: a wrong one, or a store that is not there."""
_SWEEP_DEADLINE_S = 10.0
_STOP_MARGIN_S = 6.0
_CACHE_STOP_S = 10.0
"""For the cache server to write what waits for its lower tiers."""
_WISH_POLL_S = 0.25


class LocalLauncher:
    """The local cluster. ``say`` gets one line for each thing a person should know."""

    def __init__(
        self,
        config: ClusterConfig,
        files: ClusterFiles,
        *,
        model: str,
        run: str,
        secret: bytes,
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.files = files
        self.run = run
        self.urls = router_urls(config)
        self.logs = str(config.observability.log_dir)
        self.is_adopted = False
        self._tls = client_context(config.security.tls)
        self._model = model
        self._secret = secret
        self._say = say
        self._wish_task: asyncio.Task[None] | None = None
        self._log_dir = Path(config.observability.log_dir or files.log_dir)
        self._children = Children(run, say)
        self._cache: Child | None = None
        if config.cache is not None:
            self._cache = self._children.add(self._cache_child(config.cache))
        self._routers = [
            self._children.add(self._router_child(index)) for index in range(len(self.urls))
        ]
        self._agents = {
            node.name: self._children.add(self._agent_child(node.name)) for node in nodes(config)
        }

    async def start(self) -> None:
        """See ``Launcher``."""
        become_subreaper()
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self.files.secret_path, self._secret.hex().encode())
        if self.config.cache is not None:
            settings = cache_settings(self.config.cache, self._secret)
            write_private(self.files.cache_settings_path, msgspec.json.encode(settings))
        await self._children.start()
        self._wish_task = asyncio.create_task(self._grant_wishes())

    async def status(self) -> ClusterStatus:
        """See ``Launcher``."""
        found = {name: read_status(self.files.run_dir, name) for name in self._agents}
        cache = await asyncio.to_thread(self._cache_state)
        states = await asyncio.gather(
            *(self._router_state(*known) for known in zip(self._routers, self.urls, strict=True))
        )
        named = dict(zip((child.name for child in self._routers), states, strict=True))
        first = named.pop(ROUTER)
        return ClusterStatus(router=first, more_routers=named, nodes=found, cache=cache)

    def failure(self) -> StartError | None:
        """See ``Launcher``."""
        for router in self._routers:
            if router.state == "failed":
                return _failure_of_program(router)
        if self._cache is not None and self._cache.state == "failed":
            return _failure_of_program(self._cache)
        for name, child in self._agents.items():
            status = read_status(self.files.run_dir, name)
            if child.state == "failed":
                return self._failure_of_agent(child)
            if status is not None and status.refused:
                return StartError(f"the router will not use {name}: {status.refused}")
        return None

    def broken(self) -> StartError | None:
        """See ``Launcher``."""
        if all(router.state == "failed" for router in self._routers):
            return _failure_of_program(self._routers[0])
        roles = {
            node.name: last_role(self.files.run_dir, node.name) or node.pool
            for node in nodes(self.config)
        }
        for role in POOLS:
            agents = [child for name, child in self._agents.items() if roles[name] == role]
            failed = [child for child in agents if child.state == "failed"]
            if failed and all(child.state in ("failed", "left") for child in agents):
                return self._failure_of_agent(failed[-1])
        return None

    async def resize(self, config: ClusterConfig) -> None:
        """The cluster is that of ``config``, which differs from the one so far in the replicas of
        its pools and what each of them has: agents of new nodes have been started; nodes that it
        does not have, drained before, are gone with all their processes, and are no part of
        ``status``. What starts from now on, the router too, knows the new one. Raises
        ``ConfigError`` when it cannot be, and then nothing has changed.
        """
        names = [node.name for node in nodes(config)]
        new = [name for name in names if name not in self._agents]
        problems = taken_ports(config, new)
        if problems:
            raise ConfigError(problems)
        self.config = config
        self.files.write_resolved(dump_resolved(config))
        for name in [name for name in self._agents if name not in names]:
            child = self._agents.pop(name)
            await self._children.remove(child, self._agent_stop_s)
            self.files.forget(name)
            self._say(f"{name} is no part of the cluster any more")
        for name in new:
            self.files.forget(name)
            child = self._agents[name] = self._children.add(self._agent_child(name))
            self._say(f"{name} is started")
            if await self._children.spawn_again(child, 0.0):
                self._children.watch_over(child)

    @property
    def _agent_stop_s(self) -> float:
        return self.config.supervision.stop_timeout_s + _STOP_MARGIN_S

    async def stop(self, drain_s: float) -> None:
        """See ``Launcher``."""
        # Wishes first: one that is being granted makes another keeper
        await cancel(self._wish_task)
        await self._children.stop_watching()
        await self._children.end(self._routers, drain_s + _STOP_MARGIN_S if drain_s else 1.0)
        await self._children.end(self._agents.values(), self._agent_stop_s)
        if self._cache is not None:
            await self._children.end([self._cache], _CACHE_STOP_S)
        if not await asyncio.to_thread(kill_descendants, _SWEEP_DEADLINE_S):
            self._say("some processes do not end although killed; see `splitserve status`")
        await asyncio.to_thread(sweep, self.run)

    async def leave(self) -> None:
        """See ``Launcher``: they are children of this process."""
        raise StartError("the processes of a local cluster end with `up`")

    def hurry(self) -> None:
        """See ``Launcher``."""
        self._children.hurry()

    def _cache_child(self, cache: CacheConfig) -> Child:
        argv = [sys.executable, "-m", CACHE_PROGRAM, str(self.files.cache_settings_path)]
        child = self._child(CACHE, "the cache server", argv, self._log_dir / "cache.log")
        child.final_exits = frozenset({CACHE_EXIT_REFUSED})
        del child.env[SECRET_FILE_ENV]
        if cache.encrypt:
            child.env[CACHE_SECRET_ENV] = cache_secret(self.config, self._secret).hex()
        return child

    def _router_child(self, index: int) -> Child:
        argv = [sys.executable, "-m", "splitserve.orchestrator.router"]
        argv += ["--config", str(self.files.config_path), "--index", str(index)]
        name = f"{ROUTER}-{index}" if index else ROUTER
        title = f"router {index}" if len(self.urls) > 1 else "the router"
        child = self._child(name, title, argv, self._log_dir / f"{name}.log", has_keys=True)
        child.final_exits = frozenset({ROUTER_EXIT_REFUSED})
        return child

    def _agent_child(self, name: str) -> Child:
        argv = [sys.executable, "-m", "splitserve.orchestrator.agent", "--node", name]
        argv += ["--config", str(self.files.config_path), "--model", self._model]
        child = self._child(name, f"the agent of {name}", argv, self._log_dir / f"{name}.agent.log")
        child.final_exits = frozenset({EXIT_ENGINE_FAILED})
        child.leave_exit = EXIT_STOPPED
        return child

    def _child(
        self, name: str, title: str, argv: list[str], log_path: Path, *, has_keys: bool = False
    ) -> Child:
        """``has_keys``: it may know the clients' keys."""
        unknown = {SECRET_ENV} if has_keys else secret_variables(self.config)
        env = {
            **{key: value for key, value in os.environ.items() if key not in unknown},
            SECRET_FILE_ENV: str(self.files.secret_path),
            RUN_MARKER_ENV: self.run,
            NODE_MARKER_ENV: name,
        }
        return Child(name, title, argv, env, log_path, RestartBudget.of(self.config.supervision))

    async def _grant_wishes(self) -> None:
        """Start agents that have left or failed when an operator asks for it."""
        while True:
            for name, child in list(self._agents.items()):
                if child.state in ("left", "failed") and self.files.is_wished(name):
                    await self._bring_back(child)
            await asyncio.sleep(_WISH_POLL_S)

    async def _bring_back(self, child: Child) -> None:
        """Another agent of a node without one runs, with all its restarts before it; what the last
        one wrote is gone when the wish is.
        """
        status_path(self.files.run_dir, child.name).unlink(missing_ok=True)
        self.files.take_wish(child.name)
        self._say(f"{child.name} is started again")
        child.budget = RestartBudget.of(self.config.supervision)
        if await self._children.spawn_again(child, 0.0):
            self._children.watch_over(child)

    async def _router_state(self, router: Child, url: str) -> str:
        if router.state != "running":
            return router.state
        return await router_health(url, self._tls)

    def _cache_state(self) -> str:
        if self._cache is None or self._cache.state != "running":
            return self._cache.state if self._cache is not None else ""
        assert self.config.cache is not None
        assert self.config.cache.socket_path is not None
        return "ready" if is_listening(self.config.cache.socket_path) else "starting"

    def _failure_of_agent(self, child: Child) -> StartError:
        status = read_status(self.files.run_dir, child.name)
        if child.exit_status == EXIT_ENGINE_FAILED and status is not None:
            return StartError(
                f"the engine of {child.name} failed: {status.likely_cause} "
                f"(exit status {status.exit_status}); its log is {status.log_path}",
                shortened(status.last_lines),
            )
        return StartError(
            f"the agent of {child.name} failed ({ending(child.exit_status)}); "
            f"its log is {child.log_path}",
            tail(child.log_path),
        )


def _failure_of_program(child: Child) -> StartError:
    return StartError(
        f"{child.title} does not start ({ending(child.exit_status)}); its log is {child.log_path}",
        tail(child.log_path),
    )

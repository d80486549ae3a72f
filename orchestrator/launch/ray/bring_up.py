"""What of a cluster is not there yet is brought up on a Ray cluster; what is there is adopted, and
what is there of a larger size than it has now ends. Another size is brought about in the same way.

Nothing is started before every host that is to get something has been asked whether it could run
it. All of it blocks; each step has a deadline.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.orchestrator.config import ConfigError, RayConfig, nodes, parse
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.quality_record import record_text
from splitserve.orchestrator.launch.ray.host_check import check_host, free_port, secret_mark
from splitserve.orchestrator.launch.ray.order import (
    NODE_NAME,
    ROUTER,
    Order,
    differences,
    hosted,
    is_ours,
    newest,
    order_of,
    router_names,
    sized,
    source_text,
    variables_of,
)
from splitserve.orchestrator.launch.ray.placement import (
    RayHost,
    bundle_of,
    groups_of,
    growth_obstacles,
    matches,
    obstacles,
    targets,
)
from splitserve.orchestrator.launch.ray.ray_cluster import SilentActorError
from splitserve.orchestrator.launch.ray.take_down import GROUP_NAME, stop
from splitserve.orchestrator.observe.own_version import own_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.ray.placement import Group
    from splitserve.orchestrator.launch.ray.ray_cluster import RayCluster

CLOCK_SKEW_LIMIT_S = 2.0
_TOLD_LIMIT_S = 20.0
_CHECK_LIMIT_S = 60.0
_LEARN_LIMIT_S = 10.0
_POLL_S = 0.2
_AT_A_TIME = 16


@dataclass(frozen=True)
class Wanted:
    """What ``up`` was asked for."""

    config: ClusterConfig
    run: str
    """Marker of a new run; an adopted one keeps its own."""
    secret: bytes
    is_secret_given: bool
    """By the environment or a file; else it was made up, and an adopted cluster has another."""
    environ: Mapping[str, str]
    say: Callable[[str], None]
    is_given_up: Callable[[], bool]
    sizes: Mapping[str, int] | None = None
    """Nodes of each pool that a running cluster is to have from now on; None: those it has."""


@dataclass(frozen=True)
class Brought:
    """A cluster whose actors are all there, or wait for a host."""

    order: Order
    """The router's; those of the others differ in the name."""
    secret: bytes
    is_adopted: bool
    """Something of it was there before."""
    lost_routers: frozenset[str]
    """Those of several that wait for their host."""


def bring_up(cluster: RayCluster, wanted: Wanted) -> Brought:
    """See ``Brought``. Raises ``ConfigError`` for what cannot run on these hosts, or does not fit
    what runs already, before anything is started; ``StartError`` for what goes wrong later.
    """
    return _BringUp(cluster, wanted).run()


class _BringUp:
    """One attempt."""

    def __init__(self, cluster: RayCluster, wanted: Wanted) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._config = wanted.config
        """The YAML; of a cluster that runs that which it was started from."""
        self._secret = wanted.secret
        self._names = [name for name in cluster.names() if is_ours(name)]
        self._told = self._ask_what_runs()
        self._hosts = {host.id: host for host in cluster.hosts()}
        self._running = newest(self._told.values()) if self._told else None
        self._sizes: dict[str, int] = dict(self._running.sizes) if self._running else {}
        self._reserved: list[str] = []

    def run(self) -> Brought:
        """See ``bring_up``."""
        run, edition = self._wanted.run, 0
        if self._running is not None:
            run, edition = self._adopt(self._running), self._running.edition
        if self._wanted.sizes is not None:
            self._sizes, edition = dict(self._wanted.sizes), edition + 1
        if problems := self._obstacles():
            raise ConfigError(problems)
        routers = self._router_hosts()
        order = msgspec.structs.replace(
            self._order(run, routers), sizes=self._sizes, edition=edition
        )
        hosted(order, order.router_hosts[0])  # What no host could read is refused here
        groups = groups_of(self._config, self._sizes)
        if not self._told:
            self._release_others({group.name for group in groups})
        try:
            self._reserve(groups)
            places = self._places(groups)
            self._check_hosts(order, routers, places)
            if self._told:
                self._teach(order)
        except (ConfigError, StartError):
            if self._told:
                for name in self._reserved:
                    self._cluster.release(name)
            raise
        self._start(order, routers, groups)
        self._end_surplus(groups)
        lost = frozenset(name for name, host in routers.items() if isinstance(host, str))
        return Brought(order, self._secret, bool(self._told), lost)

    @property
    def _node_names(self) -> list[str]:
        """Of the nodes that the cluster is to have."""
        return [node.name for node in nodes(sized(self._config, self._sizes))]

    def _obstacles(self) -> list[str]:
        """Of a cluster that runs only those against another size: it may wait for hosts."""
        now = sized(self._config, self._sizes)
        hosts = list(self._hosts.values())
        if self._running is None:
            return obstacles(now, hosts)
        before = {node.name for node in nodes(sized(self._config, self._running.sizes))}
        if set(self._node_names) <= before:
            return []
        return growth_obstacles(self._config, self._sizes) or obstacles(now, hosts)

    def _reserve(self, groups: list[Group]) -> None:
        """Each group is there, or waits for room."""
        there = set(self._cluster.group_names())
        found = [(group, self._cluster.hosts_of(group)) for group in groups if group.name in there]
        placed = {
            name: host
            for group, where in found
            for name, host in zip(group.nodes, where or (), strict=False)
        }
        takes = {
            name: bundle
            for group in groups
            for name, bundle in zip(group.nodes, group.bundles, strict=True)
        }
        wished = targets(groups, placed, takes, list(self._hosts.values()))
        for group in groups:
            target = wished.get(group.name, "")
            if self._cluster.reserve(group, target, may_replace=not self._told):
                self._reserved.append(group.name)

    def _teach(self, order: Order) -> None:
        """Every actor that answers knows the sizes. Raises ``StartError`` when somebody else has
        changed them meanwhile; those that do not answer ask the others when they do again.
        """
        behind = [name for name, told in self._told.items() if told.edition < order.edition]
        if not behind:
            return
        first, *others = sorted(behind, key=lambda name: (name != ROUTER, name))
        told = (order.sizes, order.edition)
        try:
            is_new = self._cluster.ask(first, "learn", *told, limit_s=_LEARN_LIMIT_S)
        except SilentActorError as error:
            raise StartError(f"{error}; say it again") from error
        if not is_new:
            raise StartError(
                f"the size of {self._config.name} has been changed by somebody else meanwhile; say "
                "it again"
            )
        self._ask_all(others, "learn", *told)

    def _end_surplus(self, groups: list[Group]) -> None:
        """No actor and no placement group is left of nodes that the cluster does not have now. An
        actor that does not answer may know of a larger size, and is left alone unless the size has
        been ordered.
        """
        kept = {*self._node_names}
        known = self._names if self._wanted.sizes is not None else self._told
        names = [name for name in known if NODE_NAME.fullmatch(name) and name not in kept]
        stop(self._cluster, names, self._config.supervision.stop_timeout_s)
        for name in names:
            self._cluster.end(name)
        if left := self._cluster.wait_until_gone(names, _TOLD_LIMIT_S):
            raise StartError(f"these do not end: {', '.join(left)}; say it again")
        needed = {group.name for group in groups} | set(self._cluster.names())
        for name in self._cluster.group_names():
            if GROUP_NAME.fullmatch(name) and name not in needed:
                self._cluster.release(name)

    def _release_others(self, wanted: set[str]) -> None:
        """What an ``up`` that was killed had reserved for another configuration is free."""
        for name in self._cluster.group_names():
            if GROUP_NAME.fullmatch(name) and name not in wanted:
                self._cluster.release(name)

    def _ask_what_runs(self) -> dict[str, Order]:
        """The orders of the actors that answer. Raises ``StartError`` when there are some and none
        does.
        """
        if not self._names:
            return {}
        end = time.monotonic() + _TOLD_LIMIT_S
        while time.monotonic() < end:
            found = {}
            for name, plain in self._ask_all(self._names, "told"):
                found[name] = order_of(plain)
            if found:
                return found
            time.sleep(_POLL_S)
        raise StartError(
            f"{self._config.name}: its actors are there ({', '.join(self._names)}) and do not "
            "answer; `splitserve down` ends them"
        )

    def _ask_all(self, names: Sequence[str], method: str, *arguments: Any) -> list[tuple[str, Any]]:
        """Those that answer, with their answers."""

        def ask(name: str) -> tuple[str, Any] | None:
            try:
                return name, self._cluster.ask(name, method, *arguments, limit_s=_POLL_S * 10)
            except SilentActorError:
                return None

        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            return [found for found in pool.map(ask, names) if found is not None]

    def _adopt(self, running: Order) -> str:
        """What runs is what the YAML says, and its secret is known; returns the marker of its
        run.
        """
        name = self._config.name
        if found := differences(running, self._config):
            raise ConfigError(
                [
                    f"a cluster {name!r} runs on this Ray cluster with another configuration; run "
                    f"`splitserve down {name}` first, or give this one another `name`",
                    *found,
                ]
            )
        self._config = parse(running.config)
        if running.secret:
            theirs = bytes.fromhex(running.secret)
            if self._wanted.is_secret_given and theirs != self._secret:
                raise ConfigError(
                    [
                        f"security.secret_file: the cluster {name!r} that runs on this Ray cluster "
                        "has another cluster secret; give the one that it was started with, or run "
                        f"`splitserve down {name}` first"
                    ]
                )
            self._secret = theirs
        if self._wanted.sizes is None:
            self._wanted.say(f"{name} runs on this Ray cluster already: {', '.join(self._names)}")
        return running.run

    def _router_hosts(self) -> dict[str, RayHost | str]:
        """Where each router runs, or shall run. Nodes that run know the old addresses: while one of
        several routers has its host, the others wait for theirs, of which the address is left.
        """
        names = router_names(self._config.router.replicas)
        by_address = {host.address: host for host in self._hosts.values()}
        if self._running is not None:
            there = {
                name: by_address.get(address, address)
                for name, address in zip(names, self._running.router_hosts, strict=True)
            }
            if any(isinstance(host, RayHost) for host in there.values()):
                for name, host in there.items():
                    if isinstance(host, str):
                        self._wanted.say(
                            f"warning: {name} is lost with its host {host}; it starts when `up` is "
                            "called again after a host of that address has joined"
                        )
                return there
        wish = (self._config.ray or RayConfig()).router
        fitting = [
            host
            for host in self._hosts.values()
            if matches(wish.label_selector, host.labels)
            and all(host.resources.get(name, 0) >= n for name, n in wish.resources.items())
        ]
        if not fitting:
            raise ConfigError(
                [
                    f"ray.router: none of the {len(self._hosts)} hosts of the Ray cluster has "
                    f"{ {**wish.label_selector, **wish.resources} }; correct it, or add such a host"
                ]
            )
        own = self._cluster.own_host_id()
        best = sorted(fitting, key=lambda host: (host.id != own, not host.is_head, host.id))
        return {name: best[index % len(best)] for index, name in enumerate(names)}

    def _order(self, run: str, routers: Mapping[str, RayHost | str]) -> Order:
        hosts = tuple(h if isinstance(h, str) else h.address for h in routers.values())
        running = [o for o in self._told.values() if o.router_hosts == hosts]
        port = running[0].router_port if running else self._config.router.port
        if port == 0:
            first = next(host for host in routers.values() if isinstance(host, RayHost))
            port = self._cluster.on_host(first, free_port, limit_s=_CHECK_LIMIT_S)
        is_in_files = self._config.security.secret_file is not None
        variables = variables_of(self._config, self._wanted.environ)
        return Order(
            name=ROUTER,
            run=run,
            config=source_text(self._config),
            router_hosts=hosts,
            router_port=port,
            secret="" if is_in_files else self._secret.hex(),
            router_environment=variables["router_environment"],
            cache_environment=variables["cache_environment"],
            quality=record_text(self._config) or next((o.quality for o in running), ""),
        )

    def _places(self, groups: list[Group]) -> dict[str, str]:
        """Node to the id of its host. What was there before may wait for hosts; what is new gets
        its room, or is refused.
        """
        limit_s = (self._config.ray or RayConfig()).placement_timeout_s
        end = time.monotonic() + limit_s
        while True:
            found: dict[str, str] = {}
            waiting = []
            for group in groups:
                hosts = self._cluster.hosts_of(group)
                if hosts is None:
                    waiting.append(group.name)
                else:
                    found |= dict(zip(group.nodes, hosts, strict=True))
            if self._told and self._wanted.sizes is None:
                return found
            if self._told:
                waiting = [name for name in waiting if name in self._reserved]
            if not waiting:
                return found
            if self._wanted.is_given_up():
                raise StartError("stopped before the Ray cluster had room")
            if time.monotonic() > end:
                raise ConfigError(
                    [
                        f"the Ray cluster has no room for {', '.join(waiting)} within "
                        f"{limit_s:g} s, since others use it, or no host has labels and resources "
                        "together; `ray status` says what is used; free some, add hosts, or raise "
                        "ray.placement_timeout_s"
                    ]
                )
            time.sleep(_POLL_S)

    def _check_hosts(
        self, order: Order, routers: Mapping[str, RayHost | str], places: dict[str, str]
    ) -> None:
        """Each host that gets something has what it needs. Raises ``ConfigError`` with everything
        that is wrong, each with its host.
        """
        new: dict[str, list[str]] = {}
        wanted = {*routers, *self._node_names}
        homes = {name: host.id for name, host in routers.items() if isinstance(host, RayHost)}
        for name, host in [*homes.items(), *places.items()]:
            if name in wanted and name not in self._names:
                new.setdefault(host, []).append(name)
        plain = msgspec.to_builtins(order)

        def ask(host: RayHost) -> list[str]:
            before = time.time()
            try:
                facts = self._cluster.on_host(
                    host, check_host, plain, new[host.id], limit_s=_CHECK_LIMIT_S
                )
            except StartError as error:
                return [str(error)]
            where = f"on {facts['host']} ({host.address})"
            self._say_skew(where, float(facts["unix_s"]), before, time.time())
            problems = [*facts["problems"], *_strange(facts, secret_mark(self._secret))]
            return [f"{where}: {problem}" for problem in problems]

        hosts = [self._hosts[host] for host in new if host in self._hosts]
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            found = [problem for problems in pool.map(ask, hosts) for problem in problems]
        if found:
            raise ConfigError(found)

    def _say_skew(self, where: str, theirs: float, before: float, after: float) -> None:
        ahead_s = max(theirs - after, before - theirs)
        if ahead_s > CLOCK_SKEW_LIMIT_S:
            way = "ahead of" if theirs > after else "behind"
            self._wanted.say(
                f"warning: {where} the clock is {ahead_s:.0f} s {way} this machine's; run NTP "
                "(chrony) on both"
            )

    def _start(
        self, order: Order, routers: Mapping[str, RayHost | str], groups: list[Group]
    ) -> None:
        takes = (self._config.ray or RayConfig()).router.resources
        has_moved = any(told.router_hosts != order.router_hosts for told in self._told.values())
        plain = msgspec.to_builtins(order)
        for name, host in routers.items():
            if isinstance(host, str):
                continue
            here = self._told.get(name)
            if here is not None and here.router_hosts != order.router_hosts:
                self._end(name)
            named = plain | {"name": name}
            self._cluster.start(name, named, self._config, host=host.id, takes=takes)
        pools = {node.name: node.pool for node in nodes(sized(self._config, self._sizes))}
        for group in groups:
            for index, name in enumerate(group.nodes):
                if name not in pools:
                    continue
                told = self._told.get(name)
                knows_routers = told is not None and told.router_hosts == order.router_hosts
                # One that starts again just now does so with the old order
                if has_moved and not knows_routers and name in self._names:
                    self._end(name)
                self._cluster.start(
                    name,
                    plain | {"name": name},
                    self._config,
                    bundle=(group, index),
                    takes=bundle_of(self._config, pools[name]),
                )

    def _end(self, name: str) -> None:
        """An actor that knows another router makes room for one that knows this one."""
        self._cluster.end(name)
        if self._cluster.wait_until_gone([name], _TOLD_LIMIT_S):
            raise StartError(f"{name} does not end; run `splitserve down {self._config.name}`")


def _strange(facts: dict[str, Any], mark: str) -> Iterable[str]:
    """What a host has otherwise than this machine."""
    if facts["splitserve"] != own_version():
        yield (
            f"splitserve {facts['splitserve']} is installed, and {own_version()} on this machine; "
            "install the same version on every host"
        )
    if facts["secret"] and facts["secret"] != mark:
        yield (
            "security.secret_file: it holds another cluster secret than this machine's; give "
            "every host the same one"
        )

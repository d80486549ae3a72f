"""Which placement groups a cluster needs, from its YAML, and whether a Ray cluster could hold them.
Pure: hosts are given as what Ray says of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import PlacementConfig, nodes
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.config.ray_schema import SAME_HOST
from splitserve.orchestrator.launch.ray.order import sized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from splitserve.orchestrator.config import ClusterConfig

HOST_LABEL = "ray.io/node-id"
"""Ray's own label of each host."""
_SINGLE = ("SPREAD", "PACK")


@dataclass(frozen=True)
class Group:
    """One placement group: a bundle for each of ``nodes``, in this order."""

    name: str
    nodes: tuple[str, ...]
    bundles: tuple[dict[str, float], ...]
    selectors: tuple[dict[str, str], ...]
    strategy: str = ""
    """Of Ray; empty with ``same_label``. `SPREAD` and `PACK` of a group of one node say how it is
    to lie to the other nodes of its pool.
    """
    same_label: str = ""
    """Key of the label of which all its hosts have one value."""

    @property
    def is_single(self) -> bool:
        """Whether it holds one node, which may come and go by itself."""
        return self.strategy in _SINGLE


@dataclass(frozen=True)
class RayHost:
    """One host of a Ray cluster."""

    id: str
    address: str
    hostname: str
    resources: dict[str, float]
    """All that it has, whoever uses it."""
    labels: dict[str, str]
    is_head: bool = False


def groups_of(config: ClusterConfig, sizes: Mapping[str, int] | None = None) -> list[Group]:
    """The placement groups of the cluster of that YAML, whose pools have ``sizes`` now. Ray cannot
    change a group: nodes that may lie anywhere have one each, and those that have to lie apart or
    together share the one of the YAML's size, in which nodes that are gone have their bundle still.
    """
    config_now = sized(config, sizes or {})
    pair_by = config.ray.pair_by if config.ray is not None else ""
    if pair_by:
        found = list(_pairs(config, HOST_LABEL if pair_by == SAME_HOST else pair_by))
    else:
        found = [group for pool in POOLS for group in _pool_groups(config, config_now, pool)]
    there = {node.name for node in nodes(config_now)}
    return [group for group in found if there & set(group.nodes)]


def growth_obstacles(config: ClusterConfig, sizes: Mapping[str, int]) -> list[str]:
    """Why the cluster of that YAML cannot have these sizes, whatever the hosts have."""
    there = {name for group in groups_of(config, sizes) for name in group.nodes}
    problems = []
    for pool in POOLS:
        if all(n.name in there for n in nodes(sized(config, sizes)) if n.pool == pool):
            continue
        placement = config.pool(pool).placement or PlacementConfig()
        is_paired = config.ray is not None and config.ray.pair_by
        key = "ray.pair_by" if is_paired else f"{pool}.placement.strategy {placement.strategy}"
        problems.append(
            f"{key}: Ray reserves the room of all these nodes at once, and cannot add to it: the "
            f"pool may have {config.pool(pool).replicas} nodes at most, the YAML's number; give "
            "the YAML more replicas, or another strategy, and start the cluster again"
        )
    return problems


def targets(
    groups: Sequence[Group],
    placed: Mapping[str, str],
    takes: Mapping[str, Mapping[str, float]],
    hosts: Sequence[RayHost],
) -> dict[str, str]:
    """To each single group that is not placed yet the id of the host where it should lie, while
    that has room: for `SPREAD` one that has the fewest nodes of its pool, for `PACK` the most.
    ``placed`` is node to host, ``takes`` what each node takes. A group for which no host has room
    as far as it is known here has no target.
    """
    place, found = dict(placed), dict[str, str]()
    for group in groups:
        name = group.nodes[0]
        if not group.is_single or name in place:
            continue
        bundle, selector = group.bundles[0], group.selectors[0]

        def load(host: RayHost, name: str = name, group: Group = group) -> tuple[int, int]:
            there = [other for other, where in place.items() if where == host.id]
            own = sum(other.rpartition("-")[0] == name.rpartition("-")[0] for other in there)
            return (own if group.strategy == "SPREAD" else -own, len(there))

        fitting = [
            host
            for host in hosts
            if matches(selector, host.labels) and _has_room(host, bundle, place, takes)
        ]
        if fitting:
            place[name] = found[group.name] = min(fitting, key=load).id
    return found


def bundle_of(config: ClusterConfig, pool: str) -> dict[str, float]:
    """What one node of the pool takes of its host."""
    placement = config.pool(pool).placement or PlacementConfig()
    bundle = {"CPU": float(placement.num_cpus), **placement.resources}
    return bundle | ({"GPU": float(placement.num_gpus)} if placement.num_gpus else {})


def obstacles(config: ClusterConfig, hosts: Sequence[RayHost]) -> list[str]:
    """Why these hosts could not hold the cluster, even if nobody else used them: one sentence per
    pool, with what there is.
    """
    problems = [problem for pool in POOLS for problem in _lacks(config, pool, hosts)]
    return problems or list(_too_little(config, hosts))


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether a host with ``labels`` fulfils Ray's conditions."""
    return all(_matches(condition, labels.get(key)) for key, condition in selector.items())


def _pool_groups(config: ClusterConfig, now: ClusterConfig, pool: str) -> Iterator[Group]:
    placement = config.pool(pool).placement or PlacementConfig()
    is_single = placement.strategy in _SINGLE
    names = [node.name for node in nodes(now if is_single else config) if node.pool == pool]
    for name, members in [(n, [n]) for n in names] if is_single else [(pool, names)]:
        yield Group(
            name=name,
            nodes=tuple(members),
            bundles=(bundle_of(config, pool),) * len(members),
            selectors=(placement.label_selector,) * len(members),
            strategy=placement.strategy,
        )


def _has_room(
    host: RayHost,
    bundle: Mapping[str, float],
    place: Mapping[str, str],
    takes: Mapping[str, Mapping[str, float]],
) -> bool:
    there = [takes[node] for node, where in place.items() if where == host.id]
    return all(
        host.resources.get(name, 0) - sum(taken.get(name, 0) for taken in there) >= amount
        for name, amount in bundle.items()
    )


def _pairs(config: ClusterConfig, label: str) -> Iterator[Group]:
    """Nodes of both pools, dealt out to as many groups as the smaller pool has nodes."""
    count = min(config.prefill.replicas, config.decode.replicas)
    for number in range(count):
        members = [node for node in nodes(config) if node.index % count == number]
        placements = [node.settings.placement or PlacementConfig() for node in members]
        yield Group(
            name=f"pair-{number}",
            nodes=tuple(node.name for node in members),
            bundles=tuple(bundle_of(config, node.pool) for node in members),
            selectors=tuple(placement.label_selector for placement in placements),
            same_label=label,
        )


def _lacks(config: ClusterConfig, pool: str, hosts: Sequence[RayHost]) -> Iterator[str]:
    """What no host has enough of for one node."""
    placement = config.pool(pool).placement or PlacementConfig()
    bundle = bundle_of(config, pool)
    chosen = [host for host in hosts if matches(placement.label_selector, host.labels)]
    if not chosen:
        yield (
            f"{pool}.placement.label_selector: none of the {len(hosts)} hosts of the Ray cluster "
            f"has {_words(placement.label_selector)}; start hosts with these labels (`ray start "
            "--labels`), or correct it"
        )
        return
    for name, amount in bundle.items():
        most = max(chosen, key=lambda host: host.resources.get(name, 0))
        if most.resources.get(name, 0) < amount:
            there = ", ".join(f"{h.hostname} {h.resources.get(name, 0):g}" for h in chosen[:8])
            yield (
                f"{pool}.placement: a node takes {amount:g} {name}, and no host has so many "
                f"({there}); ask for fewer, or add hosts to the Ray cluster"
            )


def _too_little(config: ClusterConfig, hosts: Sequence[RayHost]) -> Iterator[str]:
    """What all hosts together have too little of."""
    for name in dict.fromkeys(key for pool in POOLS for key in bundle_of(config, pool)):
        wanted = {
            pool: bundle_of(config, pool).get(name, 0.0) * config.pool(pool).replicas
            for pool in POOLS
        }
        there = sum(host.resources.get(name, 0) for host in hosts)
        if sum(wanted.values()) > there:
            parts = " and ".join(f"{pool} {amount:g}" for pool, amount in wanted.items() if amount)
            yield (
                f"prefill.placement, decode.placement: the nodes take {sum(wanted.values()):g} "
                f"{name} ({parts}), and the {len(hosts)} hosts of the Ray cluster have {there:g}; "
                "lower replicas or what each takes, or add hosts"
            )
    for pool in POOLS:
        placement = config.pool(pool).placement
        if placement is None or placement.strategy != "STRICT_SPREAD":
            continue
        chosen = [host for host in hosts if matches(placement.label_selector, host.labels)]
        if len(chosen) < config.pool(pool).replicas:
            yield (
                f"{pool}.placement.strategy: STRICT_SPREAD needs {config.pool(pool).replicas} "
                f"hosts, and {len(chosen)} fit; add hosts, or use SPREAD"
            )


def _matches(condition: str, value: str | None) -> bool:
    text = condition.strip()
    is_negated = text.startswith("!")
    text = text.removeprefix("!").strip()
    if text.startswith("in(") and text.endswith(")"):
        wanted = {part.strip() for part in text[3:-1].split(",")}
    else:
        wanted = {text}
    return (value in wanted) != is_negated


def _words(selector: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in selector.items())


def described(config: ClusterConfig) -> list[str]:
    """The placement groups as ``up --dry-run`` shows them, a line each."""
    return [
        f"placement group {group.name} ({group.strategy or f'one {group.same_label}'}): "
        + "; ".join(
            f"{name} takes {_words({key: f'{amount:g}' for key, amount in bundle.items()})}"
            for name, bundle in zip(group.nodes, group.bundles, strict=True)
        )
        for group in groups_of(config)
    ]

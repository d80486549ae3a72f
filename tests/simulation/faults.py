"""What each kind of fault does to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.network import Weather

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.cluster import Cluster
    from simulation.engine import Engine
    from simulation.plan import Fault


def begin(cluster: Cluster, fault: Fault) -> None:
    """The fault happens now; what lasts ends after its ``seconds``."""
    cluster.world.note("fault: {}", fault)
    KINDS[fault.kind](cluster, fault)


def _for_a_while(
    cluster: Cluster, fault: Fault, start: Callable[[], None], end: Callable[[], None]
) -> None:
    start()
    cluster.open_faults += 1

    def over() -> None:
        cluster.open_faults -= 1
        end()

    cluster.world.at(fault.seconds, over)


def _engine(cluster: Cluster, fault: Fault) -> Engine | None:
    return cluster.nodes[fault.node].engine


def kill(cluster: Cluster, fault: Fault) -> None:
    """The node's engine dies; another life begins."""
    cluster.kill(cluster.nodes[fault.node])


def pause(cluster: Cluster, fault: Fault) -> None:
    """The node's engine is stopped for a while (SIGSTOP, SIGCONT)."""
    engine = _engine(cluster, fault)
    if engine is not None:
        _for_a_while(cluster, fault, engine.process.stop, engine.process.go_on)


def slow(cluster: Cluster, fault: Fault) -> None:
    """The node's engine is slow for a while: ``strength`` times."""
    engine = _engine(cluster, fault)
    if engine is None:
        return
    process = engine.process

    def start() -> None:
        process.slowness = fault.strength

    def end() -> None:
        process.slowness = 1.0

    _for_a_while(cluster, fault, start, end)


def partition(cluster: Cluster, fault: Fault) -> None:
    """Two hosts do not reach each other for a while."""
    network = cluster.network
    _for_a_while(
        cluster,
        fault,
        lambda: network.cut(fault.node, fault.other),
        lambda: network.mend(fault.node, fault.other),
    )


def _weather(field: str) -> Callable[[Cluster, Fault], None]:
    def happen(cluster: Cluster, fault: Fault) -> None:
        """The control channel is bad for a while, each message with probability ``strength``."""
        bad = Weather(**{field: fault.strength})
        network = cluster.network
        _for_a_while(cluster, fault, lambda: network.worsen(bad), lambda: network.clear(bad))

    return happen


def leave(cluster: Cluster, fault: Fault) -> None:
    """The client of a request closes its connection."""
    cluster.router.leave(f"r{fault.request}")


def _leg_broken(role: str) -> Callable[[Cluster, Fault], None]:
    def happen(cluster: Cluster, fault: Fault) -> None:
        """The connection of a request's leg is reset, between a router and an engine that live."""
        cluster.router.reset_leg(f"r{fault.request}", role)

    return happen


def preempt(cluster: Cluster, fault: Fault) -> None:
    """The node's engine takes a running request's blocks back, ten times within a second."""
    engine = _engine(cluster, fault)
    for _ in range(10 if engine is not None else 0):
        engine.process.at(cluster.world.random.random(), engine.preempt)


def agent_reconnects(cluster: Cluster, fault: Fault) -> None:
    """The connection between the node's agent and the router breaks; the agent calls again."""
    cluster.break_agent(cluster.nodes[fault.node])


def router_killed(cluster: Cluster, fault: Fault) -> None:
    """The router dies (SIGKILL), and another one starts after ``seconds``."""
    if cluster.router.is_up:
        _for_a_while(cluster, fault, cluster.kill_router, cluster.start_router)


KINDS: dict[str, Callable[[Cluster, Fault], None]] = {
    "kill": kill,
    "pause": pause,
    "slow": slow,
    "partition": partition,
    "drop": _weather("drop"),
    "duplicate": _weather("duplicate"),
    "reorder": _weather("reorder"),
    "delay": _weather("delay_s"),
    "leave": leave,
    "prefill leg broken": _leg_broken("prefill"),
    "decode leg broken": _leg_broken("decode"),
    "preempt": preempt,
    "agent reconnects": agent_reconnects,
    "router killed": router_killed,
}
"""By name."""

"""What each kind of fault does to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.network import Weather
from splitserve.orchestrator.core.lifecycle import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.cluster import Cluster, Node
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
        cluster.calm_since = cluster.world.now
        end()

    cluster.world.at(fault.seconds, over)


def _engine(cluster: Cluster, fault: Fault) -> Engine | None:
    return cluster.nodes[fault.node].engine


def kill(cluster: Cluster, fault: Fault) -> None:
    """The node's engine dies; another life begins."""
    cluster.kill(cluster.nodes[fault.node])


def pause(cluster: Cluster, fault: Fault) -> None:
    """The node's engine is stopped for a while (SIGSTOP, SIGCONT)."""
    _stop(cluster, fault, cluster.nodes[fault.node])


def _stop(cluster: Cluster, fault: Fault, node: Node) -> None:
    if node.engine is not None:
        process = node.engine.process
        _for_a_while(cluster, fault, process.stop, process.go_on)


def stream_struck(cluster: Cluster, fault: Fault) -> None:
    """The engine of the request's stream, or of another one if it has none, dies, or with a
    ``strength`` stops for a while.
    """
    requests = cluster.router.core.requests.values()
    streams = [r for r in requests if r.phase is Phase.STREAMING]
    if not streams:
        return
    request = next((r for r in streams if r.id == f"r{fault.request}"), streams[0])
    assert request.choice is not None
    node = cluster.nodes[request.choice.decode.name]
    if fault.strength:
        _stop(cluster, fault, node)
    else:
        cluster.kill(node)


def hang(cluster: Cluster, fault: Fault) -> None:
    """A prefill engine stops for long in the middle of its work, and its clients leave."""
    core = cluster.router.core
    busy = [node for node in core.membership.nodes.values() if node.prefill_legs]
    for node in cluster.world.random.sample(busy, min(1, len(busy))):
        _stop(cluster, fault, cluster.nodes[node.name])
        for request in list(core.requests.values()):
            if request.choice is not None and request.choice.prefill is node:
                cluster.router.leave(request.id)


def drain(cluster: Cluster, fault: Fault) -> None:
    """An operator restarts the node; with ``seconds`` it goes then, whatever it owes."""
    cluster.drain(fault.node, fault.seconds or None)


def flip(cluster: Cluster, fault: Fault) -> None:
    """Somebody changes the node's role; with a ``strength`` also that of the last prefill node."""
    cluster.flip(fault.node, is_forced=bool(fault.strength))


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
    "stream struck": stream_struck,
    "hang": hang,
    "drain": drain,
    "flip": flip,
    "router killed": router_killed,
}
"""By name."""

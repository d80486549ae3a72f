"""A small language for stories about the core: nodes by name, requests by id, time by hand."""

from __future__ import annotations

from typing import Any

from splitserve.orchestrator.agent.messages import NodeDescription, NodeState
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import Effect, EndRequest
from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.core.router_core import LISTEN_S, RouterCore


def description(name: str, **changes: Any) -> NodeDescription:
    """A node of 100 blocks of 16 tokens, incarnation ``<name>-1``."""
    fields: dict[str, Any] = {
        "node": name,
        "pool": "prefill" if name.startswith("p") else "decode",
        "incarnation": f"{name}-1",
        "engine_url": f"http://127.0.0.1:1/{name}",
        "engine_api_key": "k",
        "control_addresses": (f"tcp://{name}",),
        "model": "m",
        "max_model_len": 1024,
        "block_tokens": 16,
        "total_blocks": 100,
        "tensor_parallel": 1,
        "transport": "tcp",
        "fingerprint": {"weights": "w1", "dtype": "float32"},
    }
    return NodeDescription(**(fields | changes))


class Driver:
    """A core with nodes that are ready; ``p*`` nodes prefill, ``d*`` nodes decode."""

    def __init__(self, *nodes: str, placement: dict[str, Any] | None = None, **limits: Any) -> None:
        self.core = RouterCore(CoreLimits(placement=PlacementLimits(**(placement or {})), **limits))
        self.now = 100.0
        for node in nodes:
            self.join(node)
            self.report(node)

    def do(self, event: ev.Event) -> list[Effect]:
        """Hand one fact to the core."""
        return self.core.handle(event, self.now)

    def join(self, name: str, role: str | None = None, **changes: Any) -> list[Effect]:
        """The node's agent says hello."""
        pool = "prefill" if name.startswith("p") else "decode"
        return self.do(ev.NodeJoined(description(name, **changes), role or pool))

    def report(self, name: str, phase: str = "ready", **changes: Any) -> list[Effect]:
        """The node's agent reports; all blocks are free unless told otherwise."""
        fields: dict[str, Any] = {
            "incarnation": f"{name}-1",
            "free_blocks": 100,
            "total_blocks": 100,
        } | changes
        return self.do(ev.NodeReported(NodeState(node=name, phase=phase, **fields)))

    def request(self, request_id: str, **changes: Any) -> list[Effect]:
        """A streamed request of 32 + 16 tokens arrives."""
        fields: dict[str, Any] = {
            "endpoint": "completions",
            "prompt_tokens": 32,
            "output_tokens": 16,
            "streaming": True,
            "alone_because": "",
        } | changes
        return self.do(ev.RequestArrived(request_id, **fields))

    def pass_time(self, seconds: float) -> list[Effect]:
        """Time passes, and the shell's timer fires."""
        self.now += seconds
        return self.do(ev.TimePassed())

    def keep_silent(self, seconds: float) -> list[Effect]:
        """Time passes, the core listens for what it may have missed, and hears nothing."""
        return [*self.pass_time(seconds), *self.pass_time(LISTEN_S)]

    def node(self, name: str) -> Any:
        """The core's record of a node."""
        return self.core.membership.nodes[name]

    def is_idle(self) -> bool:
        """Nothing is promised, waited for or remembered."""
        nodes = self.core.membership.nodes.values()
        return (
            not self.core.requests
            and not self.core.queue
            and not any(self.core.deadlines.values())
            and all(not (n.prefill_legs or n.decode_legs or n.committed_blocks) for n in nodes)
            and not any(n.prefill_tokens or n.own_prompt_tokens for n in nodes)
        )


def names(effects: list[Effect]) -> list[str]:
    """The kinds of orders."""
    return [type(effect).__name__ for effect in effects]


def ended(effects: list[Effect]) -> Any:
    """The timeline of the one request that ended in these effects."""
    (timeline,) = [e.timeline for e in effects if isinstance(e, EndRequest)]
    return timeline

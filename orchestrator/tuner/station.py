"""A node in the simulated cluster: its model, role and network link, and what the router's core is
told of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from splitserve.orchestrator.agent.messages import NodeDescription, NodeState
from splitserve.orchestrator.tuner.node_model import NodeModel
from splitserve.orchestrator.tuner.prefix_cache_model import BlockPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.orchestrator.tuner.profile import Profile, TransferTime
    from splitserve.orchestrator.tuner.simulated_request import SimulatedRequest
    from splitserve.orchestrator.tuner.simulation_settings import SimulationSettings


@dataclass(eq=False, slots=True)
class Station:
    """A node and what the simulation knows beside its model."""

    model: NodeModel
    role: str
    description: NodeDescription
    watched_s: float = -1.0
    """The end of a jump for which an event is out."""
    link_s: float = 0.0
    """When the bytes of all transfers so far are through."""
    reports_at_s: float = -1.0
    """When its next report of prefixes is due; before now for none."""
    role_since_s: float = 0.0
    role_busy_s: float = 0.0
    """What ``busy_s`` was then."""
    neighbours: tuple[Station, ...] = ()
    """The other nodes of its host; none when they do not slow each other."""
    is_computing: bool = False
    """What its neighbours know; of use only when it has any."""

    @property
    def name(self) -> str:
        """The node's name; it has one life, of the same name."""
        return self.model.name

    def ready_state(self) -> NodeState:
        """What its agent would say at the start."""
        total = self.description.total_blocks
        return NodeState(
            node=self.name,
            incarnation=self.name,
            phase="ready",
            free_blocks=total,
            total_blocks=total,
        )


def station(
    name: str, role: str, profile: Profile, settings: SimulationSettings, seed: int
) -> Station:
    """A node that has done nothing yet."""
    limits = profile.limits
    kept_tokens = settings.trace_block_tokens if settings.prefix_caching else 0
    model = NodeModel(
        name,
        profile,
        BlockPool(limits.total_blocks, limits.block_tokens, kept_tokens),
        speed=settings.speeds.get(name, 1.0),
        noise=settings.noise,
        rng=Random(f"{seed} {name}"),
    )
    description = NodeDescription(
        node=name,
        pool=role,
        incarnation=name,
        engine_url="",
        engine_api_key="",
        control_addresses=(),
        model=profile.model,
        max_model_len=limits.max_model_len,
        block_tokens=limits.block_tokens,
        total_blocks=limits.total_blocks,
        tensor_parallel=1,
        transport="",
        fingerprint={},
        reports_prefixes=settings.prefix_caching,
    )
    return Station(model, role, description)


def introduce(stations: Sequence[Station], per_host: int) -> None:
    """So many at a time share a host, in their order, and know each other afterwards."""
    for first in range(0, len(stations), per_host):
        host = stations[first : first + per_host]
        for one in host:
            one.neighbours = tuple(other for other in host if other is not one)


def landing_s(
    request: SimulatedRequest,
    sender: Station,
    reader: Station,
    transfer: TransferTime,
    token_bytes: int,
) -> float:
    """When the KV of a computed prompt, for which pages are reserved, has landed. The bytes have
    both links for themselves, after the transfers before.
    """
    computed, prefill, decode = request.computed, request.prefill_job, request.decode_job
    assert computed is not None
    assert prefill is not None
    assert decode is not None
    token_s = token_bytes / max(transfer.bytes_per_s.value, 1e-9)
    begun_s = max(prefill.started_s, decode.started_s, sender.link_s, reader.link_s)
    through_s = begun_s + (request.prompt - decode.cached) * token_s
    sender.link_s = reader.link_s = through_s
    last_step_s = computed.at_s - computed.step_s + computed.tokens * token_s
    return max(computed.at_s, last_step_s, through_s) + transfer.latency_s.value

"""Every bound of the core, with its unit; the names are those of the cluster YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitserve.orchestrator.core.breaker import BreakerLimits
from splitserve.orchestrator.core.placement import PlacementLimits

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class CoreLimits:
    """What the core waits for, how long, and how much it holds."""

    queue_limit_requests: int = 256
    queue_timeout_s: float = 60.0
    first_token_deadline_s: float = 300.0
    request_deadline_s: float = 3600.0
    node_silence_limit_s: float = 5.0
    node_return_limit_s: float = 900.0
    """Seconds for which requests may wait for a node that was told to restart."""
    lease_s: float = 30.0
    """How long a prefill node may hold what nobody has fetched."""
    engine_end_limit_s: float = 10.0
    """Between the order to kill a prefill engine that does not fence and the report of its death;
    an agent that lost its connection is back within half of this.
    """
    max_attempts: int = 2
    """Decode nodes that one request is tried on before its first data."""
    placement: PlacementLimits = field(default_factory=PlacementLimits)
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Share of the turns of each tenant that has not the usual one, 1."""

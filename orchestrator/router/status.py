"""What the router says of itself and of its nodes, for ``splitserve status``; no secrets, no
prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from splitserve.orchestrator.agent.messages import NodeDescription
    from splitserve.orchestrator.core.breaker import Breaker
    from splitserve.orchestrator.core.membership import Node
    from splitserve.orchestrator.core.router_core import RouterCore
    from splitserve.orchestrator.router.agents import AgentHub
    from splitserve.orchestrator.router.autotune import Autotune
    from splitserve.orchestrator.router.cache_glance import CacheGlance


def snapshot_of(
    core: RouterCore, agents: AgentHub, autotune: Autotune | None, cache: CacheGlance | None
) -> dict[str, Any]:
    """Everything that is so at the moment."""
    status = status_of(core, agents)
    if autotune is not None:
        status["autotune"] = autotune.status()
    if cache is not None:
        status["cache"] = cache.look()
    return status


def status_of(core: RouterCore, agents: AgentHub) -> dict[str, Any]:
    """Nodes by name, those that are loading, refused or dead, and the load."""
    return {
        "is_stopping": core.is_stopping,
        "requests": {
            "waiting": len(core.queue),
            "running": len(core.requests) - len(core.queue),
            "waiting_by_tenant": core.queue.waiting(),
            "queue_limit_requests": core.limits.queue_limit_requests,
        },
        "nodes": {name: _node(node, core) for name, node in sorted(core.membership.nodes.items())},
        "prefix_index_marks": len(core.prefixes),
        "loading": {
            name: {"stage": progress.stage, "elapsed_s": progress.elapsed_s}
            for name, progress in sorted(agents.loading.items())
        },
        "returning": sorted(core.membership.returning),
        "refused": {**core.membership.refused, **agents.refused},
        "last_death": {
            name: {
                "exit_status": death.exit_status,
                "likely_cause": death.likely_cause,
                "was_ordered": death.was_ordered,
            }
            for name, death in sorted(agents.last_death.items())
        },
    }


def audit_of(core: RouterCore, now: float) -> dict[str, Any]:
    """What the engines hold and the core does not know of, or the other way round."""
    differences = [msgspec.to_builtins(difference) for difference in core.differences(now)]
    return {"nodes": sorted(core.membership.nodes), "differences": differences}


def models_of(core: RouterCore, served_name: str, started_unix_s: int) -> dict[str, Any]:
    """The answer of ``GET /v1/models``."""
    lengths = [node.description.max_model_len for node in core.membership.nodes.values()]
    model = {
        "id": served_name,
        "object": "model",
        "created": started_unix_s,
        "owned_by": "splitserve",
        "root": served_name,
        "parent": None,
        "max_model_len": min(lengths, default=None),
        "permission": [],
    }
    adapters = [
        model | {"id": name, "root": adapter.path, "parent": served_name, "max_model_len": None}
        for name, adapter in sorted(core.membership.adapters.items())
    ]
    return {"object": "list", "data": [model, *adapters]}


def _node(node: Node, core: RouterCore) -> dict[str, Any]:
    description, state = node.description, node.state
    return {
        "role": node.role,
        "pool": description.pool,
        "phase": node.phase,
        "is_usable": node.is_usable,
        "is_draining": node.drain is not None,
        "is_flipping": node.is_flipping,
        "owed": node.owed._asdict(),
        "flip_obstacle": description.flip_obstacle,
        "is_connected": node.is_connected,
        "is_silent": node.is_silent,
        "incarnation": description.incarnation,
        "engine_url": description.engine_url,
        **_engine(description),
        "placed_legs": node.placed_legs,
        "prefill_legs": node.prefill_legs,
        "decode_legs": node.decode_legs,
        "committed_blocks": node.committed_blocks,
        "others": _others(node),
        "cached_prefixes": core.prefixes.size_of(description.incarnation),
        "breakers": {
            "prefill": _breaker(node.prefill_breaker),
            "decode": _breaker(node.decode_breaker),
        },
        "running": state.running if state else None,
        "waiting": state.waiting if state else None,
        "free_blocks": state.free_blocks if state else None,
        "open_transfers": state.open_transfers if state else None,
        "leased_blocks": state.leased_blocks if state else None,
        "quarantined_transfers": state.quarantined_transfers if state else None,
        "quarantined_blocks": state.quarantined_blocks if state else None,
        "counters": state.counters if state else {},
    }


def _others(node: Node) -> dict[str, Any]:
    """What the other routers that are there have placed on the node, by their numbers."""
    routers = node.others.routers if node.others is not None else ()
    return {str(router.index): msgspec.to_builtins(router.load) for router in routers}


def _engine(description: NodeDescription) -> dict[str, Any]:
    """What the engine is, and what bounds it."""
    return {
        "model": description.model,
        "engine": description.engine,
        "hardware": description.hardware,
        "host": description.host,
        "fingerprint": description.fingerprint,
        "transport": description.transport,
        "tensor_parallel": description.tensor_parallel,
        "max_model_len": description.max_model_len,
        "block_tokens": description.block_tokens,
        "total_blocks": description.total_blocks,
        "step_limit_tokens": description.step_limit_tokens,
        "running_limit_requests": description.running_limit_requests,
        "kv_bytes_per_token": description.kv_bytes_per_token,
        "vocabulary_tokens": description.vocabulary_tokens,
        "reports_prefixes": description.reports_prefixes,
        "adapters": sorted(description.adapters),
    }


def _breaker(breaker: Breaker) -> dict[str, Any]:
    return {
        "state": breaker.state.value,
        "openings": breaker.openings,
        "latest_fault": breaker.reason,
    }

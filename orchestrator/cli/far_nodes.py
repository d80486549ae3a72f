"""Nodes whose agents run on other machines, as the router knows them."""

from __future__ import annotations

from typing import Any

from splitserve.orchestrator.agent.status_file import NodeStatus


def seen_by_router(status: dict[str, Any], name: str) -> NodeStatus | None:
    """What the node's agent would have written, as far as the router's status tells; None for one
    that it has not heard of.
    """
    node = status.get("nodes", {}).get(name)
    loading = status.get("loading", {}).get(name)
    died = status.get("last_death", {}).get(name)
    refused = status.get("refused", {}).get(name, "")
    if node is not None:
        return _status(
            name,
            phase="draining" if node["is_draining"] else node["phase"],
            role=node["role"],
            pool=node["pool"],
            incarnation=node["incarnation"],
            engine_url=node["engine_url"],
            flip_obstacle=node["flip_obstacle"],
            router_connected=node["is_connected"],
            refused=refused,
            running=node["running"] or 0,
            waiting=node["waiting"] or 0,
            free_blocks=node["free_blocks"] or 0,
            total_blocks=node["total_blocks"],
            quarantined_blocks=node["quarantined_blocks"] or 0,
        )
    if loading is not None:
        return _status(
            name, phase="loading", stage=loading["stage"], elapsed_s=loading["elapsed_s"]
        )
    if died is not None:
        phase = "left" if died.get("was_ordered") else "dead"
        return _status(name, phase=phase, likely_cause=died["likely_cause"])
    return _status(name, phase="dead", refused=refused) if refused else None


def _status(name: str, **known: Any) -> NodeStatus:
    plain = {
        "role": name.rpartition("-")[0],
        "stage": "",
        "elapsed_s": 0.0,
        "incarnation": "",
        "agent_pid": 0,
        "engine_url": "",
        "log_path": "",
        "router_connected": True,
    }
    return NodeStatus(node=name, **{**plain, **known})

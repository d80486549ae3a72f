"""What a node does, as a small JSON file beside the logs: ``up`` and ``status`` read it, also when
there is no router.

Written by replacing, so a reader never sees half of it. Holds no secret.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.agent.life import Life
    from splitserve.orchestrator.agent.messages import EngineDied


class NodeStatus(msgspec.Struct, kw_only=True, frozen=True):
    """One node, as its agent sees it."""

    node: str
    phase: str
    """``loading``, ``ready``, ``draining``, ``left`` (it was drained), ``dead`` (waits for a
    restart) or ``failed`` (will not be restarted).
    """
    role: str
    """What new work of the node is for, as its agent was told last."""
    agent_pid: int
    engine_url: str
    log_path: str
    stage: str = ""
    """While loading: what the engine does."""
    elapsed_s: float = 0.0
    """Seconds since this engine was started."""
    incarnation: str = ""
    pool: str = ""
    """The YAML's pool of the node: its first role."""
    flip_obstacle: str = ""
    """Why the node cannot change its role; empty when it can."""
    restarts: int = 0
    role_epoch: int = 0
    """Number of the order that gave the node its role."""
    router_connected: bool = False
    """Every router is there, and has said whether it uses this engine."""
    refused: str = ""
    """Why a router will not use the node, empty while none refuses it."""
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    quarantined_blocks: int = 0
    """Blocks whose next owner has to wait for a prefill engine's word, or its end."""
    exit_status: int | None = None
    likely_cause: str = ""
    last_lines: tuple[str, ...] = ()


def with_life(status: NodeStatus, life: Life | None, died: EngineDied | None) -> NodeStatus:
    """The status with what the engine that runs says, if one runs, and how the last one ended."""
    known: dict[str, Any] = {}
    if life is not None:
        known = {
            "stage": life.engine.log.stage,
            "elapsed_s": round(time.monotonic() - life.started, 1),
            "incarnation": life.incarnation,
        }
        if life.latest is not None:
            known |= {key: getattr(life.latest, key) for key in _FROM_ENGINE}
    if died is not None:
        known |= {
            "exit_status": died.exit_status,
            "likely_cause": died.likely_cause,
            "last_lines": died.last_lines,
        }
    return structs.replace(status, **known)


_FROM_ENGINE = ("running", "waiting", "free_blocks", "total_blocks", "quarantined_blocks")


def status_path(run_dir: Path, node: str) -> Path:
    """Where the status of ``node`` lies."""
    return run_dir / f"{node}.status.json"


def write_status(run_dir: Path, status: NodeStatus) -> None:
    """The file holds ``status`` now."""
    path = status_path(run_dir, status.node)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_bytes(msgspec.json.encode(status))
    fresh.replace(path)


def read_status(run_dir: Path, node: str) -> NodeStatus | None:
    """The last status written, None when there is none yet."""
    try:
        return msgspec.json.decode(status_path(run_dir, node).read_bytes(), type=NodeStatus)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def last_role_order(run_dir: Path, node: str) -> tuple[str, int]:
    """(role, number of the order that gave it) as the agent before this one, of the same run, had
    them; an empty role when there was none.
    """
    status = read_status(run_dir, node)
    return (status.role, status.role_epoch) if status is not None else ("", 0)


def last_role(run_dir: Path, node: str) -> str:
    """What the agent before this one, of the same run, took the node's role to be; empty when there
    was none.
    """
    return last_role_order(run_dir, node)[0]

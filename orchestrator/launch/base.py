"""What every launcher does: it brings the processes of one resolved cluster up, keeps them up, and
takes them down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from splitserve.orchestrator.agent.status_file import NodeStatus
    from splitserve.orchestrator.config import ClusterConfig


class StartError(Exception):
    """The cluster cannot be brought up; what was started has to be stopped. ``details`` are lines
    for people.
    """

    def __init__(self, message: str, details: tuple[str, ...] = ()) -> None:
        self.details = details
        super().__init__(message)


@dataclass(frozen=True)
class ClusterStatus:
    """One look at a cluster."""

    router: str
    """``starting``, ``waits for nodes``, ``ready``, ``dead`` (waits for a restart), ``failed``, or
    ``lost`` (of several, with its host).
    """
    nodes: dict[str, NodeStatus | None]
    """By node name; None before its agent has spoken."""
    cache: str = ""
    """``starting``, ``ready``, ``dead`` (waits for a restart) or ``failed``; empty for a cluster
    without a cache.
    """
    more_routers: dict[str, str] = field(default_factory=dict)
    """Like ``router``: each one beside the first, by name."""

    @property
    def is_ready(self) -> bool:
        """Whether the routers that are not lost answer and use every node, and the cache can be
        used.
        """
        routers = {self.router, *self.more_routers.values()}
        return (
            "ready" in routers
            and routers <= {"ready", "lost"}
            and self.cache in ("", "ready")
            and all(
                status is not None
                and status.phase == "ready"
                and status.router_connected
                and not status.refused
                for status in self.nodes.values()
            )
        )


class Launcher(Protocol):
    """Holds the processes of one cluster."""

    config: ClusterConfig
    """With the replicas that the pools have now."""
    urls: tuple[str, ...]
    """Of the routers, in their order; empty while they are not known."""
    run: str
    """Marker in the environment of every process of the cluster."""
    logs: str
    """Where the logs are, in words."""
    is_adopted: bool
    """Something of the cluster ran before ``start``, and may run on if ``start`` fails."""

    async def start(self) -> None:
        """The router and every agent have been started. Raises ``StartError``, and ``ConfigError``
        when nothing was started.
        """

    async def status(self) -> ClusterStatus:
        """What runs now."""

    def failure(self) -> StartError | None:
        """Why the cluster cannot become ready (or whole again), None while it can."""

    def broken(self) -> StartError | None:
        """Why a cluster that served cannot serve any more: every router, or every node of a role,
        is down for good.
        """

    async def stop(self, drain_s: float) -> None:
        """Nothing that was started lives any more. Running requests get ``drain_s`` to finish."""

    async def leave(self) -> None:
        """What was started lives on without this process. Raises ``StartError`` where it cannot."""

    def hurry(self) -> None:
        """A stop under way no longer waits for anybody."""

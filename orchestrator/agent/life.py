"""One life of an engine, as its agent sees it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.kv_transfer.engine_endpoint import EngineStatus
    from splitserve.orchestrator.agent.engine_process import EngineProcess
    from splitserve.orchestrator.agent.messages import Dismiss, Drain
    from splitserve.orchestrator.agent.readiness import Endpoint


@dataclass
class Life:
    """One start of the engine."""

    node: str
    incarnation: str
    api_key: str
    started: float
    engine: EngineProcess
    endpoint: Endpoint | None = None
    warm_up: dict[str, Any] | None = None
    """What it is asked before it takes part."""
    was_ready: bool = False
    last_answer: float = field(default_factory=time.monotonic)
    latest: EngineStatus | None = None
    """What the engine answered last."""
    drain: Drain | None = None
    dismissals: dict[int, Dismiss] = field(default_factory=dict)
    """By the number of the router that has nothing out on the draining node any more."""
    is_dismissed: bool = False
    """It ends by order of the routers."""
    owed_nothing: bool = False
    """As its engine said when it was dismissed."""
    end: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done, with the reason, when a router wants the engine killed."""

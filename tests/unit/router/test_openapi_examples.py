"""What schemathesis draws from the router's own description, right and wrong: no 5xx, no hang, and
only statuses and content types that are described. The engines behind it are stubs.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import schemathesis
from router_stubs.cluster import SECRET, stub_cluster
from router_stubs.engine import DONE, SSE, Asked, send, stream
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.router.openapi import operations as described

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router_stubs.cluster import StubCluster

ENDLESS = ["/internal/recording", "/internal/events"]
EXAMPLES = 8
"""For each method of each path."""
TIMEOUT_S = 10.0
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]


async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A stream for who asks for one, else an object."""
    try:
        body = json.loads(asked.raw)
    except ValueError:
        body = None
    if isinstance(body, dict) and body.get("stream") is True:
        await stream(writer, b"".join(SSE) + DONE)
    else:
        await send(writer, 200, b"{}")


class ClusterThread:
    """A stub cluster on a thread of its own, since schemathesis is no coroutine."""

    def __init__(self) -> None:
        self.cluster: StubCluster | None = None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)

    async def _run(self) -> None:
        async with stub_cluster("p0", "d0") as cluster:
            for engine in cluster.engines.values():
                engine.answer = answer
            self.cluster = cluster
            self._ready.set()
            await self._over.wait()
            await cluster.idle()

    def stop(self) -> None:
        """Nothing of a request is left, and the thread has ended."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self._loop.close()


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    """The description, from a router that serves."""
    running = ClusterThread()
    assert running.cluster is not None
    try:
        yield schemathesis.openapi.from_url(f"{running.cluster.url}/openapi.json")
    finally:
        running.stop()


def operations() -> list[str]:
    """Method and path of everything that is described and ends."""
    found = [f"{o.method} {o.path}" for o in described(has_cache=False) if o.path not in ENDLESS]
    return sorted(found)


@pytest.mark.parametrize("operation", operations())
def test_examples(api: Any, operation: str) -> None:
    """Operators' paths are called with their token."""
    method, path = operation.split()
    headers = {"Authorization": f"Bearer {operator_token(SECRET)}"}
    drawn = api[path][method]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)

    @hypothesis.settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=hypothesis.strategies.one_of(*(
        drawn.as_strategy(generation_mode=mode) for mode in modes
    )))  # fmt: skip
    def is_answered(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, headers=headers, timeout=TIMEOUT_S)

    is_answered()

"""When an engine is ready: its HTTP server says healthy, its connector's endpoint describes itself,
and it has answered once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import aiohttp
import zmq

from splitserve.orchestrator.config.tls import certificate_error, tls_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from splitserve.kv_transfer.engine_endpoint import EngineDescription, EngineStatus
    from splitserve.kv_transfer.held_prefixes import PrefixReport
    from splitserve.kv_transfer.orders import Retarget
    from splitserve.kv_transfer.transfer_facts import TransferFacts
    from splitserve.orchestrator.agent.engine_http import EngineHttp

_log = logging.getLogger(__name__)

ENDPOINT_ERRORS = (OSError, TimeoutError, zmq.ZMQError)
"""What a call of an endpoint raises when the engine does not answer, or its connection was closed
meanwhile.
"""

T = TypeVar("T")

_POLL_S = 0.25
_CALL_TIMEOUT_S = 2.0


class Endpoint(Protocol):
    """The client of a connector's endpoint
    (``splitserve.kv_transfer.engine_endpoint.EngineEndpointClient``).
    """

    async def describe(self) -> EngineDescription: ...

    async def status(self) -> EngineStatus: ...

    async def prefixes(self, *, from_start: bool) -> PrefixReport: ...

    async def ended_transfers(self) -> tuple[TransferFacts, ...]: ...

    async def fail_transfer(self, transfer_id: str, reason: str) -> None: ...

    async def retarget(self, order: Retarget) -> None: ...

    async def peer_died(self, incarnation: str) -> None: ...

    def close(self) -> None: ...


class WrongEngineError(Exception):
    """Another engine than the one that was started answers on its ports."""


async def answer_of(call: Coroutine[Any, Any, T], timeout_s: float = _CALL_TIMEOUT_S) -> T:
    """What a call of an endpoint returns; else one of ``ENDPOINT_ERRORS``.

    The call runs in a task of its own: closing the connection under it cancels it, and that must
    not cancel the caller.
    """
    task = asyncio.get_running_loop().create_task(call)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()
    if not task.done():
        raise TimeoutError(f"no answer from the engine within {timeout_s:g} s")
    if task.cancelled():
        raise ConnectionResetError("the connection to the engine was closed")
    return task.result()


async def wait_until_ready(
    engine: EngineHttp, connect: Callable[[], Endpoint], incarnation: str
) -> tuple[Endpoint, EngineDescription]:
    """The endpoint's client and description, as soon as the engine serves. Never gives up: the
    caller holds the deadline.

    Raises ``WrongEngineError`` when somebody else listens on the engine's ports.
    """
    await _wait_for_health(engine)
    endpoint = connect()
    try:
        while True:
            try:
                description = await answer_of(endpoint.describe())
                break
            except ENDPOINT_ERRORS as error:
                _log.debug("the connector's endpoint does not answer yet: %r", error)
                await asyncio.sleep(_POLL_S)
        if description.incarnation != incarnation:
            raise WrongEngineError(
                f"the engine on {engine.url} is {description.incarnation}, but {incarnation} "
                "was started: "
                "an engine of an earlier run holds the port"
            )
    except BaseException:
        endpoint.close()
        raise
    return endpoint, description


async def warm_up(engine: EngineHttp, body: dict[str, Any]) -> None:
    """The engine has answered that completion; why not, if it has not, is logged: it serves all the
    same. The caller holds the deadline.
    """
    try:
        async with (
            engine.session(None) as session,
            session.post(f"{engine.url}/v1/completions", json=body) as response,
        ):
            text = await response.text()
            if response.status != 200:
                _log.warning("the warm-up got status %d: %.300s", response.status, text)
    except (aiohttp.ClientError, OSError) as error:
        _log.warning("the warm-up got no answer: %r", error)


async def _wait_for_health(engine: EngineHttp) -> None:
    said = ""
    async with engine.session(_CALL_TIMEOUT_S) as session:
        while True:
            try:
                async with session.get(f"{engine.url}/health") as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                _log.debug("%s/health does not answer yet: %r", engine.url, error)
                failure = certificate_error(error)
                if failure is not None and said != (said := tls_reason(failure)):
                    _log.error("%s cannot be asked: %s", engine.url, said)
            await asyncio.sleep(_POLL_S)

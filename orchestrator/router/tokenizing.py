"""Text becomes tokens at an engine: the router has no tokenizer of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from splitserve.orchestrator.router import headers as header_policy
from splitserve.orchestrator.router.engine_client import EngineAddress
from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from splitserve.orchestrator.agent.messages import NodeDescription
    from splitserve.orchestrator.router.engine_client import EngineClient, RawHeaders

TOKENIZE_PATH = "/tokenize"
ANSWER_LIMIT_BYTES = 64 * 2**20


class _Answer(msgspec.Struct, frozen=True):
    tokens: list[int]


class _Collector:
    """Holds one answer until it is complete, or the reason why it will not be."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.status = 0
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def head_received(self, status: int, headers: RawHeaders) -> None:
        self.status = status

    def body_received(self, data: bytes, is_last: bool) -> None:
        self._size_bytes += len(data)
        if self._size_bytes <= ANSWER_LIMIT_BYTES:
            self._parts.append(data)

    def ended(self) -> None:
        if self._size_bytes > ANSWER_LIMIT_BYTES:
            self.failed(f"its answer has more than {ANSWER_LIMIT_BYTES} bytes")
        elif not self.done.done():
            self.done.set_result(b"".join(self._parts))

    def failed(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(reason))


async def tokenize(
    client: EngineClient, node: NodeDescription, prompt: dict[str, Any], timeout_s: float
) -> list[int]:
    """The tokens of ``prompt`` (fields of vLLM's ``/tokenize``), as ``node`` would compute them.
    Raises ``ApiError``: the engine's own 4xx, 502 for a faulty answer, 504 for none.
    """
    body = orjson.dumps({"model": node.model, **prompt})
    address = EngineAddress.of(node.engine_url)
    host = f"{address.host}:{address.port}"
    head = header_policy.request_head(TOKENIZE_PATH, host, node.engine_api_key, b"", len(body))
    answer = _Collector()
    leg = client.send(address, [head, body], answer)
    try:
        async with asyncio.timeout(timeout_s):
            data = await answer.done
    except TimeoutError:
        raise ApiError(504, f"{node.node} has not tokenised within {timeout_s:g} s") from None
    except ConnectionError as error:
        raise ApiError(502, f"{node.node} does not tokenise: {error}") from error
    finally:
        leg.cancel()
    if answer.status != 200:
        status = answer.status if 400 <= answer.status < 500 else 502
        text = data[:1000].decode(errors="replace")
        raise ApiError(status, f"{node.node} does not tokenise ({answer.status}): {text}")
    try:
        return msgspec.json.decode(data, type=_Answer).tokens
    except msgspec.DecodeError as error:
        raise ApiError(502, f"{node.node} tokenises into what is no list: {error}") from error

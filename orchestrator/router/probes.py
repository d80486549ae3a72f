"""``POST /internal/probe``: a completion that an operator sends to certain nodes, to measure them
(``core/probing``).

The body is that of ``/v1/completions`` with one field more: ``nodes``, an object with ``decode``
and, for a split request, ``prefill``. The prompt has to be token ids, so that nothing is estimated.
The answer is the engine's own, streamed or not, as any client would get it; a probe that cannot be
placed at once gets 429.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from splitserve.orchestrator.core.events import Pinned, RequestArrived
from splitserve.orchestrator.router import headers as header_policy
from splitserve.orchestrator.router.client_request import read_client_request
from splitserve.orchestrator.router.endpoints import COMPLETIONS
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.exchange import Exchange

if TYPE_CHECKING:
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.http_request import HttpRequest
    from splitserve.orchestrator.router.http_server import HttpConnection

PROBE_PATH = "/internal/probe"
PROBE = "probe"
"""The endpoint of probes in timelines and metrics."""


class Probes:
    """Sends probes; holds nothing of them."""

    def __init__(self, driver: CoreDriver, served_name: str) -> None:
        self._driver = driver
        self._models = frozenset({served_name})
        self._numbers = itertools.count(1)

    def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        """The probe is on its way or refused. Raises ``ApiError`` for a body that is none."""
        pinned, raw = _read(request.body)
        body = read_client_request(COMPLETIONS, raw, self._models)
        prompt = body.fields["prompt"]
        if not (isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt)):
            raise ApiError(400, "the prompt of a probe is an array of token ids", param="prompt")
        if pinned.prefill and body.alone_because:
            raise ApiError(400, f"this request cannot be split: {body.alone_because}")
        body.can_continue = False
        own_id = f"{PROBE}-{self._driver.name}-{next(self._numbers):x}"
        exchange = Exchange(
            self._driver,
            own_id,
            body,
            header_policy.to_engines(request.headers, own_id),
            own_id,
            None,
            connection,
        )
        connection.listener = exchange
        arrived = RequestArrived(
            own_id,
            PROBE,
            len(prompt),
            body.output_tokens,
            body.is_streaming,
            "" if pinned.prefill else PROBE,
            pinned=pinned,
        )
        self._driver.admit(exchange, arrived)


def _read(raw: bytes) -> tuple[Pinned, bytes]:
    """The nodes, and the completion's body. Raises ``ApiError``."""
    try:
        fields: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from None
    nodes = fields.pop("nodes", None) if isinstance(fields, dict) else None
    try:
        return msgspec.convert(nodes, Pinned), orjson.dumps(fields)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"'nodes' says where a probe goes: {error}", param="nodes") from None
    except TypeError as error:
        raise ApiError(400, f"the request body cannot be sent on: {error}") from None

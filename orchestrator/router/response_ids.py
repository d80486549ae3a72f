"""Ids of responses (``/v1/responses``) that say which engine holds the response.

vLLM keeps a response, its messages and its background work in the memory of the engine that made
it, so whatever refers to it has to go there. The router therefore names each response itself (the
body's ``request_id``): some random bytes, a mark of the engine's life, and a MAC over both and the
tenant. It keeps nothing, another router of the cluster reads the same ids, and a tenant who learns
of another one's id has no use for it.
"""

from __future__ import annotations

import re
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from splitserve.kv_transfer.channel import is_mac, mac
from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from splitserve.orchestrator.core.membership import Membership

_RANDOM_BYTES = 8
_LIFE_BYTES = 8
_ID: Final = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{32})")
PURPOSE = "response id"


class ResponseIds:
    """Makes and reads ids for one cluster."""

    def __init__(self, secret: bytes, membership: Membership) -> None:
        self._secret = secret
        self._membership = membership
        self._life_of = lru_cache(maxsize=1024)(self._life)

    def new(self, tenant: str, incarnation: str) -> str:
        """An id for a response that this engine is to make for that tenant."""
        named = secrets.token_bytes(_RANDOM_BYTES) + self._life_of(incarnation)
        return f"resp_{(named + self._mac(tenant, named)).hex()}"

    def refuse_chosen(self, chosen: object) -> None:
        """Raise ``ApiError`` 400 for a client's own ``request_id`` that looks like one of these:
        it would take another response's place.
        """
        if type(chosen) is str and _ID.fullmatch(chosen):
            message = "'request_id' has the form of the ids that are given out here"
            raise ApiError(400, message, param="request_id")

    def holder(self, response_id: str, tenant: str) -> str:
        """The incarnation of the engine that holds the response. Raises ``ApiError`` 404 when there
        is none, or the response is not that tenant's.
        """
        found = _ID.fullmatch(response_id)
        shown = response_id[:100]
        if found is not None:
            named, seal = (bytes.fromhex(part) for part in found.groups())
            if is_mac(seal, self._secret, PURPOSE, tenant.encode(), named):
                for node in self._membership.nodes.values():
                    incarnation = node.description.incarnation
                    if self._life_of(incarnation) == named[_RANDOM_BYTES:]:
                        return incarnation
                raise _not_found(f"'{shown}' not found: its engine has left or was restarted.")
        raise _not_found(f"'{shown}' not found.")

    def _life(self, incarnation: str) -> bytes:
        return mac(self._secret, "engine's life", incarnation.encode())[:_LIFE_BYTES]

    def _mac(self, tenant: str, named: bytes) -> bytes:
        return mac(self._secret, PURPOSE, tenant.encode(), named)


def _not_found(what: str) -> ApiError:
    """As vLLM says it."""
    message = f"Response with id {what}"
    return ApiError(404, message, param="response_id", kind="invalid_request_error")

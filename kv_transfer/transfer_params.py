"""The transfer parameters that the router puts on a leg, and the MAC without which a connector
ignores them.

They travel as ``kv_transfer_params`` of the engine's OpenAI request, under the single key
``splitserve``.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Literal

import msgspec

KEY = "splitserve"
"""The key inside ``kv_transfer_params``; the router removes what a client sent under any key."""


class TransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a leg is part of."""

    transfer_id: str
    role: Literal["prefill", "decode", "alone"]
    """``alone``: the request takes part in no transfer."""
    attempt: int = 1
    peer_incarnation: str
    """Incarnation of the node on the other side of this leg."""
    peer_addresses: tuple[str, ...] = ()
    """Decode legs: control endpoint of each rank of the prefill node, in rank order."""
    resumed_tokens: int = 0
    """The last so many tokens of the prompt are an answer's beginning, which another engine has
    sent.
    """
    tenant: str = ""
    """Tag of the tenant whose request it is, for the cache's quotas; empty where there are none."""
    marks: bytes = b""
    """Of the prompt without that beginning, see ``prefix_marks``; concatenated digests."""
    prompt_bytes: int = 0
    """What the places of the marks relate to."""
    traceparent: str = ""
    """W3C trace context of the router's span of this leg; empty when the request is not traced."""


class BadTransferParamsError(ValueError):
    """Transfer parameters that are malformed or whose MAC does not fit: the request is served
    without a transfer.
    """


def _mac(secret: bytes, payload: bytes) -> str:
    return hashlib.blake2b(
        payload, key=secret[:64], digest_size=16, person=b"splitserve-leg"
    ).hexdigest()


def seal(params: TransferParams, secret: bytes) -> dict[str, Any]:
    """The value for the request's ``kv_transfer_params``."""
    payload = msgspec.json.encode(params)
    return {KEY: {"leg": payload.decode(), "mac": _mac(secret, payload)}}


def unseal(kv_transfer_params: dict[str, Any] | None, secret: bytes) -> TransferParams | None:
    """The parameters of a leg, None for a request that is not part of a transfer.

    Raises ``BadTransferParamsError`` when there are some but they were not made with ``secret``.
    """
    if not isinstance(kv_transfer_params, dict) or KEY not in kv_transfer_params:
        return None
    sealed = kv_transfer_params[KEY]
    if not (
        isinstance(sealed, dict)
        and isinstance(sealed.get("leg"), str)
        and isinstance(sealed.get("mac"), str)
    ):
        raise BadTransferParamsError(
            "kv_transfer_params.splitserve must hold 'leg' and 'mac' strings"
        )
    # A client may have written these: any text, unpaired surrogates too.
    payload = sealed["leg"].encode(errors="surrogatepass")
    given = sealed["mac"].encode(errors="surrogatepass")
    if not hmac.compare_digest(_mac(secret, payload).encode(), given):
        raise BadTransferParamsError(
            "kv_transfer_params.splitserve carries a MAC that this cluster did not make"
        )
    try:
        return msgspec.json.decode(payload, type=TransferParams)
    except msgspec.DecodeError as error:
        raise BadTransferParamsError(
            f"kv_transfer_params.splitserve cannot be read: {error}"
        ) from error


def resumed_tokens(kv_transfer_params: dict[str, Any] | None, secret: bytes) -> int:
    """How many tokens at the prompt's end are an answer's beginning; 0 for what this cluster has
    not sealed.
    """
    try:
        params = unseal(kv_transfer_params, secret)
    except BadTransferParamsError:
        return 0
    return params.resumed_tokens if params is not None else 0

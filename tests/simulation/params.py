"""What the router puts on its legs, as ``Exchange`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from splitserve.kv_transfer.transfer_params import TransferParams

if TYPE_CHECKING:
    from simulation.clients import Client
    from splitserve.orchestrator.core import effects as ef


def leg_params(
    order: ef.StartPair | ef.StartPrefill | ef.StartDecode,
    role: Literal["prefill", "decode"],
    client: Client,
) -> TransferParams:
    """The parameters of one leg of a pair."""
    is_decode = role == "decode"
    marks, prompt_bytes = client.marks if is_decode or not client.tokens else (b"", 0)
    return TransferParams(
        transfer_id=order.transfer_id,
        role=role,
        attempt=order.attempt,
        peer_incarnation=(order.prefill if is_decode else order.decode).incarnation,
        peer_addresses=order.prefill.control_addresses if is_decode else (),
        resumed_tokens=len(client.tokens) if is_decode else 0,
        marks=marks,
        prompt_bytes=prompt_bytes,
    )


def alone_params(client: Client, attempt: int) -> TransferParams | None:
    """Those of a leg that takes part in no transfer."""
    marks, prompt_bytes = client.marks
    if not (marks or client.tokens):
        return None
    return TransferParams(
        transfer_id=f"{client.request_id}.{attempt}",
        role="alone",
        attempt=attempt,
        peer_incarnation="",
        resumed_tokens=len(client.tokens),
        marks=marks,
        prompt_bytes=prompt_bytes,
    )

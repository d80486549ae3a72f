"""What operators and the cache server say to each other fits into a packet and is read back."""

from __future__ import annotations

import msgspec
import pytest

from splitserve.kv_transfer.cache.control_messages import (
    ARGUMENTS,
    ArenaStat,
    ChunksWish,
    ClearWish,
    Done,
    LookedUp,
    LookupWish,
    Quotas,
    QuotaWish,
    Refused,
    Result,
    Stat,
    StatWish,
    TenantStat,
    TierStat,
)
from splitserve.kv_transfer.cache.keys import KEY_BYTES
from splitserve.kv_transfer.cache.messages import (
    KEYS_LIMIT,
    MESSAGE_LIMIT_BYTES,
    FromClient,
    FromServer,
    Manage,
    Managed,
)

KEYS = bytes(KEYS_LIMIT * KEY_BYTES)
WISHES = {
    "stat": StatWish(),
    "lookup": LookupWish(keys=KEYS, limit_s=1.0),
    **{
        verb: ChunksWish(keys=KEYS, tier="a-tier-with-a-long-name", limit_s=1.0)
        for verb in ("pin", "unpin", "prefetch", "move")
    },
    "clear": ClearWish(tenant="ab", limit_s=1.0),
    "quota": QuotaWish(tenant="*", tier="cpu", limit_bytes=None, changes=True),
}


@pytest.mark.parametrize("verb", ARGUMENTS)
def test_a_wish_fits_and_is_read_back(verb: str) -> None:
    """Also one about the longest prompt."""
    wish = WISHES[verb]
    arguments = msgspec.msgpack.encode(wish)
    packet = msgspec.msgpack.encode(Manage(request_id=2**40, verb=verb, arguments=arguments))
    assert len(packet) <= MESSAGE_LIMIT_BYTES
    message = msgspec.msgpack.decode(packet, type=FromClient)
    assert isinstance(message, Manage)
    assert msgspec.msgpack.decode(message.arguments, type=ARGUMENTS[message.verb]) == wish


@pytest.mark.parametrize(
    "result",
    [
        Stat(
            server="s",
            uptime_s=1.0,
            chunk_tokens=256,
            arena=ArenaStat(bytes=4, slots=2, slot_bytes=2),
            tiers=(TierStat(name="cpu", type="cpu"),),
            tenants=(TenantStat(tenant="ab", used_bytes={"cpu": 1}),),
        ),
        LookedUp(chunks=1, by_tier={"cpu": 1}),
        Done(chunks=1, bytes=2, missing=3),
        Quotas(tenants=()),
        Refused(error="why"),
    ],
    ids=lambda result: type(result).__name__,
)
def test_a_result_is_read_back(result: Result) -> None:
    """As what it was."""
    told: FromServer = Managed(request_id=1, result=msgspec.msgpack.encode(result))
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=FromServer)
    assert isinstance(message, Managed)
    assert msgspec.msgpack.decode(message.result, type=Result) == result

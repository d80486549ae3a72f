"""What a running cache server says of itself, asked on its socket as the router does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.control_messages import Result, Stat, StatWish
from splitserve.kv_transfer.cache.messages import FromServer, Manage, Managed
from splitserve.kv_transfer.cache.socket_path import connected

if TYPE_CHECKING:
    from pathlib import Path

_LIMIT_BYTES = 1 << 20
_message: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromServer)
_result: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Result)


def cache_stat(path: str | Path, limit_s: float = 2.0) -> Stat | None:
    """Its answer to ``stat``; None when there is none in time, or no server."""
    try:
        with connected(path, limit_s) as connection:
            wish = msgspec.msgpack.encode(StatWish())
            packets.send(connection, Manage(request_id=1, verb="stat", arguments=wish))
            answer = _message.decode(connection.recv(_LIMIT_BYTES))
    except OSError:
        return None
    assert isinstance(answer, Managed), answer
    stat = _result.decode(answer.result)
    assert isinstance(stat, Stat), stat
    return stat


def held(stat: Stat) -> list[str]:
    """What an idle cache server should not hold, in words; empty when it holds nothing."""
    arena = stat.arena
    found = [f"{arena.leased} slots are leased"] if arena.leased else []
    found += [f"{arena.reserved} slots are reserved"] if arena.reserved else []
    if arena.used > arena.slots:
        found.append(f"{arena.used} of {arena.slots} slots are used")
    for tier in stat.tiers:
        if tier.waiting_bytes:
            found.append(f"{tier.waiting_bytes} bytes wait for {tier.name}")
        if tier.capacity_bytes is not None and (tier.used_bytes or 0) > tier.capacity_bytes:
            found.append(f"{tier.name} holds {tier.used_bytes} of {tier.capacity_bytes} bytes")
    return found

"""A thread that plays a host's cache server towards operators: answers as it is told, remembers
what it was asked.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kv_transfer.cache.control_messages import (
    ARGUMENTS,
    ArenaStat,
    ChunksWish,
    ClearWish,
    Done,
    EngineStat,
    LookedUp,
    LookupWish,
    Quotas,
    QuotaWish,
    Refused,
    Result,
    Stat,
    TenantStat,
    TierStat,
)
from splitserve.kv_transfer.cache.keys import KEY_BYTES
from splitserve.kv_transfer.cache.messages import (
    MESSAGE_LIMIT_BYTES,
    FromClient,
    FromServer,
    Manage,
    Managed,
    Watch,
)
from splitserve.kv_transfer.cache.socket_path import short_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CHUNK_TOKENS = 128
CHUNK_BYTES = 1000


@dataclass
class CacheServerStub:
    """What it was asked, and what it says."""

    path: Path
    asked: list[tuple[str, Any]] = field(default_factory=list)
    """Verb and arguments."""
    held: int = 0
    """Chunks of each prompt that there are, from the first one on."""
    quotas: dict[str, dict[str, int]] = field(default_factory=dict)
    refusal: str = ""
    raw_answer: Callable[[Manage], bytes | None] | None = None
    """Its packet, None for silence."""
    tenants: tuple[TenantStat, ...] = ()

    @property
    def section(self) -> dict[str, Any]:
        """The cluster's ``cache:``."""
        tiers = [
            {"type": "cpu", "capacity_bytes": 10**6},
            {"type": "disk", "capacity_bytes": 10**7, "path": str(self.path.parent)},
        ]
        return {"chunk_tokens": CHUNK_TOKENS, "socket_path": str(self.path), "tiers": tiers}

    def answer(self, verb: str, wish: Any) -> Result:
        """As a cache server with ``held`` chunks of everything would."""
        if self.refusal:
            return Refused(error=self.refusal)
        if isinstance(wish, LookupWish | ChunksWish):
            asked = len(wish.keys) // KEY_BYTES
            there = min(asked, self.held)
            if isinstance(wish, LookupWish):
                return LookedUp(chunks=there, by_tier={"cpu": there // 2, "disk": there}, pinned=1)
            return Done(chunks=there, bytes=there * CHUNK_BYTES, missing=asked - there)
        if isinstance(wish, ClearWish):
            return Done(chunks=self.held, bytes=self.held * CHUNK_BYTES)
        if isinstance(wish, QuotaWish):
            if wish.changes and wish.tenant is not None:
                bounds = self.quotas.setdefault(wish.tenant, {})
                bounds.pop(wish.tier, None)
                if wish.limit_bytes is not None:
                    bounds[wish.tier] = wish.limit_bytes
            return Quotas(
                tenants=tuple(TenantStat(tenant=t, quota_bytes=q) for t, q in self.quotas.items())
            )
        return self._stat()

    def _stat(self) -> Stat:
        disk = TierStat(name="disk", type="disk", state="breaker open", trouble="disk is gone")
        cpu = TierStat(
            name="cpu",
            type="cpu",
            capacity_bytes=10**6,
            used_bytes=5 * CHUNK_BYTES,
            chunks=5,
            hits=3,
            misses=1,
            latency_s=0.0015,
            bytes_per_s=2e9,
        )
        return Stat(
            server="life-1",
            uptime_s=61.0,
            chunk_tokens=CHUNK_TOKENS,
            arena=ArenaStat(bytes=10**6, slots=1000, slot_bytes=CHUNK_BYTES, used=5, leased=1),
            tiers=(cpu, disk),
            tenants=self.tenants,
            engines=(EngineStat(engine="prefill-0-1", rank=-1, model=bytes(32)),),
            counters={"broken": 2},
        )


@contextlib.contextmanager
def cache_server_stub(path: Path) -> Iterator[CacheServerStub]:
    """It listens on ``path`` until the block ends."""
    stub = CacheServerStub(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with short_address(path) as address:
        server.bind(address)
    server.listen()
    thread = threading.Thread(target=_serve, args=(stub, server))
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()
        server.close()
        os.unlink(path)


def _serve(stub: CacheServerStub, server: socket.socket) -> None:
    """One connection after the other; those that got no answer stay open until the end."""
    with contextlib.ExitStack() as connections:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connections.enter_context(connection)
            packet = connection.recv(MESSAGE_LIMIT_BYTES + 1)
            if not packet:
                continue
            message: FromClient = msgspec.msgpack.decode(packet, type=FromClient)
            if isinstance(message, Watch):
                continue  # Nothing comes and goes here.
            assert isinstance(message, Manage)
            wish = msgspec.msgpack.decode(message.arguments, type=ARGUMENTS[message.verb])
            stub.asked.append((message.verb, wish))
            if stub.raw_answer is not None:
                answer = stub.raw_answer(message)
            else:
                result = msgspec.msgpack.encode(stub.answer(message.verb, wish))
                told: FromServer = Managed(request_id=message.request_id, result=result)
                answer = msgspec.msgpack.encode(told)
            if answer is not None:
                with contextlib.suppress(BrokenPipeError):
                    connection.send(answer)
                connection.shutdown(socket.SHUT_WR)

"""Stores of every kind with one tier on each, and a way around the tier."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import obstore
import redis
from obstore.store import from_url

from splitserve.kv_transfer.cache.arena import PAGE_BYTES
from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tiers.registry import create
from support.arena_tier import ArenaTier
from support.memory_tier import MemoryTier

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.kv_transfer.cache.tiers.base import Tier
    from support.store_servers import S3Server

MIB = 1 << 20
WAIT_S = 60.0


class Store(Protocol):
    """A store with one tier on it, and a way around the tier."""

    tier: Tier
    turn: AbstractContextManager[Any]
    """Held by writers of one key: moto answers two at once with errors of its own, and of two
    engines that would save a chunk one has its slot.
    """

    def put(self, key: bytes, content: bytes) -> None:
        """Somebody else stores this."""

    def take(self, key: bytes) -> bytes | None:
        """Somebody else removes what is stored, and has it."""


class MemoryStore:
    turn = nullcontext()

    def __init__(self, room_bytes: int = 64 * MIB) -> None:
        self.tier = MemoryTier(room_bytes)

    def put(self, key: bytes, content: bytes) -> None:
        self.tier.chunks[key] = content

    def take(self, key: bytes) -> bytes | None:
        return self.tier.chunks.pop(key, None)


class ArenaStore:
    """The ``cpu`` tier; its slots have room for something longer than a chunk."""

    def __init__(self, slots: int, body_bytes: int, *, pins: bool = False) -> None:
        self.turn = threading.Lock()
        self.tier = ArenaTier(slots, body_bytes + PAGE_BYTES, pins=pins)

    def put(self, key: bytes, content: bytes) -> None:
        self.tier.put(key, content)

    def take(self, key: bytes) -> bytes | None:
        return self.tier.take(key)


class DiskStore:
    turn = nullcontext()

    def __init__(self, folder: Path, io: str, capacity_bytes: int = MIB) -> None:
        self._folder = folder / "chunks"
        self._settings = TierSettings(
            type="disk", url=f"file://{folder}", capacity_bytes=capacity_bytes, options={"io": io}
        )
        self.tier = create(self._settings)

    def reopen(self) -> None:
        self.tier.close()
        self.tier = create(self._settings)

    def put(self, key: bytes, content: bytes) -> None:
        self._file(key).parent.mkdir(exist_ok=True)
        self._file(key).write_bytes(content)

    def take(self, key: bytes) -> bytes | None:
        file = self._file(key)
        if not file.exists():
            return None
        content = file.read_bytes()
        file.unlink()
        return content

    def names(self) -> set[str]:
        """Every file but the lock."""
        return {path.name for path in self._folder.rglob("*") if path.is_file()} - {"lock"}

    def _file(self, key: bytes) -> Path:
        return self._folder / key.hex()[-2:] / key.hex()


class RedisStore:
    turn = nullcontext()

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port, socket_timeout=WAIT_S)
        self._client.flushall()
        self.tier = create(TierSettings(type="redis", url=f"redis://127.0.0.1:{port}"))

    def put(self, key: bytes, content: bytes) -> None:
        self._client.set(self._name(key), content)

    def take(self, key: bytes) -> bytes | None:
        content: bytes | None = self._client.getdel(self._name(key))
        return content

    def _name(self, key: bytes) -> str:
        return f"splitserve:{key.hex()}"

    def close(self) -> None:
        self._client.close()


class S3Store:
    turn = threading.Lock()

    def __init__(self, server: S3Server, part_bytes: int) -> None:
        server.reset()
        server.make_bucket("chunks")
        options = {
            "endpoint": server.endpoint,
            "region": "us-east-1",
            "access_key": "me",
            "secret_key": "mine",
            "part_bytes": str(part_bytes),
        }
        url = "s3://chunks/of/tests"
        self.tier = create(TierSettings(type="s3", url=url, options=options))
        config = {"access_key_id": "you", "secret_access_key": "yours", "region": "us-east-1"}
        config["endpoint"] = server.endpoint
        self._store = from_url(url, config=config, client_options={"allow_http": True})  # type: ignore[arg-type]

    def put(self, key: bytes, content: bytes) -> None:
        obstore.put(self._store, key.hex(), content, use_multipart=False)

    def take(self, key: bytes) -> bytes | None:
        try:
            content = bytes(obstore.get(self._store, key.hex()).bytes())
        except FileNotFoundError:
            return None
        obstore.delete(self._store, key.hex())
        return content

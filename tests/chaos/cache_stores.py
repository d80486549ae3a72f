"""The shared cache that is tormented: its section of the YAML with small bounds, its Redis, its
disk, and what can be done to them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import redis
from support.cache_probe import cache_stat
from support.small_disk import SmallDisk, fill, spoil
from support.store_servers import redis_server

from chaos.cluster import Ports

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from splitserve.kv_transfer.cache.control_messages import Stat

SECTION = """
cache:
  chunk_tokens: 64
  socket_path: {socket}
  lookup_timeout_s: 0.25
  load_timeout_s: 3
  tiers:
    - {{type: cpu, capacity_bytes: 2 MiB}}
    - {{type: disk, capacity_bytes: {capacity}, path: {disk}}}
    - type: redis
      url: redis://127.0.0.1:{port}/0
      options: {{timeout_s: "1", connect_timeout_s: "1"}}
"""
DISK_BYTES, CAPACITY_BYTES = 4 << 20, 2 << 20
REDIS_MEMORY = "12mb"
SHARE_OF_FILES = 0.3
REDIS_TIMEOUT_S = 5.0


class CacheStores:
    """Owns a Redis that evicts, and a small file system where one may be mounted."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "cache.sock"
        self._disk = SmallDisk(folder / "disk", DISK_BYTES)
        self.can_be_full = self._disk.is_mounted
        self.server = redis_server(
            Ports().run_of(1),
            folder,
            "--maxmemory",
            REDIS_MEMORY,
            "--maxmemory-policy",
            "allkeys-lru",
        )

    @property
    def yaml(self) -> str:
        """The section ``cache``."""
        return SECTION.format(
            socket=self.socket,
            capacity=CAPACITY_BYTES,
            disk=self._disk.folder / "tier",
            port=self.server.port,
        )

    def stat(self) -> Stat | None:
        """What the cache server says of itself; None when it does not answer."""
        return cache_stat(self.socket)

    def empty_redis(self) -> int:
        """Nothing is left in it; how many keys there were."""
        with self._client() as client:
            keys: int = client.dbsize()
            client.flushall()
        return keys

    def delete_keys(self, rng: Random) -> int:
        """A random half of the keys is gone; how many those were."""
        with self._client() as client:
            keys: list[bytes] = sorted(client.keys("*"))
            chosen = rng.sample(keys, len(keys) // 2)
            return int(client.delete(*chosen)) if chosen else 0

    def spoil_files(self, rng: Random) -> str:
        """Some chunks are cut in half, have a flipped byte, are empty, or gone; how many each."""
        files = self._disk.chunk_files
        done = {"halved": 0, "flipped": 0, "emptied": 0, "removed": 0}
        for path in rng.sample(files, int(len(files) * SHARE_OF_FILES)):
            way = rng.choice(sorted(done))
            with contextlib.suppress(FileNotFoundError):  # Evicted meanwhile.
                _spoil(path, way, rng)
                done[way] += 1
        return ", ".join(f"{count} {way}" for way, count in done.items())

    def fill_disk(self) -> None:
        """Not a byte of room is left on the disk until ``free_disk``."""
        fill(self._disk.folder / "filler")

    def free_disk(self) -> None:
        """There is room again."""
        (self._disk.folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Redis has ended, the file system is gone."""
        self.server.kill()
        self._disk.close()

    def _client(self) -> redis.Redis:
        return redis.Redis(
            port=self.server.port,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
        )


def _spoil(path: Path, way: str, rng: Random) -> None:
    if way == "removed":
        path.unlink()
    else:
        spoil(path, way, at=rng.randrange(max(1, path.stat().st_size)))

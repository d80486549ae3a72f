"""A Mooncake Store on loopback: a real master, real owners of memory, and a client of its own for
tests.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tiers.registry import create
from support.store_servers import POLL_S, START_DEADLINE_S, STOP_DEADLINE_S, StoreServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.kv_transfer.cache.tiers.base import Tier

MIB = 1 << 20
LEASE_S = 2.0
"""Longer than any read of a test takes."""
OWNER_TTL_S = 4
"""After so long without a sign of life the master gives up an owner's memory."""
UNFINISHED_S = 1
"""After so long a write that was not ended is as if it had not been begun."""
OWNER_PATIENCE_MS = 500
"""With a master that stands still; by default half a minute."""
QUIET = {"MC_LOG_LEVEL": "ERROR"}
_prefixes = itertools.count()


class Master(StoreServer):
    """``mooncake_master``, and the owners of its store's memory. Only their data ports listen on
    more than loopback: Mooncake has no setting for those.
    """

    def __init__(
        self, ports: Callable[[], int], folder: Path, *options: str, address: str = "127.0.0.1"
    ) -> None:
        self.admin_port = ports()
        self.address = address
        self.host = f"[{address}]" if ":" in address else address
        self.owners: list[StoreServer] = []
        self._ports, self._folder = ports, folder
        port = ports()
        command = [
            program("mooncake_master"),
            f"--rpc_address={address}",
            f"--rpc_port={port}",
            f"--metrics_host={address}",
            f"--metrics_port={self.admin_port}",
            f"--default_kv_lease_ttl={LEASE_S * 1000:.0f}ms",
            f"--client_ttl={OWNER_TTL_S}",
            f"--put_start_discard_timeout_sec={UNFINISHED_S}",
            "--logtostderr",
            *options,
        ]
        super().__init__(command, port, folder / f"master-{port}.log")

    def is_listening(self) -> bool:
        try:
            socket.create_connection((self.address, self.port), STOP_DEADLINE_S).close()
        except OSError:
            return False
        return True

    def add_owner(self, megabytes: int) -> StoreServer:
        """A process that gives the store so much memory; it is mounted."""
        port, there = self._ports(), self.segments()
        command = [
            "env",
            f"MC_RPC_TIMEOUT_MS={OWNER_PATIENCE_MS}",
            program("mooncake_client"),
            "--host=127.0.0.1",
            f"--port={port}",
            f"--master_server_address={self.host}:{self.port}",
            "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={megabytes} MB",
        ]
        owner = StoreServer(command, port, self._folder / f"owner-{port}.log")
        self.owners.append(owner)
        self.until_segments(there + 1)
        return owner

    def segments(self) -> int:
        """How many owners' memory is mounted."""
        return len(self.ask("get_all_segments").split())

    def until_segments(self, count: int) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while self.segments() != count:
            assert time.monotonic() < end, f"the master has {self.segments()} segments"
            time.sleep(POLL_S)

    def ask(self, path: str) -> str:
        """What the master says at its metrics port."""
        url = f"http://{self.host}:{self.admin_port}/{path}"
        with urllib.request.urlopen(url, timeout=STOP_DEADLINE_S) as answer:
            return str(answer.read().decode())

    def tier_settings(self, **changes: Any) -> TierSettings:
        """Of a tier on this store; ``changes`` may have other ``options``."""
        options = {"admin_port": str(self.admin_port), **changes.pop("options", {})}
        url = changes.pop("url", f"mooncake://{self.host}:{self.port}")
        return TierSettings(type="mooncake", url=url, options=options, **changes)

    def close(self) -> None:
        """Every process is gone."""
        for server in [*self.owners, self]:
            server.kill()


class Bystander:
    """Mooncake's client in this process: somebody else who uses the store."""

    def __init__(self, master: Master) -> None:
        os.environ |= QUIET
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        where = f"127.0.0.1:{master.port}"
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", where)
        assert code == 0

    def put(self, name: str, content: bytes) -> None:
        """In place of what is there. The store has no empty objects: the shortest one stands in."""
        self.store.remove(name, True)
        assert self.store.put(name, content or b"x") == 0

    def get(self, name: str) -> bytes | None:
        content: bytes = self.store.get(name)
        return content or None

    def close(self) -> None:
        self.store.close()


class MooncakePlace:
    """A master with one owner, and tiers on it."""

    def __init__(self, ports: Callable[[], int], folder: Path) -> None:
        self.master = Master(ports, folder)
        self.server: StoreServer = self.master
        self.master.add_owner(64)

    def tier(self, **changes: Any) -> Tier:
        return create(self.master.tier_settings(**changes))

    def renew(self) -> None:
        """The killed master runs again, and has the owner's memory."""
        self.server.start()
        self.master.until_segments(1)


class MooncakeStore:
    """A tier on a store that it shares with others, under a prefix of its own."""

    def __init__(self, master: Master, bystander: Bystander) -> None:
        self.turn = threading.Lock()
        self.prefix = f"test-{next(_prefixes)}:"
        self.bystander = bystander
        self.tier = create(master.tier_settings(options={"prefix": self.prefix}))

    def put(self, key: bytes, content: bytes) -> None:
        self.bystander.put(self.name(key), content)

    def take(self, key: bytes) -> bytes | None:
        content = self.bystander.get(self.name(key))
        self.bystander.store.remove(self.name(key), True)
        return content

    def name(self, key: bytes) -> str:
        return self.prefix + key.hex()


def program(name: str) -> str:
    """The path of one of Mooncake's programs."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / name)

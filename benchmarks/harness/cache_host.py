"""A cache server as a process, and a single engine with this project's connector beside it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from harness.client import stream_completion
from harness.engine import EngineSpec
from harness.systems import Served, SplitserveSystem
from splitserve.kv_transfer.cache.settings import CacheClientConfig, CacheSettings, TierSettings
from splitserve.kv_transfer.cache.socket_path import is_listening

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    import aiohttp

START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0


class CacheServerProcess(contextlib.AbstractContextManager["CacheServerProcess"]):
    """The cache server of a host, with memory and a disk; leaving the block stops it."""

    def __init__(self, folder: Path, chunk_tokens: int, arena_bytes: int, disk_bytes: int) -> None:
        folder.mkdir(parents=True)
        self.chunk_tokens = chunk_tokens
        self.socket = folder / "cache.sock"
        settings = CacheSettings(
            socket_path=str(self.socket),
            chunk_tokens=chunk_tokens,
            tiers=(
                TierSettings(type="cpu", capacity_bytes=arena_bytes),
                TierSettings(type="disk", capacity_bytes=disk_bytes, url=str(folder / "disk")),
            ),
        )
        (folder / "cache.json").write_bytes(msgspec.json.encode(settings))
        command = [sys.executable, "-m", "splitserve.kv_transfer.cache", str(folder / "cache.json")]
        with (folder / "cache.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)

    def __enter__(self) -> CacheServerProcess:
        deadline = time.monotonic() + START_DEADLINE_S
        while not is_listening(self.socket):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise OSError("the cache server does not start; see cache.log")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_DEADLINE_S)


@dataclass
class LoneSystem(SplitserveSystem):
    """One engine with the connector, asked without a transfer; with or without a cache."""

    core: int = 0
    cache: CacheServerProcess | None = None

    def specs(self) -> list[EngineSpec]:
        super().specs()
        side = self._side(1)
        extra = side["transfer_config"]["kv_connector_extra_config"]
        del extra["warm_addresses"]
        if self.cache is not None:
            client = CacheClientConfig(
                socket_path=str(self.cache.socket), chunk_tokens=self.cache.chunk_tokens
            )
            extra["cache"] = msgspec.to_builtins(client)
        return [EngineSpec(self.name, self.core, self.flags, **side)]

    async def serve(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Served:
        return Served(await stream_completion(session, self.engines[0].url, body))

"""The whole product as its user runs it: ``splitserve up`` on a cluster YAML, requests through the
router.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import psutil
import yaml

from harness.client import stream_completion
from harness.engine import (
    ENGINE_BYTES_BESIDE_KV,
    READY_DEADLINE_S,
    SERVED_NAME,
    EngineStartError,
    free_port,
)
from harness.systems import Served, System

if TYPE_CHECKING:
    from pathlib import Path

    from harness.engine import EngineFlags
    from harness.systems import Placement

STOP_DEADLINE_S = 90.0


def cluster(
    name: str,
    flags: EngineFlags,
    place: Placement,
    transport: str,
    port: int,
    logs: Path,
    sections: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The YAML: one prefill and one decode node with the flags of every other engine of the run.

    ``sections`` are further ones, such as ``cache``.
    """

    def pool(core: int) -> dict[str, Any]:
        return {
            "cpus": [[core]],
            "kv_cache_bytes": flags.kv_cache_bytes,
            "env": {"VLLM_SERVER_DEV_MODE": "1"},
            "engine_args": {
                "dtype": "float32",
                "block_size": flags.block_tokens,
                "max_model_len": flags.max_model_len,
                "enforce_eager": True,
            },
            "transfer": {"transport": transport},
        }

    return {
        **(sections or {}),
        "name": name,
        "model": {"path": str(flags.model), "served_name": SERVED_NAME},
        "router": {"port": port},
        "prefill": pool(place.prefill_core),
        "decode": pool(place.decode_core),
        "observability": {"log_dir": str(logs / "cluster")},
    }


@dataclass
class RoutedSystem(System):
    """A system behind one URL; whoever started it stops it."""

    url: str = ""

    async def serve(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Served:
        return Served(await stream_completion(session, self.url, body))


class RunningCluster:
    """A running cluster of a YAML with a name and a router's port; leaving the block stops it."""

    def __init__(self, described: dict[str, Any], logs: Path, needed_bytes: int = 0) -> None:
        self.url = f"http://127.0.0.1:{described['router']['port']}"
        self._needed = needed_bytes
        self._log = logs / "up.log"
        self._config = logs / "cluster.yaml"
        self.name: str = described["name"]
        self._sizes = {pool: described[pool].get("replicas", 1) for pool in ("prefill", "decode")}
        self._config.write_text(yaml.safe_dump(described))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    async def start(self) -> None:
        """The router and all nodes are ready. Raises ``EngineStartError``."""
        if psutil.virtual_memory().available < self._needed:
            raise EngineStartError(f"a cluster needs about {self._needed / 1e9:.1f} GB of memory")
        process = self._process = self._launch()
        deadline = time.monotonic() + READY_DEADLINE_S
        async with aiohttp.ClientSession() as session:
            while not await self._is_ready(session):
                if process.poll() is not None or time.monotonic() > deadline:
                    last = self._log.read_text(errors="replace").splitlines()[-40:]
                    raise EngineStartError("the cluster is not ready:\n" + "\n".join(last))
                await asyncio.sleep(0.25)

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "splitserve.orchestrator.cli.main", "up"]
        with self._log.open("wb") as output:
            return subprocess.Popen(
                [*command, str(self._config)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._log.parent,
                start_new_session=True,
            )

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health") as response:
                nodes = (await response.json())["ready_nodes"]
                return bool(nodes == self._sizes)
        except (aiohttp.ClientError, TimeoutError):
            return False

    def operator_headers(self) -> dict[str, str]:
        """What the router's doors for operators ask for."""
        from splitserve.orchestrator.launch.files import ClusterFiles

        token = ClusterFiles(self.name).token_path.read_text()
        return {"Authorization": f"Bearer {token}"}

    def engine_headers(self, engine_url: str) -> dict[str, str]:
        """What this engine's own door asks for; its key is known to its process and its agent."""
        assert self._process is not None
        port = engine_url.rsplit(":", 1)[1]
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if ("--port", port) in pairwise(words):
                    return {"Authorization": f"Bearer {process.environ()['VLLM_API_KEY']}"}
        raise LookupError(f"no engine process for {engine_url}")

    def __exit__(self, *_: object) -> None:
        """``up`` stops what it started; what is left after its deadline is killed."""
        if self._process is None:
            return
        tree = [self._process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            tree += [p.pid for p in psutil.Process(self._process.pid).children(recursive=True)]
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_DEADLINE_S)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(timeout=STOP_DEADLINE_S)


class Product(RunningCluster):
    """One prefill and one decode node with the flags of every other engine of the run."""

    def __init__(
        self,
        flags: EngineFlags,
        place: Placement,
        transport: str,
        logs: Path,
        sections: dict[str, Any] | None = None,
    ) -> None:
        name, port = f"bench-{os.getpid()}", free_port()
        described = cluster(name, flags, place, transport, port, logs, sections)
        super().__init__(described, logs, 2 * (ENGINE_BYTES_BESIDE_KV + flags.kv_cache_bytes))

    def as_system(self, flags: EngineFlags, place: Placement) -> RoutedSystem:
        """For rounds beside other systems."""
        return RoutedSystem("router", flags, place, url=self.url)

"""Engine processes for measurements: started by command line, the whole process tree on one core,
stopped with certainty.

Every system that is compared gets the same flags, the same cores and the same environment; what
differs is the ``--kv-transfer-config`` and what a peer needs beside it. After an engine is ready
all its threads are pinned again: vLLM's NixlConnector moves the computing thread to the last core
of the NUMA node when it is constructed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from harness.link import Namespace

READY_DEADLINE_S = 600.0
STOP_DEADLINE_S = 20.0
SERVED_NAME = "bench"
ENGINE_BYTES_BESIDE_KV = 2_500_000_000
"""What one engine's three processes take without their KV cache (a 135M model in float32)."""


class EngineStartError(Exception):
    """An engine ended or stayed silent while starting; the message holds the last lines of its
    log.
    """


@dataclass(frozen=True)
class EngineFlags:
    """What is equal for every engine of one run."""

    model: Path
    kv_cache_bytes: int = 400_000_000
    max_model_len: int = 4096
    block_tokens: int = 128
    extra: tuple[str, ...] = ()
    """Further vLLM flags, the same on every engine."""

    def arguments(self) -> list[str]:
        """vLLM's command-line flags, without host, port and transfer configuration."""
        return [
            *("--model", str(self.model), "--served-model-name", SERVED_NAME),
            *("--dtype", "float32", "--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
            *("--max-model-len", str(self.max_model_len), "--block-size", str(self.block_tokens)),
            *("--enforce-eager", "--disable-uvicorn-access-log"),
            *self.extra,
        ]


@dataclass(frozen=True)
class EngineSpec:
    """One engine of a run."""

    name: str
    core: int
    flags: EngineFlags
    transfer_config: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    python_path: tuple[Path, ...] = ()
    namespace: Namespace | None = None
    """Network namespace to run in; its management address is the one the client uses."""


@dataclass
class Engine:
    """A running engine. Whoever started it stops it."""

    spec: EngineSpec
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    started_in_s: float = 0.0

    def tree(self) -> list[psutil.Process]:
        """The engine's processes that still live, the API server first."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pin(self) -> None:
        """Every thread of the tree may run on the engine's core only."""
        for process in self.tree():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for task in os.listdir(f"/proc/{process.pid}/task"):
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(task), {self.spec.core})

    def cpu_seconds(self) -> float:
        """CPU time of the tree so far; the difference over an idle stretch says what an idle
        engine costs.
        """
        total = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_bytes(self) -> int:
        """Proportional set size of the tree: shared pages are counted once over all engines."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def last_log_lines(self, count: int = 40) -> str:
        """The end of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def stop(self) -> None:
        """No process of the tree lives afterwards."""
        tree = self.tree()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(tree, timeout=STOP_DEADLINE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=STOP_DEADLINE_S)


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago (the whole namespace of the caller)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(spec: EngineSpec, log_folder: Path) -> Engine:
    """The engine's process runs; it is not ready yet."""
    host = spec.namespace.management_address if spec.namespace else "127.0.0.1"
    port = free_port()
    command = ["taskset", "-c", str(spec.core), sys.executable, "-m"]
    command += ["vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port)]
    command += spec.flags.arguments()
    if spec.transfer_config is not None:
        command += ["--kv-transfer-config", json.dumps(dict(spec.transfer_config))]
    if spec.namespace:
        command = spec.namespace.wrap(command)
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": str(spec.core),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "SPLITSERVE_SLEEPING_WAITS": "1",
        **spec.environment,
    }
    if spec.python_path:
        environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in spec.python_path)
    log_folder.mkdir(parents=True, exist_ok=True)
    log = log_folder / f"{spec.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log_folder,
            start_new_session=True,
        )
    return Engine(spec, f"http://{host}:{port}", log, process)


async def wait_ready(engines: Sequence[Engine], deadline_s: float = READY_DEADLINE_S) -> None:
    """All engines answer ``/health`` and are pinned.

    Raises ``EngineStartError`` when one ended or the deadline passed.
    """
    begun = time.monotonic()
    waiting = list(engines)
    async with aiohttp.ClientSession() as session:
        while waiting:
            for engine in list(waiting):
                if engine.process.poll() is not None:
                    raise EngineStartError(f"{engine.spec.name} ended:\n{engine.last_log_lines()}")
                if await _is_healthy(session, engine.url):
                    engine.pin()
                    engine.started_in_s = time.monotonic() - begun
                    waiting.remove(engine)
            if time.monotonic() - begun > deadline_s:
                silent = waiting[0]
                raise EngineStartError(
                    f"{silent.spec.name} not ready in {deadline_s:.0f} s:\n"
                    f"{silent.last_log_lines()}"
                )
            await asyncio.sleep(0.25)


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=2)
        async with session.get(f"{url}/health", timeout=timeout) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


class EnginePark(contextlib.AbstractContextManager["EnginePark"]):
    """The engines of one run; leaving the block stops all of them, whatever happened inside."""

    def __init__(self, log_folder: Path) -> None:
        self.log_folder = log_folder
        self.engines: list[Engine] = []

    def __exit__(self, *_: object) -> None:
        self.stop(self.engines)

    async def start(self, specs: Sequence[EngineSpec]) -> list[Engine]:
        """All of ``specs`` run and are ready; they load at the same time.

        Raises ``EngineStartError``, before anything is started, when memory is too short for them.
        """
        needed = sum(ENGINE_BYTES_BESIDE_KV + spec.flags.kv_cache_bytes for spec in specs)
        available = psutil.virtual_memory().available
        if available < needed:
            raise EngineStartError(
                f"{len(specs)} engines need about {needed / 1e9:.1f} GB, "
                f"{available / 1e9:.1f} GB are free beside {len(self.engines)} running ones: "
                "compare fewer systems at a time"
            )
        started = []
        for spec in specs:
            engine = launch(spec, self.log_folder)
            self.engines.append(engine)
            started.append(engine)
        await wait_ready(started)
        return started

    def stop(self, engines: Sequence[Engine]) -> None:
        """``engines`` have ended and their memory is free again."""
        for engine in list(engines):
            engine.stop()
            self.engines.remove(engine)

    def memory_bytes(self) -> int:
        """What all running engines hold together."""
        return sum(engine.memory_bytes() for engine in self.engines)

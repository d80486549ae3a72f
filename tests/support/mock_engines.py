"""Mock engines as processes of their own, and a pair of them driven without a router: the test
sends both legs itself.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from splitserve.kv_transfer.engine_endpoint import EngineEndpointClient, EngineStatus
from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.engines.command import secret_environment
from splitserve.orchestrator.launch.files import write_private
from splitserve.orchestrator.launch.ports import is_free
from support.standing_still import tell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

SECRET = bytes(range(32))
API_KEY = "the engines' key"
MODEL = "mock"
BLOCK_TOKENS = 32
LAYERS = 4
POLL_S = 0.01
START_DEADLINE_S = 60.0
DEADLINE_S = 20.0
"""For what happens at once where the machine is free; less than a lease of its default length, so
that an end of the lease is not taken for it.
"""

_ports = itertools.count(20_000 + os.getpid() % 500 * 20)
_transfers = itertools.count(1)


@dataclass(frozen=True)
class EngineOptions:
    """What a test varies."""

    role: str = "decode"
    transport: str = "tcp"
    tensor_parallel: int = 1
    kv_cache_bytes: int = 2 * 2**20
    lease_s: float = 30.0
    deadline_s: float = 30.0
    stream_min_bytes: int = 4096
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


class EngineHandle:
    """A running mock engine: asked over HTTP, and through the endpoint that its agent uses."""

    def __init__(self, name: str, url: str, endpoint: str, secret: bytes, api_key: str) -> None:
        self.name = name
        self.url = url
        self.idle_blocks = 0
        self._endpoint_address = endpoint
        self._secret = secret
        self._api_key = api_key
        self._endpoint: EngineEndpointClient | None = None

    @property
    def endpoint(self) -> EngineEndpointClient:
        """The agent's way in."""
        if self._endpoint is None:
            self._endpoint = EngineEndpointClient(self._endpoint_address, self._secret)
        return self._endpoint

    async def note_idle(self) -> None:
        """It is idle now: so many blocks are free then."""
        self.idle_blocks = (await self.status()).free_blocks

    async def status(self) -> EngineStatus:
        """What the connector says now."""
        return await self.endpoint.status()

    async def until(
        self, condition: Callable[[EngineStatus], bool], what: str, limit_s: float = DEADLINE_S
    ) -> EngineStatus:
        """The first status for which ``condition`` holds."""
        end = time.monotonic() + limit_s
        while not condition(status := await self.status()):
            assert time.monotonic() < end, f"{self.name}: no {what}: {status}\n{self.story()}"
            await asyncio.sleep(POLL_S)
        return status

    async def until_idle(self) -> EngineStatus:
        """Nothing runs, waits, is open or held, and every block is free."""
        return await self.until(
            lambda s: (
                (s.running, s.waiting, s.open_transfers, s.leased_blocks, s.free_blocks)
                == (0, 0, 0, 0, self.idle_blocks)
            ),
            "return to idle",
        )

    async def faults(self, **faults: Any) -> None:
        """Set what goes wrong; without arguments everything is well again."""
        async with (
            self._session() as session,
            session.put(f"{self.url}/mock/faults", json=faults) as response,
        ):
            assert response.status == 200, await response.text()

    async def ask(
        self, body: dict[str, Any], *, path: str = "/v1/completions"
    ) -> tuple[int, dict[str, Any]]:
        """(status, JSON) of one request; cancelling it closes the connection."""
        async with (
            self._session() as session,
            session.post(
                f"{self.url}{path}",
                data=io.BytesIO(json.dumps(body).encode()),  # aiohttp warns of large bytes
                headers={"Content-Type": "application/json"},
            ) as response,
        ):
            return response.status, await response.json()

    def story(self) -> str:
        """What is known of it, for a failed test."""
        return self.url

    def close(self) -> None:
        """Close the connection to the endpoint."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._api_key}"},
            timeout=aiohttp.ClientTimeout(total=3 * DEADLINE_S),
        )


class MockProcess(EngineHandle):
    """A mock engine that the test starts. ``name`` appears in its log's file name; with
    ``first_port`` it takes the ports of another one.
    """

    def __init__(
        self, name: str, options: EngineOptions, folder: Path, first_port: int | None = None
    ) -> None:
        self.options = options
        self.incarnation = f"{name}-{secrets.token_hex(4)}"
        first = first_port or _free_ports(2 + options.tensor_parallel)
        self.port, self.endpoint_port, self.control_port = first, first + 1, first + 2
        self.control_addresses = tuple(
            f"tcp://127.0.0.1:{self.control_port + rank}" for rank in range(options.tensor_parallel)
        )
        self.log_path = folder / f"{self.incarnation}.log"
        self._secret_path = folder / f"{self.incarnation}.secret"
        self.process: subprocess.Popen[bytes] | None = None
        endpoint = f"tcp://127.0.0.1:{self.endpoint_port}"
        super().__init__(name, f"http://127.0.0.1:{self.port}", endpoint, SECRET, API_KEY)

    def start(self) -> None:
        """The process runs; ``wait_until_ready`` says when it serves."""
        options = self.options
        connector = {
            "incarnation": self.incarnation,
            "endpoint_port": self.endpoint_port,
            "control_port_base": self.control_port,
            "transport": options.transport,
            "lease_s": options.lease_s,
            "transfer_deadline_s": options.deadline_s,
            "stream_min_bytes": options.stream_min_bytes,
            "role": options.role,
        }
        command = [sys.executable, "-m", "splitserve.orchestrator.engines.mock.server"]
        command += ["--model", MODEL, "--port", str(self.port), "--enable-faults"]
        command += ["--block-size", str(BLOCK_TOKENS), "--num-layers", str(LAYERS)]
        command += ["--kv-cache-memory-bytes", str(options.kv_cache_bytes)]
        command += ["--tensor-parallel-size", str(options.tensor_parallel)]
        command += ["--max-model-len", "2048", "--max-num-batched-tokens", "256"]
        command += ["--kv-transfer-config", json.dumps({"kv_connector_extra_config": connector})]
        write_private(self._secret_path, SECRET.hex().encode())
        env = {**os.environ, **secret_environment(self._secret_path, API_KEY), **options.env}
        env.setdefault("UCX_NET_DEVICES", "lo")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    async def wait_until_ready(self) -> None:
        """The engine serves and its endpoint describes it."""
        assert self.process is not None
        async with asyncio.timeout(START_DEADLINE_S), aiohttp.ClientSession() as session:
            while True:
                assert self.process.poll() is None, self.story()
                try:
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(POLL_S)
        assert (await self.endpoint.describe()).incarnation == self.incarnation
        await self.note_idle()

    def signal(self, number: signal.Signals) -> None:
        """To the engine's process."""
        assert self.process is not None
        tell(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs (or is stopped)."""
        return self.process is not None and self.process.poll() is None

    def story(self) -> str:
        """The end of its log."""
        return f"--- {self.log_path.name}\n{self.log_path.read_text(errors='replace')[-4000:]}"

    def close(self) -> None:
        """Nothing of it is left."""
        super().close()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


@dataclass
class Pair:
    """A prefill and a decode engine."""

    prefill: MockProcess
    decode: MockProcess

    def legs(
        self, prompt: str | list[int], tokens: int, transfer_id: str | None = None, **fields: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The bodies of (prefill leg, decode leg), as a router would send them."""
        transfer_id = transfer_id or f"t-{next(_transfers)}"
        for_prefill = TransferParams(
            transfer_id=transfer_id, role="prefill", peer_incarnation=self.decode.incarnation
        )
        for_decode = TransferParams(
            transfer_id=transfer_id,
            role="decode",
            peer_incarnation=self.prefill.incarnation,
            peer_addresses=self.prefill.control_addresses,
        )
        common = {"model": MODEL, "prompt": prompt, "ignore_eos": True, **fields}
        return (
            {**common, "max_tokens": 1, "kv_transfer_params": seal(for_prefill, SECRET)},
            {**common, "max_tokens": tokens, "kv_transfer_params": seal(for_decode, SECRET)},
        )

    async def answer(
        self, prompt: str | list[int], tokens: int = 16, **fields: Any
    ) -> tuple[str, dict[str, Any]]:
        """(text, usage) of a split request; both legs have ended well."""
        legs = self.legs(prompt, tokens, **fields)
        (p_status, p_body), (d_status, d_body) = await asyncio.gather(
            self.prefill.ask(legs[0]), self.decode.ask(legs[1])
        )
        assert p_status == 200, p_body
        assert d_status == 200, d_body
        return d_body["choices"][0]["text"], d_body["usage"]

    async def until_idle(self) -> None:
        """Both engines hold nothing."""
        await self.decode.until_idle()
        await self.prefill.until_idle()

    def story(self) -> str:
        """The ends of both logs."""
        return f"{self.prefill.story()}\n{self.decode.story()}"


@asynccontextmanager
async def running(*engines: MockProcess) -> AsyncIterator[None]:
    """The engines serve inside, and are gone afterwards."""
    try:
        for engine in engines:
            engine.start()
        await asyncio.gather(*(engine.wait_until_ready() for engine in engines))
        yield
    finally:
        for engine in engines:
            engine.close()


def pair_of(
    folder: Path, prefill: EngineOptions | None = None, decode: EngineOptions | None = None
) -> Pair:
    """Two engines, not started."""
    return Pair(
        MockProcess("prefill", prefill or EngineOptions("prefill"), folder),
        MockProcess("decode", decode or EngineOptions("decode"), folder),
    )


def _free_ports(count: int) -> int:
    """The first of ``count`` free loopback ports in a row, others each time."""
    while True:
        first = next(_ports)
        run = range(first, first + count)
        if all(is_free(port, "127.0.0.1") for port in run):
            for _ in run[1:]:
                next(_ports)
            return first

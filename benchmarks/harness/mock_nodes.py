"""A cluster of mock engines with the times of a profile, whose nodes take any split of roles."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import yaml

from harness.engine import EngineStartError, free_port
from harness.product import Product
from splitserve.orchestrator.config.loading import parse
from splitserve.orchestrator.router.app import limits_of
from splitserve.orchestrator.tuner.profile import write_profile

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.core.limits import CoreLimits
    from splitserve.orchestrator.tuner.profile import Profile

READY_DEADLINE_S = 90.0
SETTLE_DEADLINE_S = 60.0
LAYERS, HEADS = 2, 2


class MockNodes(Product):
    """A running cluster; leaving the block stops it."""

    def __init__(
        self, profile: Profile, logs: Path, *, prefill: int, decode: int, **router: float
    ) -> None:
        self._names = [f"prefill-{n}" for n in range(prefill)]
        self._names += [f"decode-{n}" for n in range(decode)]
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._needed = 0
        self._log = logs / "up.log"
        self._config = logs / "cluster.yaml"
        self.name = f"bench-{os.getpid()}"
        self._process = None
        path = logs / "profile.json"
        path.write_bytes(write_profile(profile))
        limits = profile.limits
        token_bytes = profile.kv_bytes_per_token
        pool: dict[str, Any] = {
            # One block is never given to a request
            "kv_cache_bytes": (limits.total_blocks + 1) * limits.block_tokens * token_bytes,
            "engine_args": {
                "block_size": limits.block_tokens,
                "max_model_len": limits.max_model_len,
                "max_num_seqs": limits.sequences,
                "max_num_batched_tokens": limits.step_tokens,
                "num_layers": LAYERS,
                "num_kv_heads": HEADS,
                "kv_head_bytes": token_bytes // (LAYERS * HEADS),
                "profile": str(path),
            },
            "transfer": {"transport": "tcp"},
        }
        described = {
            "name": self.name,
            "engine": "mock",
            "model": {"path": "mock", "served_name": profile.model},
            "router": {"port": port, "prefill_batch_tokens": limits.step_tokens, **router},
            "prefill": pool | {"replicas": prefill},
            "decode": pool | {"replicas": decode},
            "observability": {"log_dir": str(logs / "cluster"), "log_level": "warning"},
        }
        text = yaml.safe_dump(described)
        self._config.write_text(text)
        self.core_limits: CoreLimits = limits_of(parse(text))

    async def start(self) -> None:
        """The router and all nodes are ready. Raises ``EngineStartError``."""
        process = self._process = self._launch()
        deadline = time.monotonic() + READY_DEADLINE_S
        async with aiohttp.ClientSession() as session:
            while not await self._is_ready(session):
                if process.poll() is not None or time.monotonic() > deadline:
                    last = self._log.read_text(errors="replace").splitlines()[-40:]
                    raise EngineStartError("the cluster is not ready:\n" + "\n".join(last))
                await asyncio.sleep(0.25)

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        with suppress(aiohttp.ClientError, OSError):
            return len(await self._nodes(session)) == len(self._names)
        return False

    async def take_roles(self, session: aiohttp.ClientSession, prefill: int) -> None:
        """So many nodes have the role of prefill, the others that of decode, and none owes
        anything. Raises ``RuntimeError`` when that cannot be.
        """
        roles = dict.fromkeys(self._names[prefill:], "decode")
        roles |= dict.fromkeys(self._names[:prefill], "prefill")
        for node, role in roles.items():
            url = f"{self.url}/internal/nodes/{node}/flip"
            body = {"role": role, "force": True}
            async with session.post(url, json=body, headers=self.operator_headers()) as response:
                answer = await response.json()
                if answer.get("verdict") not in ("flipped", "same_role"):
                    raise RuntimeError(f"{node} does not become {role}: {answer}")
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        while True:
            nodes = await self._nodes(session)
            owed = {name: nodes[name] for name in nodes if _owes(nodes[name])}
            if not owed and {name: nodes[name]["role"] for name in nodes} == roles:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the nodes do not settle: {owed}")
            await asyncio.sleep(0.1)

    async def _nodes(self, session: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
        """What the router says of each node that is usable."""
        url = f"{self.url}/internal/status"
        async with session.get(url, headers=self.operator_headers()) as response:
            nodes = (await response.json())["nodes"]
        return {name: node for name, node in nodes.items() if node["is_usable"]}

    def router_cpu_s(self) -> float:
        """CPU time of the router so far."""
        assert self._process is not None
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "splitserve.orchestrator.router" in process.cmdline():
                    times = process.cpu_times()
                    return float(times.user + times.system)
        raise LookupError("the router has no process")


def _owes(node: dict[str, Any]) -> bool:
    keys = ("prefill_legs", "decode_legs", "open_transfers", "leased_blocks")
    return any(node[key] for key in keys)

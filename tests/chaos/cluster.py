"""The cluster that is tormented: its YAML with short bounds, its processes by node, and what its
router says of it.
"""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
from support.up_process import UpProcess, kill

from chaos.relay import LISTEN_HOST, RelayProcess
from splitserve.orchestrator.launch.ports import FREE_RANGE, is_free

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LINKS = ("http", "control", "data")
STATUS_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Bounds:
    """The configured bounds, short enough that a run sees each of them end something."""

    queue_timeout_s: float = 10.0
    first_token_deadline_s: float = 8.0
    request_deadline_s: float = 20.0
    node_silence_limit_s: float = 1.5
    engine_silence_limit_s: float = 6.0
    connect_timeout_s: float = 1.0
    lease_s: float = 3.0
    transfer_deadline_s: float = 5.0
    retarget_wait_s: float = 1.0
    recovery_limit_s: float = 60.0
    """No key of the YAML: a node that is not back after this is lost, and the run has failed."""


VLLM_BOUNDS = Bounds(
    queue_timeout_s=40.0,
    first_token_deadline_s=60.0,
    request_deadline_s=120.0,
    node_silence_limit_s=3.0,
    engine_silence_limit_s=20.0,
    lease_s=15.0,
    transfer_deadline_s=30.0,
    retarget_wait_s=2.0,
    recovery_limit_s=400.0,
)
"""Its steps take longer, and its start tens of seconds."""


@dataclass(frozen=True)
class Shape:
    """What is started."""

    prefill: int = 2
    decode: int = 2
    engine: str = "mock"
    model: str = "mock"
    transport: str = "tcp"
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(f"prefill-{n}" for n in range(self.prefill)) + tuple(
            f"decode-{n}" for n in range(self.decode)
        )


MOCK_ARGS = (
    "{block_size: 32, max_model_len: 1024, max_num_batched_tokens: 512, seconds_per_step: 0.008}"
)
VLLM_ARGS = "{dtype: float32, block_size: 32, max_model_len: 512, max_num_seqs: 8}"

CLUSTER = """
name: chaos
engine: {engine}
model: {{path: {model}, served_name: m}}
allow_shared_devices: true
router:
  port: {router}
  queue_timeout_s: {bounds.queue_timeout_s}
  first_token_deadline_s: {bounds.first_token_deadline_s}
  request_deadline_s: {bounds.request_deadline_s}
  node_silence_limit_s: {bounds.node_silence_limit_s}
  connect_timeout_s: {bounds.connect_timeout_s}
prefill: &pool
  replicas: {prefill}
  {cpus_of_prefill}
  kv_cache_bytes: {kv}
  engine_args: {engine_args}
  advertise_host: {host}
  port_base: {prefill_ports[0]}
  transfer: &transfer
    transport: {transport}
    stream_min_bytes: 4096
    lease_s: {bounds.lease_s}
    deadline_s: {bounds.transfer_deadline_s}
    retarget_wait_s: {bounds.retarget_wait_s}
    port_base: {prefill_ports[1]}
    data_port_base: {prefill_ports[2]}
decode:
  <<: *pool
  replicas: {decode}
  {cpus_of_decode}
  port_base: {decode_ports[0]}
  transfer: {{<<: *transfer, port_base: {decode_ports[1]}, data_port_base: {decode_ports[2]}}}
supervision:
  restart_delay_s: 0.1
  restart_delay_limit_s: 0.5
  restart_window_s: 5
  restart_limit: 1000000
  engine_silence_limit_s: {bounds.engine_silence_limit_s}
  drain_timeout_s: 2
  stop_timeout_s: 3
"""


class ChaosCluster:
    """`splitserve up` of such a cluster, with a relay before every node."""

    def __init__(self, shape: Shape, folder: Path, cache: str = "") -> None:
        """``cache`` is the YAML's section of that name."""
        self.shape = shape
        ports = Ports()
        pools = {
            pool: [ports.run_of(size * count) for size in (2, 1, 1)]
            for pool, count in (("prefill", shape.prefill), ("decode", shape.decode))
        }
        router = ports.run_of(1)
        self.url = f"http://127.0.0.1:{router}"
        self.links = _links(shape, pools)
        config = folder / "cluster.yaml"
        config.write_text(_yaml(shape, pools, router) + cache)
        self.relay = RelayProcess(self.links, os.environ)
        self.up = UpProcess(config, folder)

    def processes_of(self, node: str) -> NodeProcesses:
        """Who belongs to a node now; empty lists for what does not live."""
        for process in self.up.processes():
            line = _line_of(process)
            if f"splitserve.orchestrator.agent --node {node} " in line and "tether" not in line:
                return NodeProcesses.below(process)
        return NodeProcesses()

    def router_pid(self) -> int | None:
        """The router's process, None while there is none."""
        pids = self.up.pids("splitserve.orchestrator.router --config")
        return pids[0] if pids else None

    async def status(self, session: aiohttp.ClientSession) -> dict[str, Any] | None:
        """What the router says of itself and its nodes; None when it does not answer."""
        try:
            async with session.get(
                f"{self.url}/internal/status", timeout=aiohttp.ClientTimeout(total=STATUS_TIMEOUT_S)
            ) as answer:
                found: dict[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    def has_left(self, node: str) -> bool:
        """Whether the node has left for good, as `up` says."""
        return f"{node} has left the cluster" in self.up.output()

    def stop(self) -> list[str]:
        """Ask it to stop; what went wrong with that."""
        self.up.interrupt()
        try:
            status = self.up.wait_for_end(30)
        except Exception as error:
            return [f"`up` did not end: {error!r}"]
        left = [str(process) for process in self.up.processes()]
        problems = [f"left after `up` ended: {process}" for process in left]
        return problems if status == 0 else [f"`up` ended with status {status}", *problems]

    def close(self) -> None:
        """Nothing is left, whatever happened."""
        self.up.close()
        self.relay.close()


@dataclass(frozen=True)
class NodeProcesses:
    """An agent, its guard, and the guard's tree: the engine, main process first."""

    agent: int | None = None
    guard: int | None = None
    engine: tuple[int, ...] = ()
    vital: tuple[int, ...] = ()
    """Those of the engine that it cannot live without."""

    @classmethod
    def below(cls, agent: psutil.Process) -> NodeProcesses:
        """What this agent has started."""
        try:
            for child in agent.children():
                if "splitserve.orchestrator.agent.guard" in _line_of(child):
                    tree = child.children(recursive=True)
                    vital = tuple(
                        process.pid
                        for number, process in enumerate(tree)
                        if number == 0 or _line_of(process).startswith("VLLM::")
                    )
                    return cls(agent.pid, child.pid, tuple(p.pid for p in tree), vital)
        except psutil.Error:
            return cls()
        return cls(agent.pid)


VLLM_LINE = re.compile(r"\((APIServer|EngineCore|Worker)\S* pid=")
OWN_CODE = re.compile(r"/(kernels|kv_transfer|prefill_node|decode_node|orchestrator)/\w+")


def log_faults(up: UpProcess) -> list[str]:
    """Lines of the cluster's logs that no fault excuses: what a process itself did not expect. A
    process of vLLM tells the death of another one as a traceback through its own code.
    """
    found = []
    for path in up.logs():
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if not ("Traceback (most recent call last)" in line or "IllegalTransition" in line):
                continue
            story = "\n".join(lines[max(0, number - 2) : number + 30])
            if not VLLM_LINE.match(line) or OWN_CODE.search(story):
                found.append(f"{path.name}\n{story}")
    return found


def _line_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _links(shape: Shape, pools: Mapping[str, list[int]]) -> dict[str, int]:
    """``NODE/LINK`` to port."""
    links = {}
    for node in shape.nodes:
        pool, _, index = node.partition("-")
        for link, base, step in zip(LINKS, pools[pool], (2, 1, 1), strict=True):
            links[f"{node}/{link}"] = base + step * int(index)
    return links


def _yaml(shape: Shape, pools: Mapping[str, list[int]], router: int) -> str:
    is_mock = shape.engine == "mock"
    cores = sorted(os.sched_getaffinity(0))
    cpus = {
        pool: ""
        if is_mock
        else f"cpus: {[[cores[(first + n) % len(cores)]] for n in range(count)]}"
        for pool, first, count in (
            ("prefill", 0, shape.prefill),
            ("decode", shape.prefill, shape.decode),
        )
    }
    return CLUSTER.format(
        engine=shape.engine,
        model=shape.model,
        router=router,
        bounds=shape.bounds,
        prefill=shape.prefill,
        decode=shape.decode,
        cpus_of_prefill=cpus["prefill"],
        cpus_of_decode=cpus["decode"],
        kv="4 MiB" if is_mock else "64 MiB",
        engine_args=MOCK_ARGS if is_mock else VLLM_ARGS,
        host=LISTEN_HOST,
        transport=shape.transport,
        prefill_ports=pools["prefill"],
        decode_ports=pools["decode"],
    )


class Ports:
    """Runs of ports that are free on both addresses."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._draw = random.SystemRandom()

    def run_of(self, length: int) -> int:
        while True:
            first = self._draw.randrange(FREE_RANGE.start, FREE_RANGE.stop - length)
            run = range(first, first + length)
            hosts = (LISTEN_HOST, "127.0.0.1")
            if self._taken.isdisjoint(run) and all(is_free(p, h) for p in run for h in hosts):
                self._taken.update(run)
                return first


def kill_all(pids: tuple[int | None, ...]) -> None:
    """SIGKILL to each that is one."""
    kill(pid for pid in pids if pid is not None)


def told(record: Any) -> str:
    """For a failed run's story."""
    return json.dumps(record, default=str)

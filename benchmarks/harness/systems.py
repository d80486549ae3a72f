"""The systems that are compared, each as "how are its engines started" and "how is one request
served".

``plain``       one vLLM engine without a connector: the answer that all others must give
``again``       a second start of ``plain``: what two starts differ by
``pull``        vLLM's NixlConnector: P answers, then D reads the pages
``push``        vLLM's NixlPushConnector: both legs at once, P writes after its prefill
``splitserve``  this project's connector: both legs at once, P writes while it computes
``whole``       the same with ``stream_min_bytes`` beyond any prompt: everything is sent after the
last layer

The peers are *tuned*: a progress thread that does not spin, computing threads on their own core
(see ``engine_side``) and waits that sleep. The suffix ``-shipped`` leaves them as they are. The
client dispatches both legs itself, so no router is in any system's path.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.client import Answered, Streamed, complete, stream_completion
from harness.engine import Engine, EnginePark, EngineSpec, free_port

if TYPE_CHECKING:
    import aiohttp

    from harness.engine import EngineFlags
    from harness.link import ShapedLink

ENGINE_SIDE = Path(__file__).resolve().parent / "engine_side"
NIXL_PROGRESS_DELAY_US = 1000
NEVER_STREAM_BYTES = 2**40


@dataclass(frozen=True)
class Placement:
    """Where P and D of a run live."""

    prefill_core: int = 0
    decode_core: int = 1
    link: ShapedLink | None = None


@dataclass(frozen=True)
class Served:
    """One request through a system."""

    streamed: Streamed
    prefill: Answered | None = None
    transfer_id: str = ""

    @property
    def sent(self) -> float:
        """When the first leg left."""
        return min(self.streamed.sent, self.prefill.sent if self.prefill else self.streamed.sent)

    @property
    def ttft(self) -> float:
        """Seconds from the first leg's sending to D's first token."""
        return self.streamed.events[0] - self.sent

    @property
    def hand_over(self) -> float | None:
        """Seconds from P's own HTTP answer to D's first token; None without a prefill leg."""
        return self.streamed.events[0] - self.prefill.answered if self.prefill else None


@dataclass
class System:
    """A system whose engines may run or not; the base is the plain engine."""

    name: str
    flags: EngineFlags
    placement: Placement
    engines: list[Engine] = field(default_factory=list)

    def specs(self) -> list[EngineSpec]:
        """The engines to start."""
        return [EngineSpec(self.name, self.placement.prefill_core, self.flags)]

    async def start(self, park: EnginePark) -> None:
        """The engines are ready."""
        self.engines = await park.start(self.specs())

    async def serve(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Served:
        """Serve one completion; the decode leg is streamed."""
        return Served(await stream_completion(session, self.engines[0].url, body))

    def _pair(self, prefill: dict[str, Any], decode: dict[str, Any]) -> list[EngineSpec]:
        """P's and D's engine; the dictionaries hold what differs between them."""
        place = self.placement
        ends = (place.link.prefill, place.link.decode) if place.link else (None, None)
        p = (f"{self.name}-p", place.prefill_core, self.flags)
        d = (f"{self.name}-d", place.decode_core, self.flags)
        return [
            EngineSpec(*p, namespace=ends[0], **prefill),
            EngineSpec(*d, namespace=ends[1], **decode),
        ]

    def _ucx_environment(self, side: int) -> dict[str, str]:
        """Over a link UCX gets TCP on the shaped device only."""
        if not self.placement.link:
            return {}
        end = (self.placement.link.prefill, self.placement.link.decode)[side]
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": end.data_device}

    def _address(self, side: int) -> str:
        if not self.placement.link:
            return "127.0.0.1"
        return (self.placement.link.prefill, self.placement.link.decode)[side].data_address


def _prefill_body(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    dropped = ("return_token_ids", "min_tokens", "ignore_eos", "logprobs")
    kept = {key: value for key, value in body.items() if key not in dropped}
    return {**kept, "max_tokens": 1, "stream": False, "kv_transfer_params": params}


@dataclass
class NixlSystem(System):
    """vLLM's own connector pair, pulling."""

    connector: str = "NixlConnector"
    tuned: bool = True
    side_ports: list[int] = field(default_factory=list)

    def specs(self) -> list[EngineSpec]:
        self.side_ports = [free_port(), free_port()]
        sides: list[dict[str, Any]] = []
        for side, role in enumerate("pd"):
            environment = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": self._address(side),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_ports[side]),
                **self._ucx_environment(side),
            }
            if self.tuned:
                environment["NIXL_PROGRESS_DELAY_US"] = str(NIXL_PROGRESS_DELAY_US)
            else:
                environment["SPLITSERVE_SLEEPING_WAITS"] = "0"
            config = {"kv_connector": self.connector, "kv_role": "kv_both"}
            sides.append(
                {
                    "transfer_config": {**config, "engine_id": f"{self.name}-{role}"},
                    "environment": environment,
                    "python_path": (ENGINE_SIDE,),
                }
            )
        return self._pair(*sides)

    async def start(self, park: EnginePark) -> None:
        await super().start(park)
        if not self.tuned:
            return
        for engine in self.engines:
            if "progress delay" not in engine.log.read_text(errors="replace"):
                raise RuntimeError(f"{engine.spec.name}: NIXL's progress delay was not applied")

    async def serve(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Served:
        prefill_engine, decode_engine = self.engines
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        prefill = await complete(session, prefill_engine.url, _prefill_body(body, params))
        leg = {**body, "kv_transfer_params": prefill.body["kv_transfer_params"]}
        return Served(await stream_completion(session, decode_engine.url, leg), prefill)


@dataclass
class NixlPushSystem(NixlSystem):
    """vLLM's push connector: one request id, both legs at once."""

    connector: str = "NixlPushConnector"

    async def serve(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Served:
        prefill_engine, decode_engine = self.engines
        request_id = uuid.uuid4().hex
        headers = {"X-Request-Id": request_id}
        decode_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{self.name}-p",
            "remote_request_id": f"cmpl-{request_id}-0",
            "remote_host": self._address(0),
            "remote_port": self.side_ports[0],
            "tp_size": 1,
            "pp_size": 1,
            "dcp_size": 1,
            "remote_block_ids": [],
            "remote_num_tokens": len(body["prompt"]),
            "transfer_mode": "push",
        }
        prefill_params = {"do_remote_decode": True, "do_remote_prefill": False}
        prefill, streamed = await asyncio.gather(
            complete(session, prefill_engine.url, _prefill_body(body, prefill_params), headers),
            stream_completion(
                session, decode_engine.url, {**body, "kv_transfer_params": decode_params}, headers
            ),
        )
        return Served(streamed, prefill)


@dataclass
class SplitserveSystem(System):
    """This project's connector on both engines, legs dispatched by the client with sealed
    parameters.
    """

    transport: str = "nixl"
    stream_min_bytes: int | None = None
    """None leaves the product's default."""
    fault_file: Path | None = None
    """P's writes are spoilt as this file says at the time: ``none``, ``swap``, ``zero``,
    ``layer``.
    """
    layers: int = 0
    """Attention layers of the model; needed with ``fault_file``."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    incarnations: list[str] = field(default_factory=list)
    control_ports: list[int] = field(default_factory=list)
    transfer_logs: list[Path] = field(default_factory=list)
    log_folder: Path = Path("/tmp")

    def specs(self) -> list[EngineSpec]:
        self.incarnations = [f"{self.name}-{side}-{uuid.uuid4().hex[:12]}" for side in "pd"]
        self.control_ports = [free_port(), free_port()]
        self.transfer_logs = [self.log_folder / f"{name}.jsonl" for name in self.incarnations]
        return self._pair(*(self._side(side) for side in (0, 1)))

    def _side(self, side: int) -> dict[str, Any]:
        from splitserve.orchestrator.config.schema import TransferConfig

        defaults = TransferConfig()
        extra: dict[str, Any] = {
            "transport": self.transport,
            "stream_min_bytes": self.stream_min,
            "control_host": self._address(side),
            "control_port_base": self.control_ports[side],
            "endpoint_port": free_port(),
            "incarnation": self.incarnations[side],
            "lease_s": defaults.lease_s,
            "transfer_deadline_s": defaults.deadline_s,
            "node": f"{self.name}-{'pd'[side]}",
            "role": ("prefill", "decode")[side],
        }
        if side == 1:
            extra["warm_addresses"] = [self.control_address(0)]
        if self.placement.link:
            extra["transport_settings"] = {"host": self._address(side)}
        environment = {
            "SPLITSERVE_SECRET": self.secret.hex(),
            "SPLITSERVE_TRANSFER_LOG": str(self.transfer_logs[side]),
            "UCX_NET_DEVICES": "lo",
            **self._ucx_environment(side),
        }
        path: tuple[Path, ...] = ()
        if self.fault_file and side == 0:
            environment["PLANTED_FAULT_FILE"] = str(self.fault_file)
            environment["PLANTED_FAULT_LAYERS"] = str(self.layers)
            path = (ENGINE_SIDE,)
        config = {
            "kv_connector": "SplitserveConnector",
            "kv_connector_module_path": "splitserve.orchestrator.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "engine_id": self.incarnations[side],
            "kv_connector_extra_config": extra,
        }
        return {"transfer_config": config, "environment": environment, "python_path": path}

    @property
    def stream_min(self) -> int:
        """Bytes that one write has at least, while there is more to come."""
        from splitserve.orchestrator.config.schema import TransferConfig

        return self.stream_min_bytes or TransferConfig().stream_min_bytes

    def control_address(self, side: int) -> str:
        """Where rank 0's transfer thread of a side listens."""
        return f"tcp://{self._address(side)}:{self.control_ports[side]}"

    def leg_parameters(self, transfer_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sealed ``kv_transfer_params`` of the prefill and of the decode leg."""
        from splitserve.kv_transfer.transfer_params import TransferParams, seal

        prefill = TransferParams(
            transfer_id=transfer_id, role="prefill", peer_incarnation=self.incarnations[1]
        )
        decode = TransferParams(
            transfer_id=transfer_id,
            role="decode",
            peer_incarnation=self.incarnations[0],
            peer_addresses=(self.control_address(0),),
        )
        return seal(prefill, self.secret), seal(decode, self.secret)

    async def serve(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Served:
        prefill_engine, decode_engine = self.engines
        transfer_id = uuid.uuid4().hex
        prefill_params, decode_params = self.leg_parameters(transfer_id)
        prefill, streamed = await asyncio.gather(
            complete(session, prefill_engine.url, _prefill_body(body, prefill_params)),
            stream_completion(
                session, decode_engine.url, {**body, "kv_transfer_params": decode_params}
            ),
        )
        return Served(streamed, prefill, transfer_id)


def make_system(
    name: str,
    flags: EngineFlags,
    placement: Placement,
    log_folder: Path,
    transport: str = "nixl",
) -> System:
    """The system of this name, not started. Raises ``ValueError`` naming the known ones."""
    shipped = name.endswith("-shipped")
    base = name.removesuffix("-shipped")
    if base in ("plain", "again"):
        return System(name, flags, placement)
    if base == "pull":
        return NixlSystem(name, flags, placement, tuned=not shipped)
    if base == "push":
        return NixlPushSystem(name, flags, placement, tuned=not shipped)
    if base == "splitserve":
        return SplitserveSystem(name, flags, placement, transport=transport, log_folder=log_folder)
    if base == "whole":
        return SplitserveSystem(
            name,
            flags,
            placement,
            transport=transport,
            stream_min_bytes=NEVER_STREAM_BYTES,
            log_folder=log_folder,
        )
    raise ValueError(f"unknown system {name!r}; known: plain, again, pull, push, splitserve, whole")

"""NIXL: RDMA, NVLink, or on one host a direct copy or TCP, whichever lane UCX finds between two
peers.

One agent per transport, owned by the transport's thread. NIXL's own progress thread stays off: its
Python interface only offers one that spins. So ``poll`` makes the progress on both sides: on a lane
where UCX emulates remote writes (TCP) bytes stop moving while the receiver does not poll.

Pages are described to NIXL once, here per table and there per peer; a write names indices into
both. ``DONE`` comes after the peer's memory holds the bytes, since NIXL flushes the endpoint behind
each write.

A failed write means that UCX has given up the endpoint, so the peer is lost: its incarnation is not
tried again. An idle peer's death is not noticed here; the control channel tells.

UCX listens on the devices that it may use. Unless devices are named, that is loopback only.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from splitserve.kv_transfer.transports import description as envelope
from splitserve.kv_transfer.transports.base import (
    Capabilities,
    PageIndices,
    PagePairing,
    PeerLost,
    Region,
    TransportError,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from splitserve.kv_transfer.transports.events import EventQueue
from splitserve.kv_transfer.transports.pages import Int64Array, check_pairing, wrong_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.transports.settings import TransportSettings

logger = logging.getLogger(__name__)

_BUILDS = ("nixl", "nixl_cu13", "nixl_cu12")
"""Packages that hold the Python interface, the one that picks for itself first."""


class _Description(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    metadata: bytes
    regions: tuple[tuple[int, int], ...]
    device: int = -1
    """Number of the CUDA device that the memory lies on, -1 for host memory."""


@dataclass
class _Table:
    """Pages of this process, described to NIXL; shared by the peers that have the same pairing."""

    handle: Any
    users: int = 0


@dataclass
class _Peer:
    agent: str
    pairing: PagePairing
    local_key: bytes
    remote: Any
    open_writes: dict[int, Any] = field(default_factory=dict)
    lane_known: bool = False


@dataclass
class _Retired:
    """A peer that is not written to any more, until its last write has ended."""

    peer: str
    link: _Peer
    reason: str
    lost: bool


class NixlTransport:
    """Writes pages into peers' registered memory."""

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self._api = _load(settings.net_devices)
        self._errors = _error_types(self._api)
        self._events = EventQueue()
        self._agent: Any = None
        self._registration: Any = None
        self._regions: tuple[Region, ...] = ()
        self._device = -1
        self._tables: dict[bytes, _Table] = {}
        self._peers: dict[str, _Peer] = {}
        self._retired: list[_Retired] = []
        self._last_write_id = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="nixl",
            same_host_only=False,
            target_must_progress=True,
            synchronous=False,
            writer_ends_by="process_death",
        )

    def register(self, regions: Sequence[Region]) -> None:
        """As in the interface; makes the agent, in the thread that owns it from now on."""
        self._regions = tuple(regions)
        devices = {region.device for region in regions}
        if len(devices) > 1:
            raise TransportError(f"the KV lies on several devices: {devices}")
        (device,) = devices
        self._device = -1 if device is None else device
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self._agent = self._api.nixl_agent(self._settings.incarnation, config)
        except self._errors as error:
            raise TransportError(
                f"UCX cannot be used with {_ucx_choice()} ({_said(error)}); name transports and"
                " devices that this machine has, or leave UCX_TLS out"
            ) from error
        if "UCX" not in self._agent.backends:
            raise TransportError("this NIXL has no UCX backend; install the full wheel")
        try:
            number = max(0, self._device)
            ranges = [(region.address, region.length, number, "") for region in regions]
            self._registration = self._agent.register_memory(ranges, _kind(self._device))
        except self._errors as error:
            raise TransportError(f"NIXL cannot register this memory: {_said(error)}") from error
        logger.info("nixl: UCX with %s", _ucx_choice())

    def describe(self) -> bytes:
        return envelope.seal(
            "nixl",
            _Description(
                agent=self._settings.incarnation,
                metadata=self._agent.get_agent_metadata(),
                regions=envelope.regions_to_wire(self._regions),
                device=self._device,
            ),
        )

    def connect(self, peer: str, description: bytes, pairing: PagePairing) -> None:
        """As in the interface. The first contact of two agents takes some 50 ms."""
        told = envelope.unseal("nixl", description, _Description)
        pairing = check_pairing(pairing, self._regions, envelope.regions_from_wire(told.regions))
        self.disconnect(peer)
        local_key = self._share_table(pairing)
        try:
            name = self._agent.add_remote_agent(told.metadata)
            agent = name.decode() if isinstance(name, bytes) else str(name)
            if agent != told.agent:
                raise TransportError(f"peer {peer}: its metadata is of agent {agent!r}")
            self._agent.make_connection(agent)
            remote = self._describe_pages(
                agent, pairing.remote_addresses, pairing.page_bytes, told.device
            )
        except self._errors as error:
            self._drop_table(local_key)
            raise TransportError(f"NIXL cannot reach peer {peer}: {_said(error)}") from error
        self._peers[peer] = _Peer(agent, pairing, local_key, remote)

    def write(self, peer: str, tag: int, local: PageIndices, remote: PageIndices) -> int:
        self._last_write_id += 1
        write_id = self._last_write_id
        link = self._peers.get(peer)
        reason = (
            f"peer {peer} is not connected"
            if link is None
            else wrong_indices(link.pairing, local, remote)
        )
        if reason or link is None:
            self._events.put(WriteFailed(write_id, reason))
        elif local.size == 0:
            self._events.put(WriteDone(write_id))
        else:
            self._post(peer, link, write_id, local, remote)
        return write_id

    def poll(self) -> list[TransportEvent]:
        if self._agent is not None:
            self._agent.get_new_notifs()
        for peer, link in list(self._peers.items()):
            self._advance(peer, link)
        self._bury(final=False)
        return self._events.take()

    def filenos(self) -> list[int]:
        """Only events that already wait: while a transfer is open the caller polls by the clock."""
        return [self._events.fileno()]

    def expect(self, tag: int, pages: PageIndices) -> None:
        """Nothing is recorded: the writer alone decides where it writes."""

    def revoke(self, tag: int) -> bool:
        """False: only the writer's word or its death ends a write."""
        return False

    def disconnect(self, peer: str) -> None:
        link = self._peers.pop(peer, None)
        if link is not None:
            self._retired.append(_Retired(peer, link, "disconnected", lost=False))
            self._bury(final=False)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._bury(final=True)
        if self._agent is not None and self._registration is not None:
            self._agent.deregister_memory(self._registration)
        self._registration = None
        self._agent = None
        self._events.close()

    def _post(
        self, peer: str, link: _Peer, write_id: int, local: PageIndices, remote: PageIndices
    ) -> None:
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE",
                self._tables[link.local_key].handle,
                local.astype(np.int32),
                link.remote,
                remote.astype(np.int32),
            )
            link.open_writes[write_id] = handle
            state = self._agent.transfer(handle)
        except self._errors as error:
            link.open_writes.setdefault(write_id, None)
            self._lose(peer, link, f"posting a write failed: {_said(error)}")
            return
        self._note_lane(peer, link, state)
        if state == "ERR":
            self._lose(peer, link, "posting a write failed")
        elif state == "DONE":
            self._finish(link, write_id)

    def _advance(self, peer: str, link: _Peer) -> None:
        """Report the writes that have ended."""
        for write_id, handle in list(link.open_writes.items()):
            state, reason = self._state(handle)
            if state == "DONE":
                self._finish(link, write_id)
            elif state == "ERR":
                self._lose(peer, link, reason)
                return

    def _state(self, handle: Any) -> tuple[str, str]:
        """``DONE``, ``PROC`` or ``ERR``, and the reason of an error."""
        if handle is None:
            return "ERR", "it was never posted"
        try:
            return str(self._agent.check_xfer_state(handle)), "a write failed"
        except self._errors as error:
            return "ERR", f"a write failed: {_said(error)}"

    def _finish(self, link: _Peer, write_id: int) -> None:
        self._agent.release_xfer_handle(link.open_writes.pop(write_id))
        self._events.put(WriteDone(write_id))

    def _lose(self, peer: str, link: _Peer, reason: str) -> None:
        del self._peers[peer]
        self._retired.append(_Retired(peer, link, reason, lost=True))
        self._bury(final=False)

    def _bury(self, *, final: bool) -> None:
        """Report retired peers' writes once they cannot move bytes any more, then forget the peers.

        Letting go of a write that is under way would not stop it, so it is waited for; ``final``
        lets go all the same.
        """
        for retired in list(self._retired):
            link = retired.link
            for write_id, handle in list(link.open_writes.items()):
                if not final and self._state(handle)[0] == "PROC":
                    continue
                del link.open_writes[write_id]
                if handle is not None:
                    self._quietly(self._agent.release_xfer_handle, handle)
                self._events.put(WriteFailed(write_id, f"peer {retired.peer}: {retired.reason}"))
            if link.open_writes:
                continue
            self._retired.remove(retired)
            self._quietly(self._agent.release_dlist_handle, link.remote)
            if all(other.agent != link.agent for other in self._peers.values()):
                self._quietly(self._agent.remove_remote_agent, link.agent)
            self._drop_table(link.local_key)
            if retired.lost:
                self._events.put(PeerLost(retired.peer, retired.reason))

    def _quietly(self, release: Callable[[Any], None], what: Any) -> None:
        """Release something of a peer that is gone; that NIXL cannot is worth a line in the log."""
        try:
            release(what)
        except self._errors as error:
            logger.warning("nixl: %s: %s", release.__name__, _said(error))

    def _share_table(self, pairing: PagePairing) -> bytes:
        """Key of the local table of ``pairing``, described to NIXL if no other peer uses it yet."""
        content = pairing.local_addresses.tobytes() + pairing.page_bytes.to_bytes(8, "little")
        key = hashlib.blake2b(content, digest_size=16).digest()
        if key not in self._tables:
            try:
                handle = self._describe_pages(
                    "", pairing.local_addresses, pairing.page_bytes, self._device
                )
            except self._errors as error:
                raise TransportError(
                    f"NIXL cannot describe this process's pages: {_said(error)}"
                ) from error
            self._tables[key] = _Table(handle)
        self._tables[key].users += 1
        return key

    def _drop_table(self, key: bytes) -> None:
        table = self._tables[key]
        table.users -= 1
        if not table.users:
            del self._tables[key]
            self._quietly(self._agent.release_dlist_handle, table.handle)

    def _describe_pages(
        self, agent: str, addresses: Int64Array, page_bytes: int, device: int
    ) -> Any:
        rows = np.zeros((addresses.size, 3), dtype=np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = page_bytes
        rows[:, 2] = max(0, device)
        return self._agent.prep_xfer_dlist(agent, rows, _kind(device))

    def _note_lane(self, peer: str, link: _Peer, state: str) -> None:
        """Log once per peer how its bytes travel; a slow lane on one host is a missing right."""
        if link.lane_known:
            return
        link.lane_known = True
        how = (
            "copied by this process (same host)"
            if state == "DONE"
            else "carried by the network; on one host that means the right to trace is missing"
        )
        logger.info("nixl: pages for %s are %s", peer, how)


def _ucx_choice() -> str:
    """What UCX was told to use."""
    names = ("UCX_TLS", "UCX_NET_DEVICES")
    return ", ".join(f"{name}={os.environ.get(name, '(unset)')}" for name in names)


def _kind(device: int) -> str:
    """NIXL's name of the memory on a device; -1 is the host."""
    return "DRAM" if device < 0 else "VRAM"


def _error_types(api: Any) -> tuple[type[Exception], ...]:
    """What NIXL raises: a class per status, without a common base, and what its C++ throws."""
    bindings = vars(importlib.import_module(api.nixl_agent.__module__.replace("_api", "_bindings")))
    found = [kind for name, kind in bindings.items() if name.startswith("nixl") and "Error" in name]
    return (*found, RuntimeError, ValueError)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _builds() -> tuple[str, ...]:
    """In the order in which they are tried. The one that picks asks torch for its CUDA, and to that
    end imports it, for seconds, where it is a CPU build: so an only one is not picked from.
    """
    found = tuple(build for build in _BUILDS[1:] if importlib.util.find_spec(build) is not None)
    return found if len(found) == 1 and "torch" not in sys.modules else _BUILDS


def _load(net_devices: str) -> Any:
    """NIXL's Python interface, imported after UCX has been told which devices it may use."""
    if net_devices:
        os.environ["UCX_NET_DEVICES"] = net_devices
    else:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # else it may leak, as vLLM found
    if "ucxx" in sys.modules:
        raise TransportError("ucxx is loaded in this process: it brings another UCX than NIXL")
    reasons = []
    for build in _builds():
        try:
            return importlib.import_module(f"{build}._api")
        except ImportError as error:
            reasons.append(f"{build}: {error}")
    raise TransportError(
        "the transport 'nixl' needs the package nixl (pip install nixl); " + "; ".join(reasons)
    )

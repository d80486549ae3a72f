"""Same host: one cross-process copy straight into the peer's pages (``process_vm_writev``).

The writer's thread copies, inside ``write``, with the GIL released; the receiver takes no part.
What that needs is the right to trace the peer: the same user, and in a container the capability
``SYS_PTRACE`` or a permissive ``ptrace_scope``.

A process id proves nothing: it may be of another PID namespace, or reused. ``connect`` therefore
reads a random number back out of the peer's memory, and a ``pidfd`` tells when that very process
has ended. A stopped process can go on writing when it continues: only the writer's death or its own
word ends it, and ``revoke`` is False.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import select
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

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
from splitserve.kv_transfer.transports.pages import (
    ByteRanges,
    check_pairing,
    merge_pages,
    refuse_device_memory,
    wrong_indices,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.transports.settings import TransportSettings

CALL_BYTES = 4 * 1024 * 1024
"""Most bytes of one system call (about a millisecond): a signal never waits long."""

_NONCE_BYTES = 32

_libc = ctypes.CDLL(None, use_errno=True)
_SIGNATURE = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_write_process = _libc.process_vm_writev
_read_process = _libc.process_vm_readv
for _function in (_write_process, _read_process):
    _function.argtypes = _SIGNATURE
    _function.restype = ctypes.c_ssize_t


class _Description(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: int
    nonce: bytes
    nonce_address: int
    regions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Peer:
    pid: int
    pidfd: int
    end: select.poll
    """Watches ``pidfd``, which is readable once the process has ended."""
    pairing: PagePairing


class LocalTransport:
    """Copies pages into processes of the same host."""

    def __init__(self, settings: TransportSettings) -> None:
        self._events = EventQueue()
        self._regions: tuple[Region, ...] = ()
        self._peers: dict[str, _Peer] = {}
        self._by_pidfd: dict[int, str] = {}
        self._watch = select.epoll()
        self._watch.register(self._events.fileno(), select.EPOLLIN)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._nonce_memory = ctypes.create_string_buffer(self._nonce, _NONCE_BYTES)
        self._last_write_id = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="local",
            same_host_only=True,
            target_must_progress=False,
            synchronous=True,
            writer_ends_by="process_death",
        )

    def register(self, regions: Sequence[Region]) -> None:
        refuse_device_memory("local", regions)
        self._regions = tuple(regions)

    def describe(self) -> bytes:
        return envelope.seal(
            "local",
            _Description(
                pid=os.getpid(),
                start_ticks=_start_ticks("self"),
                boot_id=_boot_id(),
                pid_namespace=_pid_namespace(),
                nonce=self._nonce,
                nonce_address=ctypes.addressof(self._nonce_memory),
                regions=envelope.regions_to_wire(self._regions),
            ),
        )

    def connect(self, peer: str, description: bytes, pairing: PagePairing) -> None:
        told = envelope.unseal("local", description, _Description)
        if told.boot_id != _boot_id():
            raise TransportError(
                f"peer {peer} runs on another host, and the transport 'local' only copies within "
                "one; use 'nixl' or 'tcp'"
            )
        if told.pid_namespace != _pid_namespace():
            raise TransportError(
                f"peer {peer} is in another PID namespace (container); let the containers share "
                "one, or use the transport 'nixl' or 'tcp'"
            )
        pairing = check_pairing(pairing, self._regions, envelope.regions_from_wire(told.regions))
        self.disconnect(peer)
        try:
            pidfd = os.pidfd_open(told.pid)
        except (OSError, OverflowError) as error:
            raise TransportError(f"peer {peer} (process {told.pid}) has ended: {error}") from error
        try:
            _prove_identity(peer, told)
        except BaseException:
            os.close(pidfd)
            raise
        end = select.poll()
        end.register(pidfd, select.POLLIN)
        self._peers[peer] = _Peer(told.pid, pidfd, end, pairing)
        self._by_pidfd[pidfd] = peer
        self._watch.register(pidfd, select.EPOLLIN)

    def write(self, peer: str, tag: int, local: PageIndices, remote: PageIndices) -> int:
        """As in the interface; synchronous, so the caller bounds the bytes of one write."""
        self._last_write_id += 1
        write_id = self._last_write_id
        link = self._peers.get(peer)
        reason = (
            f"peer {peer} is not connected"
            if link is None
            else wrong_indices(link.pairing, local, remote)
        )
        lost = False
        if link is not None and not reason:
            reason, lost = _copy(link, local, remote)
        self._events.put(WriteFailed(write_id, reason) if reason else WriteDone(write_id))
        if lost:
            self._lose(peer, reason)
        return write_id

    def poll(self) -> list[TransportEvent]:
        for descriptor, _ in self._watch.poll(0):
            peer = self._by_pidfd.get(descriptor)
            if peer is not None:
                self._lose(peer, f"its process {self._peers[peer].pid} has ended")
        return self._events.take()

    def filenos(self) -> list[int]:
        return [self._watch.fileno()]

    def expect(self, tag: int, pages: PageIndices) -> None:
        """Nothing is recorded: the writer alone decides where it writes."""

    def revoke(self, tag: int) -> bool:
        """False: only the writer's word or its death ends a write."""
        return False

    def disconnect(self, peer: str) -> None:
        link = self._peers.pop(peer, None)
        if link is not None:
            self._watch.unregister(link.pidfd)
            del self._by_pidfd[link.pidfd]
            os.close(link.pidfd)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._watch.close()
        self._events.close()

    def _lose(self, peer: str, reason: str) -> None:
        self.disconnect(peer)
        self._events.put(PeerLost(peer, reason))


def _copy(link: _Peer, local: PageIndices, remote: PageIndices) -> tuple[str, bool]:
    """Copy the pages. Returns why it failed (empty: it did not) and whether the peer has ended."""
    pairing = link.pairing
    sides, lengths = merge_pages(
        (pairing.local_addresses[local], pairing.remote_addresses[remote]),
        pairing.page_bytes,
        CALL_BYTES,
    )
    ranges = ByteRanges(sides, lengths)
    while ranges.left:
        if link.end.poll(0):
            return f"process {link.pid} has ended", True
        count = ranges.window(CALL_BYTES)
        source, target = ranges.pointer(0), ranges.pointer(1)
        moved = _write_process(link.pid, source, count, target, count, 0)
        if moved <= 0:
            error = ctypes.get_errno() if moved < 0 else errno.EFAULT
            if error == errno.EINTR:
                continue
            return _explain(error, link.pid), error == errno.ESRCH
        ranges.advance(moved)
    if link.end.poll(0):
        return f"process {link.pid} has ended", True
    return "", False


def _prove_identity(peer: str, told: _Description) -> None:
    """Raise ``TransportError`` unless a write reaches the process that described itself."""
    if len(told.nonce) != _NONCE_BYTES or not 0 < told.nonce_address < 1 << 63:
        raise TransportError(f"the description of peer {peer} is damaged")
    try:
        if _start_ticks(str(told.pid)) != told.start_ticks:
            raise TransportError(f"peer {peer} has ended; another process has its id {told.pid}")
    except OSError as error:
        raise TransportError(f"peer {peer} (process {told.pid}) has ended: {error}") from error
    try:
        found = read_process(told.pid, told.nonce_address, _NONCE_BYTES)
    except TransportError as error:
        raise TransportError(f"peer {peer}: {error}") from error
    if not secrets.compare_digest(found, told.nonce):
        raise TransportError(f"process {told.pid} is not peer {peer}: its memory shows other bytes")


def read_process(pid: int, address: int, size_bytes: int) -> bytes:
    """Memory of another process. Raises ``TransportError`` that says what is missing."""
    found = ctypes.create_string_buffer(size_bytes)
    here = (ctypes.c_uint64 * 2)(ctypes.addressof(found), size_bytes)
    there = (ctypes.c_uint64 * 2)(address, size_bytes)
    if _read_process(pid, here, 1, there, 1, 0) < 0:
        raise TransportError(_explain(ctypes.get_errno(), pid))
    return found.raw


def _explain(error: int, pid: int) -> str:
    if error == errno.ESRCH:
        return f"process {pid} has ended"
    if error == errno.EFAULT:
        return f"a page is not mapped here or in process {pid}"
    if error == errno.ENOSYS:
        return "this kernel has no process_vm_writev; use the transport 'nixl' or 'tcp'"
    if error == errno.EPERM:
        return (
            f"no right to write into the memory of process {pid}{_ptrace_scope()}; run both nodes "
            "as one user with kernel.yama.ptrace_scope=0, give the container the capability "
            "SYS_PTRACE (docker run --cap-add SYS_PTRACE), or use the transport 'tcp'"
        )
    return f"writing into process {pid} failed: {os.strerror(error)}"


def _ptrace_scope() -> str:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return f" (kernel.yama.ptrace_scope is {scope})"


def _start_ticks(pid: str) -> int:
    """Start time in clock ticks since boot: together with the pid it names a process for good."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino

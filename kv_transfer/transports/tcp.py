"""Any host, no dependency: pages over TCP, sent from KV memory and received straight into pages.

The receiver's own thread places every byte, after it has checked each page index against what it
expects: so ``revoke`` is True at once, even in the middle of a frame, whose rest is thrown away. It
also means that the receiver must call ``poll``: often while a transfer is open, and about once a
second otherwise, since that is when overdue connections are closed.

A writer that gives up (``disconnect``, or a broken connection) cannot call back bytes that have
already left its host; they are harmless once the receiver has revoked their tag, which it does
before it uses the pages for anything else.

Writes are queued without bound: the caller bounds how much it leaves open. The queue holds indices,
never pages.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
import select
import socket
import time
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
    check_pairing,
    refuse_device_memory,
    wrong_indices,
)
from splitserve.kv_transfer.transports.tcp_protocol import TOKEN_BYTES
from splitserve.kv_transfer.transports.tcp_receiver import Grants, Receiver
from splitserve.kv_transfer.transports.tcp_stream import Stream, StreamEndedError
from splitserve.kv_transfer.transports.tcp_writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.transports.settings import TransportSettings

logger = logging.getLogger(__name__)

INCOMING_LIMIT = 512
"""Most incoming connections, proved or not."""
UNPROVED_LIMIT = 32
"""Most incoming connections that have not proved the token; the oldest makes room for a new one."""
_ACCEPTS_PER_POLL = 16


class TcpDescription(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    token: bytes
    regions: tuple[tuple[int, int], ...]
    lane: bytes


class TcpTransport:
    """Sends pages to peers and places those that peers send."""

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self._events = EventQueue()
        self._epoll = select.epoll()
        self._epoll.register(self._events.fileno(), select.EPOLLIN)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._regions: tuple[Region, ...] = ()
        self._listener: socket.socket | None = None
        self._grants = Grants()
        self._receivers: dict[int, Receiver] = {}
        self._writers: dict[str, Writer] = {}
        self._writer_names: dict[int, str] = {}
        self._last_write_id = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="tcp",
            same_host_only=False,
            target_must_progress=True,
            synchronous=False,
            writer_ends_by="receiver_revokes",
        )

    def register(self, regions: Sequence[Region]) -> None:
        """As in the interface, and listening. Raises ``TransportError`` when it cannot listen."""
        refuse_device_memory(self.capabilities.name, regions)
        self._regions = tuple(regions)
        self._listener = _listen(self._settings.host, self._settings.port)
        _check_reachable(self._settings.advertised_host or self._listener.getsockname()[0])
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def describe(self) -> bytes:
        assert self._listener is not None, "register comes before describe"
        host, port = self._listener.getsockname()[:2]
        host = self._settings.advertised_host or host
        regions = envelope.regions_to_wire(self._regions)
        told = TcpDescription(host, port, self._token, regions, self._own_lane())
        return envelope.seal(self.capabilities.name, told)

    def connect(self, peer: str, description: bytes, pairing: PagePairing) -> None:
        """As in the interface. Returns while connecting: a failure later is a ``PeerLost``."""
        told = envelope.unseal(self.capabilities.name, description, TcpDescription)
        pairing = check_pairing(pairing, self._regions, envelope.regions_from_wire(told.regions))
        if len(told.token) != TOKEN_BYTES or not 0 < told.port < 65536:
            raise TransportError(f"the description of peer {peer} is damaged")
        self._drop_writer(peer, "connected anew")
        stream = _start_connecting(peer, told.host, told.port)
        deadline = time.monotonic() + self._settings.connect_timeout_s
        writer = self._make_writer(stream, told, pairing, deadline)
        self._writers[peer] = writer
        self._writer_names[stream.fileno()] = peer
        self._epoll.register(stream.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def write(self, peer: str, tag: int, local: PageIndices, remote: PageIndices) -> int:
        self._last_write_id += 1
        write_id = self._last_write_id
        writer = self._writers.get(peer)
        if writer is None:
            self._events.put(WriteFailed(write_id, f"peer {peer} is not connected"))
            return write_id
        reason = wrong_indices(writer.pairing, local, remote)
        if remote.size > writer.pairing.remote_addresses.size:
            reason = "a write names more pages than the peer has"
        if reason:
            self._events.put(WriteFailed(write_id, reason))
            return write_id
        writer.write(write_id, tag, local, remote)
        self._run_writer(peer, writer.stream.flush)
        return write_id

    def poll(self) -> list[TransportEvent]:
        for descriptor, _ in self._epoll.poll(0):
            if descriptor in self._receivers:
                self._run_receiver(descriptor, self._receivers[descriptor].stream.step)
            elif descriptor in self._writer_names:
                peer = self._writer_names[descriptor]
                self._run_writer(peer, self._writers[peer].stream.step)
            elif self._listener is not None and descriptor == self._listener.fileno():
                self._accept()
        self._close_overdue(time.monotonic())
        return self._events.take()

    def filenos(self) -> list[int]:
        return [self._epoll.fileno()]

    def expect(self, tag: int, pages: PageIndices) -> None:
        self._grants.expect(tag, pages)

    def revoke(self, tag: int) -> bool:
        """True: nothing lands under ``tag`` any more, not even the rest of a frame."""
        self._grants.revoke(tag)
        for receiver in self._receivers.values():
            receiver.revoke(tag)
        return True

    def disconnect(self, peer: str) -> None:
        self._drop_writer(peer, "disconnected")
        for descriptor, receiver in list(self._receivers.items()):
            if receiver.peer == peer:
                self._drop_receiver(descriptor)

    def close(self) -> None:
        for peer in list(self._writers):
            self._drop_writer(peer, "closed")
        for descriptor in list(self._receivers):
            self._drop_receiver(descriptor)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._epoll.close()
        self._events.close()

    def _own_lane(self) -> bytes:
        """What carries pages besides the connections; overridden where something does."""
        return b""

    def _make_receiver(self, stream: Stream, deadline: float) -> Receiver:
        return Receiver(stream, self._token, self._grants, self._regions, deadline)

    def _make_writer(
        self, stream: Stream, told: TcpDescription, pairing: PagePairing, deadline: float
    ) -> Writer:
        name = self._settings.incarnation
        return Writer(stream, name, told.token, pairing, deadline, self._answered)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS_PER_POLL):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    logger.warning("cannot accept a connection: %s", error)
                return
            unproved = [d for d, receiver in self._receivers.items() if not receiver.peer]
            if len(unproved) >= UNPROVED_LIMIT:
                self._drop_receiver(unproved[0])
            elif len(self._receivers) >= INCOMING_LIMIT:
                connection.close()
                continue
            deadline = time.monotonic() + self._settings.authentication_timeout_s
            receiver = self._make_receiver(Stream(connection, connected=True), deadline)
            self._receivers[connection.fileno()] = receiver
            self._epoll.register(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _run_receiver(self, descriptor: int, action: Callable[[], None]) -> None:
        receiver = self._receivers[descriptor]
        try:
            action()
            self._watch(receiver.stream)
        except StreamEndedError as error:
            self._drop_receiver(descriptor)
            if not receiver.peer:
                logger.warning("closed an incoming connection: %s", error)
            elif all(other.peer != receiver.peer for other in self._receivers.values()):
                self._events.put(PeerLost(receiver.peer, str(error)))

    def _run_writer(self, peer: str, action: Callable[[], None]) -> None:
        writer = self._writers[peer]
        try:
            action()
            self._watch(writer.stream)
        except StreamEndedError as error:
            self._lose_writer(peer, str(error))

    def _watch(self, stream: Stream) -> None:
        sending = select.EPOLLOUT if stream.wants_to_send else 0
        self._epoll.modify(stream.fileno(), select.EPOLLIN | sending)

    def _close_overdue(self, now: float) -> None:
        for descriptor, receiver in list(self._receivers.items()):
            if not receiver.peer and now > receiver.deadline:
                logger.warning("closed an incoming connection that did not prove the token")
                self._drop_receiver(descriptor)
        for peer, writer in list(self._writers.items()):
            if not writer.ready and now > writer.deadline:
                self._lose_writer(peer, f"no connection in {self._settings.connect_timeout_s} s")

    def _answered(self, write_id: int, landed: bool) -> None:
        self._events.put(
            WriteDone(write_id)
            if landed
            else WriteFailed(write_id, "refused by the peer: the pages are not granted (any more)")
        )

    def _lose_writer(self, peer: str, reason: str) -> None:
        self._drop_writer(peer, reason)
        self._events.put(PeerLost(peer, reason))

    def _drop_writer(self, peer: str, reason: str) -> None:
        writer = self._writers.pop(peer, None)
        if writer is None:
            return
        del self._writer_names[writer.stream.fileno()]
        self._epoll.unregister(writer.stream.fileno())
        writer.close()
        for write_id in writer.open_writes:
            self._events.put(WriteFailed(write_id, f"peer {peer}: {reason}"))

    def _drop_receiver(self, descriptor: int) -> None:
        receiver = self._receivers.pop(descriptor)
        self._epoll.unregister(descriptor)
        receiver.close()


def _listen(host: str, port: int) -> socket.socket:
    """A non-blocking listener on ``port`` of ``host``, on any free one when it is 0."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise TransportError(f"cannot listen on {host!r}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(INCOMING_LIMIT)
    except OSError as error:
        listener.close()
        raise TransportError(
            f"cannot listen on {host!r}: {error}; name an address of this host"
        ) from error
    listener.setblocking(False)
    return listener


def _check_reachable(host: str) -> None:
    """Raise ``TransportError`` when peers could not connect to ``host``."""
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError as error:
        raise TransportError(f"advertised_host must be an IP address, not {host!r}") from error
    if wildcard:
        raise TransportError(
            f"peers cannot connect to the wildcard address {host}; set advertised_host to the "
            "address that they should use"
        )


def _start_connecting(peer: str, host: str, port: int) -> Stream:
    try:
        flags = socket.AI_NUMERICHOST
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"peer {peer} names {host[:60]!r}, which is no address") from error
    family, kind, _, _, address = found[0]
    connection = socket.socket(family, kind)
    connection.setblocking(False)
    status = connection.connect_ex(address)
    if status not in (0, errno.EINPROGRESS):
        connection.close()
        raise TransportError(
            f"cannot connect to peer {peer} at {host} port {port}: {os.strerror(status)}"
        )
    return Stream(connection, connected=status == 0)

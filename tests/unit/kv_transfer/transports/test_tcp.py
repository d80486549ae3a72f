"""What only ``tcp`` promises: who may connect, what may land, and what ``revoke`` ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from splitserve.kv_transfer.transports import description as envelope
from splitserve.kv_transfer.transports.base import (
    PagePairing,
    PeerLost,
    Region,
    TransportError,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from splitserve.kv_transfer.transports.settings import TransportSettings
from splitserve.kv_transfer.transports.tcp import UNPROVED_LIMIT, TcpDescription, TcpTransport

PAGE_BYTES = 64 * 1024


@dataclass
class Side:
    """A transport and its pages."""

    transport: TcpTransport
    pages: npt.NDArray[np.uint8]

    @property
    def addresses(self) -> npt.NDArray[np.int64]:
        return self.pages.ctypes.data + np.arange(len(self.pages), dtype=np.int64) * PAGE_BYTES


Make = Callable[..., Side]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a registered transport with random pages; closes it in the end."""
    sides: list[Side] = []

    def make_one(incarnation: str, pages: int = 8, **settings: object) -> Side:
        transport = TcpTransport(TransportSettings(incarnation, **settings))  # type: ignore[arg-type]
        memory = np.random.default_rng(len(sides)).integers(
            0, 255, (pages, PAGE_BYTES), dtype=np.uint8
        )
        sides.append(Side(transport, memory))
        transport.register([Region(memory.ctypes.data, memory.nbytes)])
        return sides[-1]

    yield make_one
    for side in sides:
        side.transport.close()


def connect(writer: Side, receiver: Side, description: bytes = b"") -> None:
    writer.transport.connect(
        "receiver",
        description or receiver.transport.describe(),
        PagePairing(writer.addresses, receiver.addresses, PAGE_BYTES),
    )


def poll_both(writer: Side, receiver: Side, count: int) -> list[TransportEvent]:
    """The writer's next events, at least ``count``; the receiver is polled too."""
    deadline = time.monotonic() + 10
    events: list[TransportEvent] = []
    while len(events) < count:
        assert time.monotonic() < deadline, f"only {events}"
        receiver.transport.poll()
        events += writer.transport.poll()
    return events


def retold(receiver: Side, **changes: object) -> bytes:
    """The receiver's description with some facts changed."""
    told = envelope.unseal("tcp", receiver.transport.describe(), TcpDescription)
    return envelope.seal("tcp", msgspec.structs.replace(told, **changes))


def indices(*pages: int) -> npt.NDArray[np.int64]:
    return np.array(pages, dtype=np.int64)


def test_a_wrong_token_is_turned_away(make: Make) -> None:
    """The receiver closes the connection, the writer's open write fails and the peer is lost."""
    writer, receiver = make("writer"), make("receiver")
    before = receiver.pages.copy()
    receiver.transport.expect(1, indices(0))
    connect(writer, receiver, retold(receiver, token=b"\1" * 32))
    write_id = writer.transport.write("receiver", 1, indices(0), indices(0))
    failed, lost = poll_both(writer, receiver, 2)
    assert isinstance(failed, WriteFailed)
    assert failed.write_id == write_id
    assert isinstance(lost, PeerLost)
    assert (receiver.pages == before).all()


def test_an_impostor_receives_no_page(make: Make) -> None:
    """Who listens on the peer's port without the token gets the greeting and no KV."""
    writer, receiver = make("writer"), make("receiver")
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(10)
        connect(writer, receiver, retold(receiver, port=impostor.getsockname()[1]))
        writer.transport.write("receiver", 1, indices(0), indices(0))
        connection, _ = impostor.accept()
        with connection:
            connection.setblocking(False)
            connection.send(b"splitkv1" + b"n" * 32)
            received = bytearray()
            events: list[TransportEvent] = []
            deadline = time.monotonic() + 10
            answered = False
            while not events:
                assert time.monotonic() < deadline
                events += writer.transport.poll()
                try:
                    received += connection.recv(1 << 20)
                except (BlockingIOError, ConnectionResetError):
                    continue
                if not answered and len(received) > 90:
                    connection.send(b"splitkv1" + b"m" * 32 + b"\0\0")
                    answered = True
    assert isinstance(events[0], WriteFailed)
    assert "did not prove" in events[0].reason
    assert writer.pages[0].tobytes()[:64] not in bytes(received)


def test_a_stranger_is_cut_off(make: Make) -> None:
    """Noise ends the connection; silence ends it at the deadline; the transport works on."""
    receiver = make("receiver", authentication_timeout_s=0.2)
    host, port = receiver.transport._listener.getsockname()[:2]  # type: ignore[union-attr]
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 20, b""):
        with socket.create_connection((host, port), timeout=10) as stranger:
            stranger.setblocking(False)
            stranger.send(noise)
            deadline = time.monotonic() + 10
            closed = False
            while not closed:
                assert time.monotonic() < deadline
                receiver.transport.poll()
                try:
                    closed = stranger.recv(1 << 16) == b""
                except BlockingIOError:
                    continue
                except ConnectionResetError:
                    closed = True
    writer = make("writer")
    receiver.transport.expect(1, indices(3))
    connect(writer, receiver)
    write_id = writer.transport.write("receiver", 1, indices(0), indices(3))
    assert poll_both(writer, receiver, 1) == [WriteDone(write_id)]


def test_strangers_are_bounded_and_do_not_keep_peers_out(make: Make) -> None:
    """Many silent connections: the oldest make room, and a peer still gets in."""
    writer, receiver = make("writer"), make("receiver")
    address = receiver.transport._listener.getsockname()[:2]  # type: ignore[union-attr]
    strangers = [socket.create_connection(address) for _ in range(UNPROVED_LIMIT + 8)]
    try:
        for _ in range(8):
            receiver.transport.poll()
        assert len(receiver.transport._receivers) <= UNPROVED_LIMIT
        receiver.transport.expect(1, indices(0))
        connect(writer, receiver)
        write_id = writer.transport.write("receiver", 1, indices(0), indices(0))
        assert poll_both(writer, receiver, 1) == [WriteDone(write_id)]
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_frame_with_one_page_that_is_not_granted_lands_nowhere(make: Make) -> None:
    """All of it is thrown away; the next frame on the same connection lands."""
    writer, receiver = make("writer"), make("receiver")
    before = receiver.pages.copy()
    receiver.transport.expect(1, indices(0, 1))
    connect(writer, receiver)
    refused = writer.transport.write("receiver", 1, indices(0, 1, 2), indices(0, 1, 2))
    unknown = writer.transport.write("receiver", 2, indices(0), indices(0))
    events = poll_both(writer, receiver, 2)
    assert [type(event) for event in events] == [WriteFailed, WriteFailed]
    assert [event.write_id for event in events if isinstance(event, WriteFailed)] == [
        refused,
        unknown,
    ]
    assert (receiver.pages == before).all()
    write_id = writer.transport.write("receiver", 1, indices(4, 5), indices(1, 0))
    assert poll_both(writer, receiver, 1) == [WriteDone(write_id)]
    assert (receiver.pages[[1, 0]] == writer.pages[[4, 5]]).all()


def test_revoke_stops_a_half_received_frame(make: Make) -> None:
    """Not one byte lands after ``revoke`` returned True; the write fails; the stream goes on."""
    pages = 256
    writer, receiver = make("writer", pages), make("receiver", pages)
    every = np.arange(pages, dtype=np.int64)
    receiver.transport.expect(1, every)
    receiver.transport.expect(2, every)
    connect(writer, receiver)
    warm = writer.transport.write("receiver", 2, every[:1], every[:1])
    assert poll_both(writer, receiver, 1) == [WriteDone(warm)]
    before = receiver.pages.copy()
    write_id = writer.transport.write("receiver", 1, every, every)
    deadline = time.monotonic() + 10
    while (receiver.pages == before).all():
        assert time.monotonic() < deadline
        writer.transport.poll()
        receiver.transport.poll()
    assert receiver.transport.revoke(1)
    half = receiver.pages.copy()
    assert (half[-1] == before[-1]).all(), "the frame must be half received"
    after = writer.transport.write("receiver", 2, every[1:2], every[-1:])
    failed, landed = poll_both(writer, receiver, 2)
    assert isinstance(failed, WriteFailed)
    assert failed.write_id == write_id
    assert landed == WriteDone(after)
    assert (receiver.pages[:-1] == half[:-1]).all()
    assert (receiver.pages[-1] == writer.pages[1]).all()


def test_the_receiver_hears_that_a_writer_left(make: Make) -> None:
    """``PeerLost`` names the writer's incarnation."""
    writer, receiver = make("writer"), make("receiver")
    receiver.transport.expect(1, indices(0))
    connect(writer, receiver)
    writer.transport.write("receiver", 1, indices(0), indices(0))
    poll_both(writer, receiver, 1)
    writer.transport.disconnect("receiver")
    events: list[TransportEvent] = []
    deadline = time.monotonic() + 10
    while not events:
        assert time.monotonic() < deadline
        events += receiver.transport.poll()
    assert [event.peer for event in events if isinstance(event, PeerLost)] == ["writer"]


def test_nobody_listening_is_a_lost_peer(make: Make) -> None:
    """The write fails and the peer is lost, both as events."""
    writer, receiver = make("writer"), make("receiver")
    with socket.create_server(("127.0.0.1", 0)) as server:
        description = retold(receiver, port=server.getsockname()[1])
    connect(writer, receiver, description)
    writer.transport.write("receiver", 1, indices(0), indices(0))
    events = poll_both(writer, receiver, 2)
    assert [type(event) for event in events] == [WriteFailed, PeerLost]


def test_a_silent_listener_is_a_lost_peer_at_the_deadline(make: Make) -> None:
    """Who accepts and says nothing is given up after ``connect_timeout_s``."""
    writer, receiver = make("writer", connect_timeout_s=0.1), make("receiver")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connect(writer, receiver, retold(receiver, port=silent.getsockname()[1]))
        (lost,) = poll_both(writer, receiver, 1)
    assert isinstance(lost, PeerLost)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"host": "0.0.0.0"}, "advertised_host"),
        ({"host": "::"}, "advertised_host"),
        ({"advertised_host": "node-1"}, "must be an IP address"),
        ({"host": "203.0.113.9"}, "name an address of this host"),
    ],
)
def test_addresses_that_peers_cannot_use_are_refused(
    make: Make, settings: dict[str, str], match: str
) -> None:
    """At registration, saying which setting to change."""
    with pytest.raises(TransportError, match=match):
        make("receiver", **settings)


@pytest.mark.parametrize(
    "changes",
    [{"host": "node-1.example"}, {"host": "a\0b"}, {"port": 0}, {"port": 70000}, {"token": b"x"}],
)
def test_a_description_that_names_no_address_is_refused(
    make: Make, changes: dict[str, object]
) -> None:
    """Names are not looked up, since that would block; ports and tokens must be possible ones."""
    writer, receiver = make("writer"), make("receiver")
    with pytest.raises(TransportError):
        connect(writer, receiver, retold(receiver, **changes))


def test_a_page_table_that_does_not_fit_is_refused_by_the_receiver(make: Make) -> None:
    """The receiver checks the writer's table: overlapping pages are refused with the reason."""
    writer, receiver = make("writer"), make("receiver")
    overlapping = receiver.addresses.copy()
    overlapping[1] = overlapping[0] + 8
    writer.transport.connect(
        "receiver",
        receiver.transport.describe(),
        PagePairing(writer.addresses, overlapping, PAGE_BYTES),
    )
    (lost,) = poll_both(writer, receiver, 1)
    assert isinstance(lost, PeerLost)
    assert "overlap" in lost.reason

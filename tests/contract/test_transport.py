"""What every transport must do, tested between two real processes.

Bytes are random, index sets are random with fixed seeds, and after each test of contents the
receiver also proves that no byte outside the written pages has changed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import psutil
import pytest
from support.transport_pair import ANSWER_DEADLINE_S, ProcessPool, TransportProcess, Variant

from splitserve.kv_transfer.transports.base import TransportError

KIB = 1024
STOPPED_S = 2.0
"""How long a receiver stands still; who waits for it does so for half of that."""
VARIANTS = [
    Variant("local", "local"),
    Variant("tcp", "tcp"),
    Variant("tcp-ipv6", "tcp", {"host": "::1"}),
    Variant("nixl", "nixl", notices_idle_death=False),
    Variant("nixl-tcp-lane", "nixl", env={"UCX_TLS": "tcp"}, notices_idle_death=False),
]
if find_spec("ucxx") is not None:  # the optional extra `ucx`; CI installs it
    VARIANTS.append(Variant("ucx", "ucx"))

Take = Callable[[], TransportProcess]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool()
    yield pool
    pool.close()


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen


@pytest.fixture
def take(pool: ProcessPool, variant: Variant) -> Iterator[Take]:
    """A function that gives a process for a transport of the variant."""
    taken: list[TransportProcess] = []

    def take_one() -> TransportProcess:
        taken.append(pool.take(variant))
        return taken[-1]

    yield take_one
    for process in taken:
        pool.give_back(process)


@pytest.fixture
def pair(take: Take) -> tuple[TransportProcess, TransportProcess]:
    """A writer and a receiver of small pages, connected, with different numbers of pages."""
    writer, receiver = take(), take()
    writer.setup(pages=40, stride=16 * KIB)
    receiver.setup(pages=56, stride=16 * KIB)
    writer.connect(receiver)
    return writer, receiver


def done(write_id: int) -> dict[str, Any]:
    return {"kind": "WriteDone", "write_id": write_id}


def assert_landed(
    writer: TransportProcess,
    receiver: TransportProcess,
    local: list[int],
    remote: list[int],
    page_bytes: int,
    local_offset: int = 0,
    remote_offset: int = 0,
) -> None:
    """The receiver's pages hold the writer's bytes, and nothing else has changed."""
    sent = writer.do("digests", pages=local, offset=local_offset, length=page_bytes)
    held = receiver.do("digests", pages=remote, offset=remote_offset, length=page_bytes)
    assert held == sent
    assert receiver.do(
        "untouched_except", pages=sorted(set(remote)), offset=remote_offset, length=page_bytes
    )


@pytest.mark.parametrize("page_bytes", [16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 12_288 + 64, 77])
def test_writes_the_right_bytes_to_the_right_pages(take: Take, page_bytes: int) -> None:
    """Random index sets, three writes, page sizes from small to large and odd ones."""
    writer, receiver = take(), take()
    writer.setup(pages=24, stride=page_bytes)
    receiver.setup(pages=37, stride=page_bytes)
    writer.connect(receiver)
    choose = random.Random(page_bytes)
    all_local, all_remote = choose.sample(range(24), 21), choose.sample(range(37), 21)
    receiver.do("expect", tag=3, pages=all_remote)
    ids = [writer.write(receiver, 3, all_local[part::3], all_remote[part::3]) for part in range(3)]
    events = writer.events(3)
    assert sorted(events, key=lambda event: int(event["write_id"])) == [done(i) for i in ids]
    assert_landed(writer, receiver, all_local, all_remote, page_bytes)


def test_adjacent_pages_and_repeated_sources_are_right_too(
    pair: tuple[TransportProcess, TransportProcess],
) -> None:
    """Pages that follow each other on one side, on both, and one source page for two targets."""
    writer, receiver = pair
    local = [0, 1, 2, 3, 10, 11, 12, 5, 5, 39, 38]
    remote = [8, 9, 10, 11, 20, 22, 23, 0, 1, 54, 55]
    receiver.do("expect", tag=9, pages=remote)
    write_id = writer.write(receiver, 9, local, remote)
    assert writer.events(1) == [done(write_id)]
    assert_landed(writer, receiver, local, remote, 16 * KIB)


def test_writes_a_slice_of_each_page(take: Take) -> None:
    """Strides and offsets differ between the sides; bytes beside the slice stay as they were."""
    writer, receiver = take(), take()
    writer.setup(pages=12, stride=24 * KIB)
    receiver.setup(pages=15, stride=36 * KIB)
    writer.connect(receiver, page_bytes=12 * KIB, local_offset=12 * KIB, remote_offset=20 * KIB)
    local, remote = [0, 1, 2, 3, 9, 11], [14, 2, 3, 4, 0, 7]
    receiver.do("expect", tag=1, pages=remote)
    write_id = writer.write(receiver, 1, local, remote)
    assert writer.events(1) == [done(write_id)]
    assert_landed(writer, receiver, local, remote, 12 * KIB, 12 * KIB, 20 * KIB)


def test_one_write_may_name_thousands_of_pages(take: Take) -> None:
    """More pages than one system call takes ranges."""
    writer, receiver = take(), take()
    writer.setup(pages=5000, stride=4 * KIB)
    receiver.setup(pages=6000, stride=4 * KIB)
    writer.connect(receiver)
    choose = random.Random(5)
    local, remote = choose.sample(range(5000), 5000), choose.sample(range(6000), 5000)
    receiver.do("expect", tag=1, pages=remote)
    write_id = writer.write(receiver, 1, local, remote)
    assert writer.events(1) == [done(write_id)]
    assert_landed(writer, receiver, local, remote, 4 * KIB)


def test_many_writes_may_be_open_at_once(pair: tuple[TransportProcess, TransportProcess]) -> None:
    """Hundreds of writes under several tags: each one ends once, and all bytes are right."""
    writer, receiver = pair
    choose = random.Random(7)
    local = [choose.randrange(40) for _ in range(56)]
    remote = choose.sample(range(56), 56)
    for tag in range(4):
        receiver.do("expect", tag=tag, pages=remote[tag::4])
    ids = []
    for _ in range(5):
        for number in range(56):
            ids.append(writer.write(receiver, number % 4, [local[number]], [remote[number]]))
    events = writer.events(len(ids))
    assert sorted(events, key=lambda event: int(event["write_id"])) == [done(i) for i in ids]
    assert_landed(writer, receiver, local, remote, 16 * KIB)


def test_a_write_of_nothing_is_done(pair: tuple[TransportProcess, TransportProcess]) -> None:
    """An empty batch ends like any other and changes nothing."""
    writer, receiver = pair
    receiver.do("expect", tag=1, pages=[])
    write_id = writer.write(receiver, 1, [], [])
    assert writer.events(1) == [done(write_id)]
    assert receiver.do("untouched_except", pages=[], offset=0, length=0)


def test_both_directions_work_between_two_processes(
    pair: tuple[TransportProcess, TransportProcess],
) -> None:
    """Each side may be writer and receiver at once."""
    one, other = pair
    other.connect(one)
    one.do("expect", tag=5, pages=[39])
    other.do("expect", tag=5, pages=[55])
    assert one.events(1, 0) == []
    there, back = one.write(other, 5, [0], [55]), other.write(one, 5, [1], [39])
    assert one.events(1) == [done(there)]
    assert other.events(1) == [done(back)]
    assert one.do("digests", pages=[0], offset=0, length=16 * KIB) == other.do(
        "digests", pages=[55], offset=0, length=16 * KIB
    )
    assert one.do("digests", pages=[39], offset=0, length=16 * KIB) == other.do(
        "digests", pages=[1], offset=0, length=16 * KIB
    )


def test_a_write_to_an_unknown_peer_fails_as_an_event(take: Take) -> None:
    """No exception: one path handles every failure."""
    writer, stranger = take(), take()
    writer.setup(pages=2, stride=4 * KIB)
    stranger.setup(pages=2, stride=4 * KIB)
    write_id = writer.write(stranger, 1, [0], [0])
    (event,) = writer.events(1)
    assert (event["kind"], event["write_id"]) == ("WriteFailed", write_id)
    assert stranger.incarnation in event["reason"]


@pytest.mark.parametrize(
    ("local", "remote"), [([0], [56]), ([40], [0]), ([-1], [0]), ([0], [-1]), ([0, 1], [0])]
)
def test_pages_outside_the_tables_are_refused(
    pair: tuple[TransportProcess, TransportProcess], local: list[int], remote: list[int]
) -> None:
    """Indices that are no pages fail the write before a byte moves; the connection goes on."""
    writer, receiver = pair
    receiver.do("expect", tag=1, pages=[0])
    write_id = writer.write(receiver, 1, local, remote)
    (event,) = writer.events(1)
    assert (event["kind"], event["write_id"]) == ("WriteFailed", write_id)
    assert receiver.do("untouched_except", pages=[], offset=0, length=0)
    after = writer.write(receiver, 1, [0], [0])
    assert writer.events(1) == [done(after)]


def test_a_page_table_outside_registered_memory_is_refused(take: Take) -> None:
    """Neither side's table may name memory that was not registered."""
    writer, receiver = take(), take()
    writer.setup(pages=4, stride=4 * KIB)
    receiver.setup(pages=4, stride=4 * KIB)
    with pytest.raises(TransportError, match="the peer names memory"):
        writer.connect(receiver, remote_offset=8)
    with pytest.raises(TransportError, match="this process names memory"):
        writer.connect(receiver, local_offset=8)
    with pytest.raises(TransportError, match="at least one byte"):
        writer.connect(receiver, page_bytes=-1)


def test_a_damaged_description_is_refused(take: Take) -> None:
    """Garbage, a cut-off, a flipped bit and another transport's description: a clear error each."""
    writer, receiver = take(), take()
    writer.setup(pages=2, stride=4 * KIB)
    receiver.setup(pages=2, stride=4 * KIB)
    whole = bytes.fromhex(receiver.description)
    middle = len(whole) // 2
    damaged = [b"\0", b"garbage", whole[:-9], whole + b"\0"]
    damaged.append(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    damaged.append(random.Random(1).randbytes(500))
    for description in damaged:
        with pytest.raises(TransportError):
            writer.connect(receiver, description=description.hex())
    name = writer.variant.transport.encode()
    other = whole.replace(name, b"\x7f" * len(name), 1) if name in whole else b"x"
    with pytest.raises(TransportError):
        writer.connect(receiver, description=other.hex())
    writer.connect(receiver)


def test_the_death_of_a_peer_becomes_an_event(
    pair: tuple[TransportProcess, TransportProcess],
) -> None:
    """kill -9 while nothing is written: an event, at the latest when the next write is tried."""
    writer, receiver = pair
    receiver.do("expect", tag=1, pages=[0])
    first = writer.write(receiver, 1, [0], [0])
    assert writer.events(1) == [done(first)]
    receiver.kill()
    if writer.variant.notices_idle_death:
        (event,) = writer.events(1, deadline_s=5)
        assert (event["kind"], event["peer"]) == ("PeerLost", receiver.incarnation)
        after = writer.write(receiver, 1, [0], [0])
        (event,) = writer.events(1)
        assert (event["kind"], event["write_id"]) == ("WriteFailed", after)
        return
    kinds = set()
    deadline = time.monotonic() + 10
    while "PeerLost" not in kinds and time.monotonic() < deadline:
        writer.write(receiver, 1, [0], [0])
        kinds |= {event["kind"] for event in writer.events(1)}
    assert {"WriteFailed", "PeerLost"} <= kinds


def test_the_death_of_a_peer_ends_every_open_write(take: Take) -> None:
    """kill -9 in the middle of writing: all writes end, the peer is lost, nothing hangs."""
    writer, receiver = take(), take()
    writer.setup(pages=64, stride=256 * KIB)
    receiver.setup(pages=64, stride=256 * KIB)
    writer.connect(receiver)
    pages = list(range(64))
    receiver.do("expect", tag=1, pages=pages)
    writer.do(
        "flood", peer=receiver.incarnation, tag=1, local=pages, remote=pages[::-1], open_limit=6
    )
    deadline = time.monotonic() + 20
    while writer.do("counts")["done"] < 3:
        assert time.monotonic() < deadline, "the flood does not flow"
    receiver.kill()
    kinds: list[str] = []
    while "PeerLost" not in kinds or writer.do("counts")["open"]:
        assert time.monotonic() < deadline, "the loss was not reported"
        kinds += [event["kind"] for event in writer.events(1, 1)]
    assert "WriteFailed" in kinds
    assert kinds.count("PeerLost") == 1


def test_a_stopped_receiver_does_not_stop_the_writer(take: Take) -> None:
    """SIGSTOP: the writer's poll stays quick; after SIGCONT every byte arrives."""
    writer, receiver = take(), take()
    writer.setup(pages=64, stride=256 * KIB)
    receiver.setup(pages=64, stride=256 * KIB)
    writer.connect(receiver)
    pages = list(range(64))
    receiver.do("expect", tag=1, pages=pages)
    first = writer.write(receiver, 1, pages[:1], pages[-1:])
    assert writer.events(1) == [done(first)]
    receiver.stop()
    writer.do("take_slowest_poll_s")
    ids = [writer.write(receiver, 1, pages, pages[::-1]) for _ in range(3)]
    early = writer.events(3, deadline_s=STOPPED_S)
    slowest_s = writer.do("take_slowest_poll_s")
    receiver.go_on()
    events = early + writer.events(3 - len(early))
    assert sorted(events, key=lambda event: int(event["write_id"])) == [done(i) for i in ids]
    assert slowest_s < STOPPED_S / 2
    assert_landed(writer, receiver, pages, pages[::-1], 256 * KIB)


def test_the_death_of_a_stopped_peer_ends_what_it_held_up(take: Take) -> None:
    """Writes stuck behind a stopped receiver fail when it is killed."""
    writer, receiver = take(), take()
    writer.setup(pages=64, stride=256 * KIB)
    receiver.setup(pages=64, stride=256 * KIB)
    writer.connect(receiver)
    pages = list(range(64))
    receiver.do("expect", tag=1, pages=pages)
    first = writer.write(receiver, 1, pages[:1], pages[-1:])
    assert writer.events(1) == [done(first)]
    receiver.stop()
    for _ in range(3):
        writer.write(receiver, 1, pages, pages)
    receiver.kill()
    deadline = time.monotonic() + 20
    while writer.do("counts")["open"]:
        assert time.monotonic() < deadline, "writes to a dead peer stay open"


def test_a_restarted_peer_is_a_new_peer(take: Take) -> None:
    """The successor has its own incarnation; writing to it works although the old one is gone."""
    writer, receiver, successor = take(), take(), take()
    writer.setup(pages=4, stride=4 * KIB)
    receiver.setup(pages=4, stride=4 * KIB)
    writer.connect(receiver)
    receiver.do("expect", tag=1, pages=[0])
    first = writer.write(receiver, 1, [0], [0])
    assert writer.events(1) == [done(first)]
    receiver.kill()
    successor.setup(pages=6, stride=4 * KIB)
    writer.connect(successor)
    writer.do("disconnect", peer=receiver.incarnation)
    writer.do("take_events")
    successor.do("expect", tag=1, pages=[5, 1])
    again = writer.write(successor, 1, [3, 2], [5, 1])
    assert done(again) in writer.events(1)
    assert_landed(writer, successor, [3, 2], [5, 1], 4 * KIB)


def test_revoke_keeps_what_the_capabilities_promise(
    pair: tuple[TransportProcess, TransportProcess],
) -> None:
    """True where the receiver places the bytes; then a later write fails and lands nothing."""
    writer, receiver = pair
    receiver.do("expect", tag=1, pages=[0, 1])
    first = writer.write(receiver, 1, [0], [0])
    assert writer.events(1) == [done(first)]
    revoked = receiver.do("revoke", tag=1)
    if receiver.capabilities["writer_ends_by"] != "receiver_revokes":
        return
    assert revoked
    late = writer.write(receiver, 1, [1], [1])
    (event,) = writer.events(1)
    assert (event["kind"], event["write_id"]) == ("WriteFailed", late)
    assert receiver.do("untouched_except", pages=[0], offset=0, length=16 * KIB)
    receiver.do("expect", tag=2, pages=[1])
    again = writer.write(receiver, 2, [1], [1])
    assert writer.events(1) == [done(again)]


def test_a_disconnected_peer_is_forgotten(pair: tuple[TransportProcess, TransportProcess]) -> None:
    """A write after it fails, a new connection works, and unknown peers are ignored."""
    writer, receiver = pair
    receiver.do("expect", tag=1, pages=[0])
    writer.do("disconnect", peer="nobody")
    writer.do("disconnect", peer=receiver.incarnation)
    write_id = writer.write(receiver, 1, [0], [0])
    (event,) = writer.events(1)
    assert (event["kind"], event["write_id"]) == ("WriteFailed", write_id)
    writer.connect(receiver)
    again = writer.write(receiver, 1, [0], [0])
    assert writer.events(1) == [done(again)]


def test_close_returns_with_writes_open(take: Take) -> None:
    """Closing never waits for a peer, here one that is stopped."""
    writer, receiver = take(), take()
    writer.setup(pages=64, stride=256 * KIB)
    receiver.setup(pages=64, stride=256 * KIB)
    writer.connect(receiver)
    pages = list(range(64))
    receiver.do("expect", tag=1, pages=pages)
    first = writer.write(receiver, 1, [0], [0])
    assert writer.events(1) == [done(first)]
    receiver.stop()
    for _ in range(3):
        writer.write(receiver, 1, pages, pages)
    started = time.monotonic()
    writer.do("close")
    assert time.monotonic() - started < ANSWER_DEADLINE_S / 2
    receiver.go_on()


def test_nothing_listens_beyond_loopback(pair: tuple[TransportProcess, TransportProcess]) -> None:
    """Neither side has a listening socket that another host can reach."""
    addresses = {
        connection.laddr.ip
        for process in pair
        for connection in psutil.Process(process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1", "::1"}

"""What a prefill rank makes of decode ranks that misbehave, disappear, or are strangers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from support.kv_peers import FakeDecode, Sleeper, broken_layouts
from support.kv_rank import KvRank, opened, until

from splitserve.kv_transfer import messages, sending_side
from splitserve.kv_transfer.fingerprint import prompt_hash
from splitserve.kv_transfer.orders import StepOrders
from splitserve.kv_transfer.process_identity import own_identity
from splitserve.kv_transfer.transports.registry import create
from splitserve.kv_transfer.transports.settings import TransportSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from splitserve.kv_transfer.transports.base import Transport

PROMPT = list(range(8))
BLOCKS = [3, 4]


class Decode(FakeDecode):
    """A decode rank with real memory and a real transport, driven by hand."""

    def __init__(self, address: str, port: int, incarnation: str = "D") -> None:
        super().__init__(address)
        self.rank = KvRank(incarnation, port)
        self.transport: Transport = create("tcp", TransportSettings(incarnation=incarnation))
        self.transport.register(self.rank.thread._regions)

    def introduce(self, **changes: Any) -> None:
        self.hello(self.rank, description=self.transport.describe(), **changes)

    def grant(self, **changes: Any) -> messages.Grant:
        fields: dict[str, Any] = {
            "transfer_id": "t",
            "attempt": 1,
            "tag": 7,
            "first_block": 0,
            "block_ids": (5, 6),
            "prompt_tokens": len(PROMPT),
            "prompt_hash": prompt_hash(PROMPT),
            "grants_expected": 1,
        }
        return messages.Grant(**{**fields, **changes})

    def place_until(self, kind: type[messages.Delivered]) -> messages.Delivered:
        """Receive pages until that message comes."""
        found: list[messages.Delivered] = []

        def has_come() -> bool:
            self.transport.poll()
            found.extend(m for m in self.heard(0.001) if isinstance(m, kind))
            return bool(found)

        until(has_come, kind.__name__)
        return found[0]

    def close(self) -> None:
        self.transport.close()
        super().close()


@pytest.fixture
def p(free_port: Callable[[], int], request: pytest.FixtureRequest) -> Iterator[KvRank]:
    """A prefill rank; a parameter is how long it bears silence, in seconds."""
    silence_s = getattr(request, "param", 60.0)
    rank = KvRank("P", free_port(), stream_min_bytes=1, peer_silence_s=silence_s)
    rank.fill(1)
    rank.thread.start()
    yield rank
    rank.thread.stop()


@pytest.fixture
def d(p: KvRank, free_port: Callable[[], int]) -> Iterator[Decode]:
    """A decode rank that has not introduced itself."""
    decode = Decode(p.address, free_port())
    yield decode
    decode.close()


def give_up(p: KvRank, transfer_id: str) -> None:
    """The router says that nobody will fetch the transfer."""
    p.thread.begin_step(StepOrders(given_up=((transfer_id, "no decode node is left"),)))


def assert_alive(p: KvRank, d: Decode) -> None:
    """A whole transfer still works."""
    d.introduce()
    d.expect(messages.Welcome)
    d.transport.expect(99, d.rank.layout.page_indices(range(4), [8, 9]))
    d.say(d.grant(transfer_id="alive", tag=99, block_ids=(8, 9)))
    p.step("alive", [1, 2], 0, 2, opens=(opened("alive", PROMPT),))
    assert d.place_until(messages.Delivered).pages == 8
    d.say(messages.Landed(transfer_id="alive", attempt=1))
    p.close("alive")
    until(lambda: p.has_sent("p-alive"), "released")


def test_malformed_messages_are_dropped(p: KvRank, d: Decode) -> None:
    """Bytes that are no message, and messages of many frames, change nothing."""
    for payload in (b"", b"\xc1", b"\x80", b"x" * 100_000, messages.encode(messages.Pong())):
        d.send_frames(payload)
    d.send_frames(b"two", b"frames")
    for payload in broken_layouts(d.rank):
        d.send_frames(payload)
    assert_alive(p, d)


def test_nothing_is_answered_before_a_hello(p: KvRank, d: Decode) -> None:
    """A connection without an introduction gets no answer to anything."""
    d.say(d.grant())
    d.say(messages.Ping())
    d.say(messages.Cancel(transfer_id="t", attempt=1, reason=""))
    d.introduce()
    assert isinstance(next(iter(d.heard(20.0))), messages.Welcome)


def test_a_hello_with_a_wrong_mac_is_not_answered(p: KvRank, d: Decode) -> None:
    """Only who knows the secret is answered."""
    d.introduce(secret=b"another secret, as long")
    d.say(messages.Ping())
    d.introduce()
    assert isinstance(next(iter(d.heard(20.0))), messages.Welcome)


def test_strangers_are_not_answered(p: KvRank, d: Decode) -> None:
    """A socket without CURVE, or with the key of another cluster, gets nothing."""
    context: zmq.Context[Any] = zmq.Context()
    plain: zmq.Socket[Any] = context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(p.address)
    plain.send(b"hello")
    other = FakeDecode(p.address, secret=b"another secret, as long")
    other.hello(d.rank)
    assert_alive(p, d)
    assert not plain.poll(0)
    assert not list(other.heard(0.01))
    other.close()
    context.destroy(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ids": (0, 1)},
        {"block_ids": (5, 32)},
        {"block_ids": (5, -1)},
        {"block_ids": tuple(range(1, 32)) * 9},
        {"tag": -1},
        {"first_block": -1, "block_ids": (1, 2, 3)},
        {"block_ids": (5,)},
        {"first_block": 2, "block_ids": ()},
        {"first_block": 1, "block_ids": (1, 2)},
        {"prompt_tokens": 9},
        {"prompt_hash": b""},
    ],
)
def test_a_grant_that_cannot_be_filled_is_fenced(
    p: KvRank, d: Decode, changes: dict[str, Any]
) -> None:
    """Every grant is answered; one that names the wrong pages or prompt is refused at once."""
    d.introduce()
    p.step("t", BLOCKS, 0, 2, opens=(opened("t", PROMPT),))
    d.say(d.grant(**changes))
    assert d.expect(messages.Fenced).reason
    assert_alive(p, d)


def test_landed_before_delivered_is_ignored(p: KvRank, d: Decode) -> None:
    """A peer that counts pages too early, or of other transfers, does not harm the thread."""
    d.introduce()
    d.expect(messages.Welcome)
    p.open("t", PROMPT)
    for message in (
        messages.Landed(transfer_id="t", attempt=1),
        d.grant(),
        messages.Landed(transfer_id="t", attempt=1),
        messages.Landed(transfer_id="t", attempt=2),
        messages.Landed(transfer_id="u", attempt=1),
    ):
        d.say(message)
    assert_alive(p, d)
    d.say(messages.Cancel(transfer_id="t", attempt=1, reason="enough"))
    assert d.expect(messages.Fenced).transfer_id == "t"


def test_a_newer_attempt_ends_the_older(p: KvRank, d: Decode) -> None:
    """Attempt 2 granted without a cancel of attempt 1: 1 is fenced, 2 is filled."""
    d.introduce()
    d.expect(messages.Welcome)
    p.open("t", PROMPT)
    d.say(d.grant())
    d.transport.expect(8, d.rank.layout.page_indices(range(4), [8, 9]))
    d.say(d.grant(attempt=2, tag=8, block_ids=(8, 9)))
    assert d.expect(messages.Fenced).attempt == 1
    p.step("t", BLOCKS, 0, 2)
    assert d.place_until(messages.Delivered).attempt == 2
    assert (p.pages[:, BLOCKS] == d.rank.pages[:, [8, 9]]).all()


def test_a_write_that_the_peer_refuses_fences_the_transfer(p: KvRank, d: Decode) -> None:
    """Pages that D has revoked are an end for that transfer only."""
    d.introduce()
    d.expect(messages.Welcome)
    d.say(d.grant())
    p.step("t", BLOCKS, 0, 2, opens=(opened("t", PROMPT),))
    found: list[messages.Fenced] = []

    def is_fenced() -> bool:
        d.transport.poll()
        found.extend(m for m in d.heard(0.001) if isinstance(m, messages.Fenced))
        return bool(found)

    until(is_fenced, "fenced")
    assert "not granted" in found[0].reason
    assert_alive(p, d)


@pytest.mark.parametrize("p", [1.0], indirect=True)
def test_a_silent_peer_is_given_up_and_may_come_back(p: KvRank, d: Decode) -> None:
    """A decode rank that says nothing is told so; its transfer is fenced, and what it was sent is
    free once nobody else is to have it.
    """
    d.introduce()
    d.expect(messages.Welcome)
    d.say(d.grant())
    p.step("t", BLOCKS, 0, 2, opens=(opened("t", PROMPT),))
    p.close("t")
    assert "silent for 1 s" in d.expect(messages.Fenced).reason
    assert "silent for 1 s" in d.expect(messages.TurnedAway).reason
    give_up(p, "t")
    until(lambda: p.has_sent("p-t"), "released")
    d.say(messages.Ping())
    assert_alive(p, d)


@pytest.mark.parametrize("p", [1.0], indirect=True)
def test_a_peer_that_stops_reading_is_given_up(p: KvRank, d: Decode) -> None:
    """Writes that never end do not hold the source for ever, though the peer says it lives."""
    d.introduce()
    d.expect(messages.Welcome)
    d.say(d.grant())
    p.step("t", BLOCKS, 0, 2, opens=(opened("t", PROMPT),))
    p.close("t")

    give_up(p, "t")

    def is_released() -> bool:
        d.say(messages.Ping())
        return p.has_sent("p-t")

    until(is_released, "released")


def test_the_death_of_the_peers_process_is_noticed_at_once(
    p: KvRank, d: Decode, free_port: Callable[[], int]
) -> None:
    """A killed decode engine is fenced without waiting for silence; what it was sent is kept for
    another one until the router gives the transfer up.
    """
    sleeper = Sleeper()
    d.introduce(process=sleeper.identity)
    d.expect(messages.Welcome)
    d.say(d.grant())
    p.step("t", BLOCKS, 0, 2, opens=(opened("t", PROMPT),))
    d.expect(messages.Writing)
    p.close("t")
    sleeper.kill()
    assert "process is gone" in d.expect(messages.Fenced).reason
    p.collect()
    assert not p.has_sent("p-t")
    give_up(p, "t")
    until(lambda: p.has_sent("p-t"), "released")
    other = Decode(p.address, free_port(), "E")
    other.introduce(process=sleeper.identity)
    assert "is gone" in other.expect(messages.TurnedAway).reason
    other.close()
    assert_alive(p, d)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": -1},
        {"pid": 1 << 40},
        {"start_ticks": 1},
    ],
)
def test_a_process_that_cannot_be_is_turned_away(
    p: KvRank, d: Decode, changes: dict[str, int]
) -> None:
    """An introduction that names no process is refused, not believed and not fatal."""
    d.introduce(process=msgspec.structs.replace(own_identity(), **changes))
    assert d.expect(messages.TurnedAway).reason
    assert_alive(p, d)


def test_a_damaged_description_is_turned_away(p: KvRank, d: Decode) -> None:
    """What the transport cannot read is an answer, and leaves nothing behind."""
    d.hello(d.rank, description=b"nonsense")
    assert "cannot be read" in d.expect(messages.TurnedAway).reason
    assert_alive(p, d)


def test_peers_are_bounded(
    p: KvRank, d: Decode, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More decode ranks than the limit are turned away with the reason."""
    monkeypatch.setattr(sending_side, "PEER_LIMIT_RANKS", 1)
    d.introduce()
    d.expect(messages.Welcome)
    other = Decode(p.address, free_port(), "E")
    other.introduce()
    assert "1 decode ranks" in other.expect(messages.TurnedAway).reason
    other.close()


def test_a_reconnected_peer_keeps_its_transfers(p: KvRank, d: Decode) -> None:
    """A second connection of the same rank takes over: fences are said there."""
    d.introduce()
    d.expect(messages.Welcome)
    d.say(d.grant())
    p.open("t", PROMPT)
    again = FakeDecode(p.address)
    again.hello(d.rank, description=d.transport.describe())
    again.expect(messages.Welcome)
    again.say(messages.Cancel(transfer_id="t", attempt=1, reason="enough"))
    assert again.expect(messages.Fenced).transfer_id == "t"
    again.close()

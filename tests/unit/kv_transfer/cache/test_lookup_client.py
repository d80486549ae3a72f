"""The scheduler's look-ups and servers that misbehave: no answer costs more than its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from support.cache_rig import CHUNK_TOKENS, DEADLINE_S, SHAPE, until

from splitserve.kv_transfer.cache import lookup_client, packets
from splitserve.kv_transfer.cache.lookup_client import NOTHING, REST_S, SILENCE_LIMIT, LookupClient
from splitserve.kv_transfer.cache.messages import (
    KEYS_LIMIT,
    Arena,
    Found,
    FromClient,
    Hello,
    Lookup,
    TierSpeed,
)
from splitserve.orchestrator.engines.mock.model import chunk_geometry

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 0.25
KEYS = [bytes([n] * 32) for n in range(5)]


class Clock:
    """Stands still unless the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A client and the server's end of its connection."""

    def __init__(self, path: str) -> None:
        self.listener = packets.listen(path)
        self.listener.settimeout(DEADLINE_S)
        self.client = LookupClient(
            path, "e", 1, bytes(32), chunk_geometry(CHUNK_TOKENS, SHAPE), limit_s=LIMIT_S
        )
        self.connection: socket.socket | None = None
        self._decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)

    def ask(self) -> int:
        number = self.client.ask(KEYS)
        assert number is not None
        return number

    def hear(self) -> object:
        if self.connection is None:
            self.connection, _ = self.listener.accept()
            self.connection.settimeout(DEADLINE_S)
            assert isinstance(self.hear(), Hello)
        packet = self.connection.recv(packets.BUFFER_BYTES)
        return self._decoder.decode(packet) if packet else None

    def say(self, message: object) -> None:
        assert self.connection is not None
        assert packets.send(self.connection, message)

    def answer(self, number: int, tiers: bytes = b"\0\0\1") -> None:
        self.say(Found(lookup_id=number, tiers=tiers, speeds=(TierSpeed(0, 0), TierSpeed(1, 1))))

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def until_known(self, number: int) -> bytes:
        found = [None]

        def known() -> bool:
            found[0] = self.client.answer(number)  # type: ignore[call-overload]
            return found[0] is not None

        until(known, "an answer")
        assert found[0] is not None
        return found[0].tiers  # type: ignore[unreachable]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(lookup_client, "monotonic", made)
    return made


@pytest.fixture
def rig(tmp_path: Path, clock: Clock) -> Iterator[Rig]:
    made = Rig(str(tmp_path / "cache.sock"))
    yield made
    made.client.close()
    made.hang_up()
    made.listener.close()


def test_answers_belong_to_their_questions(rig: Rig) -> None:
    """In any order, each given once; unknown numbers have found nothing."""
    one, two = rig.ask(), rig.ask()
    question = rig.hear()
    assert isinstance(question, Lookup)
    assert (question.keys, question.limit_s) == (b"".join(KEYS), LIMIT_S / 2)
    assert rig.client.answer(one) is None
    rig.answer(two, b"\1")
    rig.answer(one, b"\0\0")
    assert rig.until_known(one) == b"\0\0"
    assert rig.until_known(two) == b"\1"
    assert rig.client.answer(one) is NOTHING


def test_a_long_prompt_is_asked_for_as_far_as_a_message_goes(rig: Rig) -> None:
    """The rest is computed."""
    assert rig.client.ask([bytes(32)] * (KEYS_LIMIT + 5)) is not None
    question = rig.hear()
    assert isinstance(question, Lookup)
    assert len(question.keys) == KEYS_LIMIT * 32


def test_a_late_answer_is_nothing(rig: Rig, clock: Clock) -> None:
    """And does not confuse the next one."""
    late = rig.ask()
    rig.hear()
    clock.now += LIMIT_S
    assert rig.client.answer(late) is NOTHING
    rig.answer(late)
    number = rig.ask()
    rig.answer(number, b"\1\1")
    assert rig.until_known(number) == b"\1\1"
    assert rig.client.timeouts == 1


def test_a_silent_server_is_left_alone(rig: Rig, clock: Clock) -> None:
    """After some questions in a row none is asked for a while, which costs nothing."""
    for _ in range(SILENCE_LIMIT):
        number = rig.ask()
        clock.now += LIMIT_S
        assert rig.client.answer(number) is NOTHING
    assert rig.client.ask(KEYS) is None
    clock.now += REST_S
    number = rig.ask()
    rig.hear()
    rig.answer(number)
    assert rig.until_known(number) == b"\0\0\1"


def test_a_server_that_is_always_late_is_left_alone(rig: Rig, clock: Clock) -> None:
    """Answers that nobody waits for any more do not count as answers."""
    for _ in range(SILENCE_LIMIT):
        number = rig.ask()
        rig.hear()
        clock.now += LIMIT_S
        assert rig.client.answer(number) is NOTHING
        rig.answer(number)
    assert rig.client.ask(KEYS) is None


def test_a_server_that_dies(rig: Rig) -> None:
    """Open questions have found nothing; the next one goes to the next server."""
    number = rig.ask()
    rig.hear()
    rig.hang_up()
    assert rig.until_known(number) == b""
    number = rig.ask()
    rig.hear()
    rig.answer(number)
    assert rig.until_known(number) == b"\0\0\1"


def test_a_server_that_talks_nonsense(rig: Rig) -> None:
    """Counts as one that has died."""
    number = rig.ask()
    rig.hear()
    assert rig.connection is not None
    rig.connection.send(b"\xc1")
    assert rig.until_known(number) == b""


def test_a_server_that_refuses(rig: Rig, clock: Clock) -> None:
    """Is never asked again."""
    number = rig.ask()
    rig.hear()
    rig.say(Arena(server="s", size_bytes=1, tiers=(), refusal="another model"))
    assert rig.until_known(number) == b""
    clock.now += 100
    assert rig.client.ask(KEYS) is None
    assert rig.client.is_refused


def test_a_server_that_does_not_read(rig: Rig) -> None:
    """When its buffer is full there is nobody to ask."""
    rig.ask()
    keys = [bytes(32)] * KEYS_LIMIT
    assert any(rig.client.ask(keys) is None for _ in range(100))


def test_nothing_listens(tmp_path: Path) -> None:
    """There is nobody to ask."""
    geometry = chunk_geometry(CHUNK_TOKENS, SHAPE)
    client = LookupClient(str(tmp_path / "none"), "e", 1, bytes(32), geometry, limit_s=1.0)
    assert client.ask(KEYS) is None
    assert client.ask([]) is None

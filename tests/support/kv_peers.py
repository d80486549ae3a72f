"""Peers of a transfer thread that say whatever a test wants, over the real control channel."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from splitserve.kv_transfer import messages
from splitserve.kv_transfer.channel import dial, listen, mac
from splitserve.kv_transfer.process_identity import identity_of, own_identity
from splitserve.kv_transfer.sending_side import HELLO_PURPOSE
from support.kv_rank import DEADLINE_S, SECRET, KvRank

if TYPE_CHECKING:
    from collections.abc import Iterator

Message = TypeVar("Message")


class Sleeper:
    """A process to be named in an introduction and killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.identity = identity_of(self._process.pid)

    def kill(self) -> None:
        """Afterwards it is gone. Idempotent."""
        self._process.kill()
        self._process.wait(DEADLINE_S)
        if self._process.stdin is not None:
            self._process.stdin.close()


def introduction(rank: KvRank, **changes: Any) -> dict[str, Any]:
    """What ``rank`` would say of itself, with ``changes``."""
    fields = {
        "incarnation": rank.incarnation,
        "rank": 0,
        "tensor_parallel": 1,
        "fingerprint": {"weights": "w"},
        "layout": rank.layout,
        "transport": "tcp",
        "description": b"",
        "process": own_identity(),
    }
    return {**fields, **changes}


class FakeDecode:
    """Calls a prefill rank."""

    def __init__(self, address: str, *, secret: bytes = SECRET) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = dial(self._context, address, secret)

    def say(self, message: messages.FromDecode) -> None:
        self.send_frames(messages.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def hello(self, rank: KvRank, *, secret: bytes = SECRET, **changes: Any) -> None:
        """Introduce ``rank``, whose memory and transport are this test's."""
        fields = introduction(rank, **changes)
        peer = f"{fields['incarnation']}/{fields['rank']}"
        proof = mac(secret, HELLO_PURPOSE, peer.encode())
        self.say(messages.Hello(**fields, mac=proof))

    def heard(self, deadline_s: float) -> Iterator[messages.FromPrefill]:
        """Messages as they come, until the deadline."""
        until = time.monotonic() + deadline_s
        while (left := until - time.monotonic()) > 0 and self._socket.poll(int(left * 1000) + 1):
            yield messages.decode_from_prefill(self._socket.recv())

    def expect(self, kind: type[Message], deadline_s: float = DEADLINE_S) -> Message:
        """The next message of that kind; others are passed over."""
        for message in self.heard(deadline_s):
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} in {deadline_s:g} s")

    def close(self) -> None:
        self._context.destroy(0)


class FakePrefill:
    """Listens as a prefill rank; answers only when told to."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = listen(self._context, address, SECRET)
        self._identity = b""

    def expect(self, kind: type[Message], deadline_s: float = DEADLINE_S) -> Message:
        """The next message of that kind; others are passed over."""
        until = time.monotonic() + deadline_s
        while (left := until - time.monotonic()) > 0 and self._socket.poll(int(left * 1000) + 1):
            self._identity, payload = self._socket.recv_multipart()
            message = messages.decode_from_decode(payload)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} in {deadline_s:g} s")

    def say(self, message: messages.FromPrefill) -> None:
        """Answer whoever spoke last."""
        self.send_frames(messages.encode(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._identity, *frames])

    def welcome(self, rank: KvRank, **changes: Any) -> None:
        """Introduce this end as ``rank``."""
        self.say(messages.Welcome(**introduction(rank, **changes)))

    def close(self) -> None:
        self._context.destroy(0)


def broken_layouts(rank: KvRank) -> Iterator[bytes]:
    """Hellos whose layout cannot be memory, as bytes."""
    for change in (
        {"heads": 0},
        {"page_bytes": 0},
        {"num_blocks": -1},
        {"num_blocks": 1 << 60},
        {"block_stride": 1},
        {"layer_bases": []},
        {"layer_bases": [1 << 63]},
        {"layer_bases": [-1]},
        {"first_head": -1},
        {"heads": 100},
    ):
        hello = messages.Hello(**introduction(rank), mac=b"")
        plain = msgspec.msgpack.decode(messages.encode(hello))
        plain["layout"] |= change
        yield msgspec.msgpack.encode(plain)

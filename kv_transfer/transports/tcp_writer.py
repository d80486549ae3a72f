"""The writing end of ``tcp``: proves both sides, sends frames, collects their answers."""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from splitserve.kv_transfer.transports import tcp_protocol as wire
from splitserve.kv_transfer.transports.pages import ByteRanges, Int64Array, merge_pages
from splitserve.kv_transfer.transports.tcp_stream import (
    STEP_BYTES,
    Conversation,
    Stream,
    StreamEndedError,
    whole_buffer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.kv_transfer.transports.base import PageIndices, PagePairing


class Writer:
    """One outgoing connection. ``open_writes`` are those not yet answered, in the order written."""

    def __init__(
        self,
        stream: Stream,
        name: str,
        token: bytes,
        pairing: PagePairing,
        deadline: float,
        answered: Callable[[int, bool], None],
        lane: bytes = b"",
    ) -> None:
        self.stream = stream
        self.pairing = pairing
        self.deadline = deadline
        self.open_writes: dict[int, None] = {}
        self.ready = False
        self._name = name.encode()
        self._lane = lane
        self._token = token
        self._answered = answered
        self._early: list[tuple[ByteRanges, object]] = []
        stream.converse(self._conversation())

    def write(self, write_id: int, tag: int, local: PageIndices, remote: PageIndices) -> None:
        """The frame is on its way, or queued until the connection is ready."""
        self.open_writes[write_id] = None
        head = np.empty(wire.FRAME.size + remote.size * 8, dtype=np.uint8)
        page_bytes = self.pairing.page_bytes
        header = wire.FRAME.pack(tag, write_id, remote.size, page_bytes)
        head[: wire.FRAME.size] = np.frombuffer(header, dtype=np.uint8)
        head[wire.FRAME.size :].view(np.int64)[:] = remote
        frame = self._frame(write_id, head, local)
        if self.ready:
            self.stream.enqueue(frame, head)
        else:
            self._early.append((frame, head))

    def advance(self) -> None:
        """Go on with frames whose pages do not travel on the connection: here there are none."""

    def close(self) -> None:
        """Nothing more is sent, as far as it has not left this host."""
        self.stream.close(abort=True)

    def _frame(self, write_id: int, head: npt.NDArray[np.uint8], local: PageIndices) -> ByteRanges:
        """``head`` and the bytes of the pages."""
        addresses = self.pairing.local_addresses[local]
        (starts,), lengths = merge_pages((addresses,), self.pairing.page_bytes, STEP_BYTES)
        first: Int64Array = np.array([head.ctypes.data], dtype=np.int64)
        size: Int64Array = np.array([head.nbytes], dtype=np.int64)
        return ByteRanges((np.concatenate([first, starts]),), np.concatenate([size, lengths]))

    def _conversation(self) -> Conversation:
        challenge = np.empty(wire.CHALLENGE.size, dtype=np.uint8)
        yield whole_buffer(challenge)
        magic, nonce = wire.CHALLENGE.unpack(challenge.tobytes())
        if magic != wire.MAGIC:
            raise StreamEndedError("what listens there is no splitserve transport")
        proof = wire.Handshake(self._token, nonce, secrets.token_bytes(wire.NONCE_BYTES))
        self._say_hello(proof)
        welcome = np.empty(wire.WELCOME.size, dtype=np.uint8)
        yield whole_buffer(welcome)
        magic, mac, reason_bytes = wire.WELCOME.unpack(welcome.tobytes())
        if magic != wire.MAGIC or not hmac.compare_digest(mac, proof.receiver_mac()):
            raise StreamEndedError("what listens there did not prove that it is the peer")
        if reason_bytes:
            reason = np.empty(min(reason_bytes, wire.REASON_LIMIT_BYTES), dtype=np.uint8)
            yield whole_buffer(reason)
            raise StreamEndedError(f"refused: {reason.tobytes().decode(errors='replace')}")
        self.ready = True
        for frame, head in self._early:
            self.stream.enqueue(frame, head)
        self._early.clear()
        yield from self._answers()

    def _answers(self) -> Conversation:
        """What the receiver says once it listens to frames."""
        while True:
            ack = np.empty(wire.ACK.size, dtype=np.uint8)
            yield whole_buffer(ack)
            write_id, status = wire.ACK.unpack(ack.tobytes())
            if write_id not in self.open_writes:
                raise StreamEndedError("the peer answered a write that is not open")
            del self.open_writes[write_id]
            self._answered(write_id, status == wire.LANDED)

    def _say_hello(self, proof: wire.Handshake) -> None:
        table = self.pairing.remote_addresses
        self.stream.enqueue_bytes(
            wire.HELLO.pack(
                wire.MAGIC,
                proof.writer_nonce,
                proof.writer_mac(),
                len(self._name),
                len(self._lane),
                self.pairing.page_bytes,
                table.size,
            )
            + self._name
            + self._lane
        )
        if table.size:
            self.stream.enqueue(whole_buffer(table), table)

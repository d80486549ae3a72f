"""The receiving end of ``tcp``: proves the writer, checks every page index, places the bytes."""

from __future__ import annotations

import hmac
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splitserve.kv_transfer.transports import tcp_protocol as wire
from splitserve.kv_transfer.transports.base import PageIndices, Region, TransportError
from splitserve.kv_transfer.transports.pages import (
    ByteRanges,
    Int64Array,
    are_outside,
    check_inside,
    merge_pages,
)
from splitserve.kv_transfer.transports.tcp_stream import (
    STEP_BYTES,
    Conversation,
    Stream,
    StreamEndedError,
    nowhere,
    whole_buffer,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

logger = logging.getLogger(__name__)

UNREAD_ACKS_LIMIT = 4096
"""A writer that leaves this many answers unread is cut off."""


class Grants:
    """Which own pages may be written under which tag."""

    def __init__(self) -> None:
        self._pages: dict[int, Int64Array] = {}

    def expect(self, tag: int, pages: PageIndices) -> None:
        """``pages`` may be written under ``tag``, besides those before."""
        before = self._pages.get(tag, np.empty(0, dtype=np.int64))
        self._pages[tag] = np.union1d(before, np.asarray(pages, dtype=np.int64))

    def revoke(self, tag: int) -> None:
        """No page may be written under ``tag``."""
        self._pages.pop(tag, None)

    def why_not(self, tag: int, pages: Int64Array) -> str:
        """Why not all ``pages`` may be written under ``tag``; empty when they may."""
        granted = self._pages.get(tag)
        if granted is None:
            return "nothing is granted under this tag"
        if not granted.size:
            return "" if not pages.size else "a page is not granted under this tag"
        at = np.minimum(np.searchsorted(granted, pages), granted.size - 1)
        return "" if (granted[at] == pages).all() else "a page is not granted under this tag"


@dataclass
class _Placing:
    """A frame whose bytes are on their way into pages."""

    tag: int
    revoked: bool = False


class Receiver:
    """One incoming connection; ``peer`` is empty until the writer has proved the token."""

    def __init__(
        self,
        stream: Stream,
        token: bytes,
        grants: Grants,
        regions: Sequence[Region],
        deadline: float,
    ) -> None:
        self.stream = stream
        self.peer = ""
        self.lane = b""
        self.deadline = deadline
        self._token = token
        self._grants = grants
        self._regions = regions
        self._placing: _Placing | None = None
        stream.converse(self._conversation())

    def revoke(self, tag: int) -> None:
        """Bytes of a frame under ``tag`` that is half received go nowhere from now on."""
        if self._placing is not None and self._placing.tag == tag and not self._placing.revoked:
            self._placing.revoked = True
            self.stream.discard_incoming()

    def advance(self) -> None:
        """Go on with frames whose pages do not travel on the connection: here there are none."""

    def close(self) -> None:
        """No byte is placed any more."""
        self.stream.close(abort=False)

    def _conversation(self) -> Conversation:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.stream.enqueue_bytes(wire.CHALLENGE.pack(wire.MAGIC, nonce))
        hello = np.empty(wire.HELLO.size, dtype=np.uint8)
        yield whole_buffer(hello)
        magic, writer_nonce, mac, name_bytes, lane_bytes, page_bytes, pages = wire.HELLO.unpack(
            hello.tobytes()
        )
        proof = wire.Handshake(self._token, nonce, writer_nonce)
        if magic != wire.MAGIC or not hmac.compare_digest(mac, proof.writer_mac()):
            raise StreamEndedError("a connection did not prove that it knows the token")
        if not 0 < name_bytes <= wire.NAME_LIMIT_BYTES or lane_bytes > wire.LANE_LIMIT_BYTES:
            raise StreamEndedError("a writer's name or lane has no acceptable length")
        name = np.empty(name_bytes + lane_bytes, dtype=np.uint8)
        yield whole_buffer(name)
        self.peer = name[:name_bytes].tobytes().decode("utf-8", errors="replace")
        self.lane = name[name_bytes:].tobytes()
        room = sum(region.length for region in self._regions)
        if not 0 < page_bytes <= room or pages * page_bytes > room:
            self._welcome(proof, "its page table is larger than the memory that is registered here")
            raise StreamEndedError("a writer's page table is larger than the registered memory")
        table: Int64Array = np.empty(pages, dtype=np.int64)
        yield whole_buffer(table)
        reason = self._wrong_table(table, page_bytes)
        self._welcome(proof, reason)
        if reason:
            raise StreamEndedError(reason)
        while True:
            yield from self._frame(table, page_bytes)

    def _frame(self, table: Int64Array, page_bytes: int) -> Conversation:
        """One frame and its answer."""
        tag, write_id, indices, reason = yield from self._announced(table, page_bytes)
        if reason:
            yield nowhere(indices.size * page_bytes)
        else:
            self._placing = placing = _Placing(tag)
            yield ByteRanges(*merge_pages((table[indices],), page_bytes, STEP_BYTES))
            self._placing = None
            reason = "revoked" if placing.revoked else ""
        self._answer(write_id, landed=not reason)

    def _welcome(self, proof: wire.Handshake, reason: str) -> None:
        text = reason.encode()[: wire.REASON_LIMIT_BYTES]
        answer = wire.WELCOME.pack(wire.MAGIC, proof.receiver_mac(), len(text)) + text
        self.stream.enqueue_bytes(answer)
        self.stream.flush()

    def _wrong_table(self, table: Int64Array, page_bytes: int) -> str:
        try:
            check_inside("the receiver", table, page_bytes, self._regions)
        except TransportError as error:
            return str(error)
        if table.size and np.diff(np.sort(table)).min(initial=page_bytes) < page_bytes:
            return "pages of the receiver overlap in the writer's table"
        return ""

    def _announced(
        self, table: Int64Array, page_bytes: int
    ) -> Generator[ByteRanges, None, tuple[int, int, Int64Array, str]]:
        """Tag, write id and page indices of the next frame, and why it may not land, if so."""
        header = np.empty(wire.FRAME.size, dtype=np.uint8)
        yield whole_buffer(header)
        tag, write_id, count, frame_page_bytes = wire.FRAME.unpack(header.tobytes())
        if count > table.size or frame_page_bytes != page_bytes:
            raise StreamEndedError("a frame's header is malformed")
        indices: Int64Array = np.empty(count, dtype=np.int64)
        yield whole_buffer(indices)
        outside = count > 0 and are_outside(indices, table.size)
        reason = "a page is outside the table" if outside else self._grants.why_not(tag, indices)
        if reason:
            logger.warning("refused %d pages of %s: %s", count, self.peer, reason)
        return tag, write_id, indices, reason

    def _answer(self, write_id: int, *, landed: bool) -> None:
        status = wire.LANDED if landed else wire.REFUSED
        self.stream.enqueue_bytes(wire.ACK.pack(write_id, status))
        if self.stream.queued > UNREAD_ACKS_LIMIT:
            raise StreamEndedError("the writer does not read its answers")

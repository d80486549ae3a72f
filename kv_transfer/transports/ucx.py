"""UCX by ucxx, without NIXL: tagged messages straight into the pages. Optional (``pip install
splitserve[ucx]``).

Each connection is one of ``tcp`` (same proofs, same frames), on which the two sides agree; only the
pages travel by UCX. The writer announces a frame; the receiver checks it, posts one tagged receive
per page, and says go with the first of their tags; the writer sends the pages; the receiver answers
when all have arrived. So nothing arrives that nobody waits for, and the death of a peer is seen by
the connection.

A receive that has been posted cannot be taken back reliably: ``revoke`` is True only when no frame
of the tag is under way.

ucxx brings its own build of UCX and sets UCX's environment on import: it must not meet NIXL in a
process. Its default progress thread wants a CUDA driver and is not used: ``poll`` makes the
progress.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import select
import struct
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from splitserve.kv_transfer.transports import tcp_protocol as wire
from splitserve.kv_transfer.transports.base import (
    Capabilities,
    PageIndices,
    PagePairing,
    Region,
    TransportError,
    TransportEvent,
)
from splitserve.kv_transfer.transports.tcp import TcpDescription, TcpTransport
from splitserve.kv_transfer.transports.tcp_receiver import Grants, Receiver
from splitserve.kv_transfer.transports.tcp_stream import (
    Conversation,
    Stream,
    StreamEndedError,
    whole_buffer,
)
from splitserve.kv_transfer.transports.tcp_writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.transports.pages import ByteRanges, Int64Array
    from splitserve.kv_transfer.transports.settings import TransportSettings

logger = logging.getLogger(__name__)

GO = 2
"""Status of an answer that means: send the pages now, the first under the tag that follows."""
_FIRST_TAG = struct.Struct("<Q")
OPEN_FRAMES_LIMIT = 16
"""Frames per connection that receive pages at once; later ones wait for their go."""
_ARM_TRIES = 16
_CLOSE_PERIOD_NS = 100_000_000


class Lane:
    """This process's UCX worker: it owns the native objects and posts messages."""

    def __init__(self, net_devices: str) -> None:
        self._ucx, self._array = _load(net_devices)
        features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
        try:
            self._context = self._ucx.UCXContext({}, features)
            self._worker = self._ucx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except self._ucx.UCXError as error:
            raise TransportError(f"UCX cannot be used here: {error}") from error
        self._last_tag = 0

    def fileno(self) -> int:
        """Readable when the armed worker has something to do."""
        return int(self._worker.epoll_file_descriptor)

    def address(self) -> bytes:
        """What a peer makes an endpoint from."""
        return bytes(self._worker.address.tobytes())

    def endpoint(self, address: bytes) -> Any:
        """An endpoint to the worker at ``address``. Raises ``StreamEndedError``."""
        try:
            peer = self._ucx.UCXAddress.create_from_buffer(address)
            return self._ucx.UCXEndpoint.create_from_worker_address(self._worker, peer, True)
        except self._ucx.UCXError as error:
            raise StreamEndedError(f"UCX cannot reach it: {_said(error)}") from error

    def close(self, endpoint: Any) -> None:
        """Cancel what is under way on the endpoint and forget its peer, which is not waited for."""
        endpoint.close_blocking(_CLOSE_PERIOD_NS, 1)

    def new_tags(self, count: int) -> int:
        """The first of ``count`` tags that were never used."""
        first = self._last_tag + 1
        self._last_tag += count
        return first

    def send(self, endpoint: Any, pages: npt.NDArray[np.int64], size: int, tag: int) -> list[Any]:
        """Start sending the pages under ``tag`` and the following."""
        return self._post(endpoint.tag_send, pages, size, tag)

    def receive(
        self, endpoint: Any, pages: npt.NDArray[np.int64], size: int, tag: int
    ) -> list[Any]:
        """Start receiving the pages under ``tag`` and the following."""
        return self._post(endpoint.tag_recv, pages, size, tag)

    def progress(self) -> None:
        """Move what can be moved."""
        self._worker.progress()

    def arm(self) -> bool:
        """Whether ``fileno`` will tell of the next thing to do; False: there is something now."""
        return bool(self._worker.arm())

    def _post(
        self,
        post: Callable[..., Any],
        pages: npt.NDArray[np.int64],
        size: int,
        tag: int,
    ) -> list[Any]:
        memory = ctypes.c_uint8 * size
        try:
            return [
                post(self._array(memory.from_address(address)), tag=self._ucx.UCXXTag(tag + number))
                for number, address in enumerate(pages.tolist())
            ]
        except self._ucx.UCXError as error:
            raise StreamEndedError(f"UCX: {_said(error)}") from error

    def have_completed(self, requests: list[Any]) -> bool:
        """Whether all have, and well; ``StreamEndedError`` when one has failed."""
        if not all(request.completed for request in requests):
            return False
        try:
            for request in requests:
                request.check_error()
        except self._ucx.UCXError as error:
            raise StreamEndedError(f"UCX: {_said(error)}") from error
        return True


@dataclass
class _Frame:
    """An announced frame that the receiver accepted."""

    tag: int
    write_id: int
    addresses: Int64Array
    requests: list[Any]


class UcxReceiver(Receiver):
    """The receiving end: posts receives for the pages of each frame."""

    def __init__(
        self,
        stream: Stream,
        token: bytes,
        grants: Grants,
        regions: Sequence[Region],
        deadline: float,
        own_lane: Lane,
    ) -> None:
        self._own_lane = own_lane
        self._endpoint: Any = None
        self._page_bytes = 0
        self._waiting: deque[_Frame] = deque()
        self._open: deque[_Frame] = deque()
        super().__init__(stream, token, grants, regions, deadline)

    def revoke(self, tag: int) -> None:
        """Frames of the tag that have had no go are refused; the others go on."""
        refused = [frame for frame in self._waiting if frame.tag == tag]
        for frame in refused:
            self._waiting.remove(frame)
            self._answer(frame.write_id, landed=False)

    def receives(self, tag: int) -> bool:
        """Whether bytes can still land under ``tag``."""
        return any(frame.tag == tag for frame in self._open)

    def advance(self) -> None:
        """Answer the frames that are complete, and give the next their go."""
        lane = self._own_lane
        for frame in [frame for frame in self._open if lane.have_completed(frame.requests)]:
            self._open.remove(frame)
            self._answer(frame.write_id, landed=True)
        while self._waiting and len(self._open) < OPEN_FRAMES_LIMIT:
            frame = self._waiting.popleft()
            first = lane.new_tags(frame.addresses.size)
            frame.requests = lane.receive(self._endpoint, frame.addresses, self._page_bytes, first)
            self._open.append(frame)
            self.stream.enqueue_bytes(wire.ACK.pack(frame.write_id, GO) + _FIRST_TAG.pack(first))
        self.stream.flush()

    def close(self) -> None:
        """Posted receives are cancelled."""
        super().close()
        if self._endpoint is not None:
            self._own_lane.close(self._endpoint)
            self._endpoint = None

    def _frame(self, table: Int64Array, page_bytes: int) -> Conversation:
        tag, write_id, indices, reason = yield from self._announced(table, page_bytes)
        if self._endpoint is None:
            self._endpoint = self._own_lane.endpoint(self.lane)
            self._page_bytes = page_bytes
        if reason:
            self._answer(write_id, landed=False)
        elif not indices.size:
            self._answer(write_id, landed=True)
        else:
            self._waiting.append(_Frame(tag, write_id, table[indices], []))
            self.advance()


class UcxWriter(Writer):
    """The writing end: announces frames, and sends the pages of those that get a go."""

    def __init__(
        self,
        stream: Stream,
        name: str,
        token: bytes,
        pairing: PagePairing,
        deadline: float,
        answered: Callable[[int, bool], None],
        own_lane: Lane,
        peer_lane: bytes,
    ) -> None:
        self._own_lane = own_lane
        self._endpoint: Any = own_lane.endpoint(peer_lane)
        self._pages: dict[int, Int64Array] = {}
        self._sending: deque[list[Any]] = deque()
        super().__init__(stream, name, token, pairing, deadline, answered, own_lane.address())

    def advance(self) -> None:
        """Let go of messages that have left. Raises ``StreamEndedError`` when one failed."""
        while self._sending and self._own_lane.have_completed(self._sending[0]):
            self._sending.popleft()

    def close(self) -> None:
        """Messages that have not left are cancelled."""
        super().close()
        if self._endpoint is not None:
            self._own_lane.close(self._endpoint)
            self._endpoint = None

    def _frame(self, write_id: int, head: npt.NDArray[np.uint8], local: PageIndices) -> ByteRanges:
        self._pages[write_id] = self.pairing.local_addresses[local]
        return whole_buffer(head)

    def _answers(self) -> Conversation:
        while True:
            ack = np.empty(wire.ACK.size, dtype=np.uint8)
            yield whole_buffer(ack)
            write_id, status = wire.ACK.unpack(ack.tobytes())
            if write_id not in self.open_writes:
                raise StreamEndedError("the peer answered a write that is not open")
            if status == GO:
                first = np.empty(_FIRST_TAG.size, dtype=np.uint8)
                yield whole_buffer(first)
                (tag,) = _FIRST_TAG.unpack(first.tobytes())
                pages = self._pages.pop(write_id, None)
                if pages is None:
                    raise StreamEndedError("the peer asked twice for the pages of a write")
                self._sending.append(
                    self._own_lane.send(self._endpoint, pages, self.pairing.page_bytes, tag)
                )
                continue
            self._pages.pop(write_id, None)
            del self.open_writes[write_id]
            self._answered(write_id, status == wire.LANDED)


class UcxTransport(TcpTransport):
    """Agrees over TCP connections, moves pages by UCX."""

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        self._lane = Lane(settings.net_devices)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="ucx",
            same_host_only=False,
            target_must_progress=True,
            synchronous=False,
            writer_ends_by="process_death",
        )

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self._epoll.register(self._lane.fileno(), select.EPOLLIN)

    def connect(self, peer: str, description: bytes, pairing: PagePairing) -> None:
        try:
            super().connect(peer, description, pairing)
        except StreamEndedError as error:
            raise TransportError(f"peer {peer}: {error}") from error

    def poll(self) -> list[TransportEvent]:
        self._lane.progress()
        events = super().poll()
        self._advance()
        tries = 0
        while not self._lane.arm() and tries < _ARM_TRIES:
            self._lane.progress()
            self._advance()
            tries += 1
        events += self._events.take()
        if tries == _ARM_TRIES:
            self._events.wake()
        return events

    def revoke(self, tag: int) -> bool:
        """True when no frame under ``tag`` is under way."""
        super().revoke(tag)
        return not any(
            receiver.receives(tag)
            for receiver in self._receivers.values()
            if isinstance(receiver, UcxReceiver)
        )

    def close(self) -> None:
        """As in the interface; peers that live are told."""
        super().close()
        self._lane.progress()

    def _advance(self) -> None:
        for descriptor, receiver in list(self._receivers.items()):
            self._run_receiver(descriptor, receiver.advance)
        for peer, writer in list(self._writers.items()):
            self._run_writer(peer, writer.advance)

    def _own_lane(self) -> bytes:
        return self._lane.address()

    def _make_receiver(self, stream: Stream, deadline: float) -> Receiver:
        return UcxReceiver(stream, self._token, self._grants, self._regions, deadline, self._lane)

    def _make_writer(
        self, stream: Stream, told: TcpDescription, pairing: PagePairing, deadline: float
    ) -> Writer:
        name = self._settings.incarnation
        answered = self._answered
        return UcxWriter(
            stream, name, told.token, pairing, deadline, answered, self._lane, told.lane
        )


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _load(net_devices: str) -> tuple[Any, Any]:
    """ucxx's low-level module and its buffer class, imported after UCX knows its devices."""
    if net_devices:
        os.environ["UCX_NET_DEVICES"] = net_devices
    else:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if any(name.startswith("nixl") for name in sys.modules):
        raise TransportError("NIXL is loaded in this process: it brings another UCX than ucxx")
    try:
        return (
            importlib.import_module("ucxx._lib.libucxx"),
            importlib.import_module("ucxx._lib.arr").Array,
        )
    except ImportError as error:
        raise TransportError(
            f"the transport 'ucx' needs ucxx (pip install 'ucxx-cu12==0.52.*'): {error}"
        ) from error

"""One rank of an engine without the engine: KV memory in numpy and a real transfer thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from splitserve.kv_transfer.fingerprint import prompt_hash
from splitserve.kv_transfer.layout import PageLayout
from splitserve.kv_transfer.orders import (
    BeginReceive,
    CloseSend,
    OpenSend,
    SendProgress,
    StepOrders,
    TransferResults,
)
from splitserve.kv_transfer.settings import TransferSettings
from splitserve.kv_transfer.transfer_thread import TransferThread
from splitserve.kv_transfer.transports.base import Region

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = bytes(range(32))
LAYERS = 4
BLOCK_TOKENS = 4
HEAD_BYTES = 256
DEADLINE_S = 20.0
PROMPT = list(range(22))
"""Five full blocks and one that is half full."""
SOURCE = [3, 9, 4, 11, 7, 2]
TARGET = [21, 5, 8, 30, 1, 17]


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once ``condition`` holds; fail naming ``what`` when it does not in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not in {deadline_s:g} s: {what}"
        time.sleep(0.002)


class KvRank:
    """Pages ``[layer, block, head, bytes]`` and the thread that moves them."""

    def __init__(
        self,
        incarnation: str,
        port: int,
        *,
        blocks: int = 32,
        rank: int = 0,
        tensor_parallel: int = 1,
        total_heads: int = 2,
        layers: int = LAYERS,
        fingerprint: dict[str, str] | None = None,
        transport: str = "tcp",
        secret: bytes = SECRET,
        **settings: object,
    ) -> None:
        self.incarnation = incarnation
        self.address = f"tcp://127.0.0.1:{port}"
        self.heads = total_heads // tensor_parallel
        self.pages = np.zeros((layers, blocks, self.heads, HEAD_BYTES), dtype=np.uint8)
        page_bytes = self.heads * HEAD_BYTES
        base = self.pages.ctypes.data
        self.layout = PageLayout(
            layer_bases=tuple(base + layer * blocks * page_bytes for layer in range(layers)),
            block_stride=page_bytes,
            page_bytes=page_bytes,
            num_blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            heads=self.heads,
            first_head=rank * self.heads,
            total_heads=total_heads,
        )
        self.thread = TransferThread(
            TransferSettings(
                incarnation=incarnation,
                rank=rank,
                tensor_parallel=tensor_parallel,
                secret=secret,
                control_address=self.address,
                transport=transport,
                **settings,  # type: ignore[arg-type]
            ),
            layout=self.layout,
            regions=[Region(base, self.pages.nbytes)],
            fingerprint=fingerprint or {"weights": "w"},
        )
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()

    def fill(self, seed: int) -> None:
        """Random bytes in every page."""
        self.pages[:] = np.random.default_rng(seed).integers(0, 256, self.pages.shape, np.uint8)

    def collect(self) -> TransferResults:
        """Take the thread's results, each of which comes once."""
        results = self.thread.take_results()
        assert not (results.finished_sending & self.sent), "reported as sent twice"
        assert not (results.finished_receiving & self.received), "reported as received twice"
        assert results.failed_receiving <= results.finished_receiving
        self.sent |= results.finished_sending
        self.received |= results.finished_receiving
        self.failed |= results.failed_receiving
        return results

    def has_sent(self, request_id: str) -> bool:
        """Whether the blocks of a prefilled request are the engine's again."""
        self.collect()
        return request_id in self.sent

    def has_received(self, request_id: str) -> bool:
        """Whether a waiting request is settled, well or not."""
        self.collect()
        return request_id in self.received

    def open(self, transfer_id: str, prompt: list[int]) -> None:
        """A prefill leg arrives in the next step."""
        self.thread.begin_step(StepOrders(opens=(opened(transfer_id, prompt),)))

    def step(
        self,
        transfer_id: str,
        source_blocks: list[int],
        before: int,
        after: int,
        *,
        layers: int | None = None,
        opens: tuple[OpenSend, ...] = (),
        preempted: tuple[str, ...] = (),
    ) -> None:
        """One forward pass that makes blocks ``before`` to ``after`` final, layer by layer.

        With ``layers`` only so many layers run, and the step does not end.
        """
        progress = SendProgress(transfer_id, tuple(source_blocks), before, after)
        self.thread.begin_step(StepOrders(opens=opens, progress=(progress,), preempted=preempted))
        for layer in range(self.layout.layers if layers is None else layers):
            self.thread.layer_done(layer)
        if layers is None:
            self.thread.end_step()

    def close(self, transfer_id: str, *, aborted: bool = False) -> None:
        """The engine is done with the prefill leg."""
        self.thread.begin_step(StepOrders(closes=(CloseSend(f"p-{transfer_id}", aborted),)))

    def receive(
        self,
        transfer_id: str,
        prompt: list[int],
        block_ids: list[int],
        *peers: KvRank,
        first_block: int = 0,
        attempt: int = 1,
        incarnation: str = "",
        request_id: str = "",
    ) -> str:
        """A decode leg has its blocks; returns its request id."""
        request_id = request_id or f"d-{transfer_id}-{attempt}"
        order = BeginReceive(
            transfer_id=transfer_id,
            request_id=request_id,
            attempt=attempt,
            peer_incarnation=incarnation or peers[0].incarnation,
            peer_addresses=tuple(peer.address for peer in peers),
            first_block=first_block,
            block_ids=tuple(block_ids),
            prompt_tokens=len(prompt),
            prompt_hash=prompt_hash(prompt),
        )
        self.thread.begin_step(StepOrders(receives=(order,)))
        return request_id


def opened(transfer_id: str, prompt: list[int]) -> OpenSend:
    """The order that begins a send; the request is ``p-<transfer id>``."""
    blocks = -(-len(prompt) // BLOCK_TOKENS)
    return OpenSend(transfer_id, f"p-{transfer_id}", len(prompt), prompt_hash(prompt), blocks)


def finish(
    p: KvRank, d: KvRank, transfer_id: str, request: str, *, is_closed: bool = False
) -> None:
    """Close the prefill leg, unless it is, and wait until both sides are done."""
    until(lambda: d.has_received(request), "pages landed")
    d.thread.begin_step(StepOrders(acknowledged=(request,)))
    if not is_closed:
        p.close(transfer_id)
    until(lambda: p.has_sent(f"p-{transfer_id}"), "source blocks are released")
    counters = (p.thread.counters(), d.thread.counters())
    assert (counters[0]["open_sends"], counters[1]["open_receives"]) == (0, 0)

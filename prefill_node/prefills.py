"""What a prefill node adds to an engine's scheduler: which requests are computed for a peer, and
what is final when.

Engine-neutral and pure. The engine adapter reports arrivals, steps, preemptions and ends;
``take_orders`` gives what the workers' transfer threads must be told before the step's forward
pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from splitserve.kv_transfer.orders import CloseSend, OpenSend, SendProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.transfer_params import TransferParams


@dataclass
class Prefill:
    """One request that is computed here and used elsewhere."""

    transfer_id: str
    prompt_tokens: int
    finished: bool = False
    blocks: int = 0
    """Blocks that it held when it finished, for the count of leased blocks."""


class Prefills:
    """All requests of this engine that a peer waits for. Changed only by the engine's scheduler
    thread.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._prefills: dict[str, Prefill] = {}
        self._transfers: dict[str, str] = {}
        self._opens: list[OpenSend] = []
        self._progress: list[SendProgress] = []
        self._closes: list[CloseSend] = []
        self._preempted: list[str] = []
        self._filling: set[int] = set()
        """Blocks that some request computes into in the coming step."""
        self.leased_blocks = 0
        """Blocks of finished requests that are held for a peer; may be read from any thread."""

    def arrived(
        self, request_id: str, params: TransferParams, prompt_tokens: int, prompt_hash: bytes
    ) -> bool:
        """A prefill leg reached the engine. False when its transfer is being computed already."""
        if params.transfer_id in self._transfers:
            return False
        self._prefills[request_id] = Prefill(params.transfer_id, prompt_tokens)
        self._transfers[params.transfer_id] = request_id
        self._opens.append(OpenSend(
            transfer_id=params.transfer_id,
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            prompt_hash=prompt_hash,
            total_blocks=-(-prompt_tokens // self._block_tokens),
            traceparent=params.traceparent,
        ))  # fmt: skip
        return True

    def is_prefill(self, request_id: str) -> bool:
        """Whether a peer waits for this request."""
        return request_id in self._prefills

    @property
    def is_active(self) -> bool:
        """Whether any request is computed or held for a peer; if not, no step need be told."""
        return bool(self._prefills)

    def scheduled(
        self, request_id: str, computed_before: int, scheduled: int, block_ids: Sequence[int]
    ) -> None:
        """The step will compute ``scheduled`` tokens after ``computed_before`` known ones.

        ``block_ids`` is the request's block table from prompt block 0, including the blocks of this
        step. To be called for every request of the step, prefill leg or not: the engine's prefix
        cache may give a request blocks that another one fills in this same step.
        """
        first = computed_before // self._block_tokens
        end = -(-(computed_before + scheduled) // self._block_tokens)
        self._filling.update(block_ids[first:end])
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return
        total = -(-prefill.prompt_tokens // self._block_tokens)
        before = final_blocks(computed_before, prefill.prompt_tokens, self._block_tokens)
        after = final_blocks(computed_before + scheduled, prefill.prompt_tokens, self._block_tokens)
        self._progress.append(
            SendProgress(
                transfer_id=prefill.transfer_id,
                source_blocks=tuple(block_ids[:total]),
                final_before=before,
                final_after=after,
            )
        )

    def preempted(self, request_id: str) -> None:
        """The engine takes the request's blocks back before the coming step."""
        if request_id in self._prefills:
            self._preempted.append(request_id)

    def finished(self, request_id: str, *, aborted: bool, blocks: int) -> bool:
        """The engine is done with the request. True: its blocks must stay until ``released``."""
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return False
        assert not prefill.finished, f"request {request_id} finished twice"
        prefill.finished, prefill.blocks = True, blocks
        self.leased_blocks += blocks
        self._closes.append(CloseSend(request_id, aborted))
        return True

    def released(self, request_ids: Sequence[str] | set[str] | frozenset[str]) -> None:
        """The workers have reported these as sent: their blocks are the engine's again."""
        for request_id in request_ids:
            prefill = self._prefills.pop(request_id, None)
            if prefill is not None:
                del self._transfers[prefill.transfer_id]
                self.leased_blocks -= prefill.blocks

    @property
    def has_orders(self) -> bool:
        """Whether the workers must be told something before anything else happens."""
        return bool(self._opens or self._closes or self._preempted)

    def take_orders(
        self,
    ) -> tuple[
        tuple[str, ...], tuple[OpenSend, ...], tuple[SendProgress, ...], tuple[CloseSend, ...]
    ]:
        """(preempted, opens, progress, closes) since the last call."""
        taken = (
            tuple(self._preempted),
            tuple(self._opens),
            tuple(self._without_filling(item) for item in self._progress),
            tuple(self._closes),
        )
        self._filling.clear()
        self._preempted.clear()
        self._opens.clear()
        self._progress.clear()
        self._closes.clear()
        return taken

    def _without_filling(self, item: SendProgress) -> SendProgress:
        """Not final before the step: the blocks that the step fills, whoever does it."""
        known = item.source_blocks[: item.final_before]
        if self._filling.isdisjoint(known):
            return item
        before = next(n for n, block in enumerate(known) if block in self._filling)
        return structs.replace(item, final_before=before)


def final_blocks(computed_tokens: int, prompt_tokens: int, block_tokens: int) -> int:
    """Leading prompt blocks that hold their final bytes once ``computed_tokens`` tokens are
    computed.

    A block is final when it is full; the prompt's last block is final when the prompt is computed,
    full or not.
    """
    if computed_tokens >= prompt_tokens:
        return -(-prompt_tokens // block_tokens)
    return computed_tokens // block_tokens

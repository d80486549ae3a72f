"""What an engine's scheduler half tells the transfer thread of each worker, once per step.

Plain frozen structs: they travel inside the engine's own step message, and a mock engine builds
them the same way.
"""

from __future__ import annotations

import msgspec


class OpenSend(msgspec.Struct, frozen=True):
    """A request whose prompt is computed here for a decode node."""

    transfer_id: str
    request_id: str
    prompt_tokens: int
    prompt_hash: bytes
    total_blocks: int
    traceparent: str = ""


class SendProgress(msgspec.Struct, frozen=True):
    """What this step does for an open send."""

    transfer_id: str
    source_blocks: tuple[int, ...]
    """The request's block table from prompt block 0."""
    final_before: int
    """Prompt blocks that are final before the step (a cached prefix, earlier chunks)."""
    final_after: int
    """Prompt blocks that are final once each layer has run."""


class CloseSend(msgspec.Struct, frozen=True):
    """The engine is done with a request; its blocks stay until ``finished_sending`` names it."""

    request_id: str
    aborted: bool


class BeginReceive(msgspec.Struct, frozen=True):
    """Blocks are reserved: grant them to the prefill node at these addresses."""

    transfer_id: str
    request_id: str
    attempt: int
    peer_incarnation: str
    peer_addresses: tuple[str, ...]
    first_block: int
    block_ids: tuple[int, ...]
    prompt_tokens: int
    prompt_hash: bytes
    traceparent: str = ""


class Retarget(msgspec.Struct, frozen=True, tag="retarget"):
    """The prompt is computed by another prefill node: what was reserved for the transfer is granted
    to it, once the one before has fenced.
    """

    transfer_id: str
    attempt: int
    peer_incarnation: str
    peer_addresses: tuple[str, ...]
    reason: str


class Decline(msgspec.Struct, frozen=True):
    """This node computes the prompt itself after all: the prefill node need not keep it."""

    transfer_id: str
    attempt: int
    peer_addresses: tuple[str, ...]
    reason: str
    keeps: bool = False
    """Another decode node may still want it."""


class StepOrders(msgspec.Struct, frozen=True):
    """All orders of one step, in the order in which they are carried out."""

    preempted: tuple[str, ...] = ()
    """Request ids whose blocks the engine takes back in this step."""
    opens: tuple[OpenSend, ...] = ()
    progress: tuple[SendProgress, ...] = ()
    closes: tuple[CloseSend, ...] = ()
    receives: tuple[BeginReceive, ...] = ()
    acknowledged: tuple[str, ...] = ()
    """Request ids whose pages have been computed with: whoever wrote them may let go of theirs."""
    cancels: tuple[tuple[str, str], ...] = ()
    """(request id, reason): a waiting request was aborted."""
    retargets: tuple[Retarget, ...] = ()
    declines: tuple[Decline, ...] = ()
    given_up: tuple[tuple[str, str], ...] = ()
    """(transfer id, reason): the other leg will not come; either side."""
    dead_peers: tuple[str, ...] = ()
    """Incarnations whose processes are proven gone."""

    @property
    def is_empty(self) -> bool:
        """Nothing to do in this step."""
        return not any(getattr(self, name) for name in self.__struct_fields__)


class TransferResults(msgspec.Struct, frozen=True):
    """Request ids that the transfer thread is done with, each reported once."""

    finished_sending: frozenset[str] = frozenset()
    finished_receiving: frozenset[str] = frozenset()
    failed_receiving: frozenset[str] = frozenset()
    """A subset of ``finished_receiving``."""

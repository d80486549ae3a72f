"""Continuous batching as vLLM does it, small and pure: blocks, prefix cache, chunked prefill,
preemption, and the connector's hooks.

The contract with the hooks is vLLM's, so what holds here holds there:

* ``wanted_tokens`` may be asked often; when it answers more than 0 the request gets its blocks at
  once, is *parked*, and is not computed until it is reported as received. Its blocks are offered to
  other prompts only after that.
* One for which it answers None is asked again in the next step, and passed until then.
* An aborted request that is parked keeps its blocks until it is reported.
* ``finished`` answers whether a request's blocks stay until it is reported as sent.
* A report that nobody waits for is an ``AssertionError``: in vLLM it ends the engine.

What it does not know: time, memory, the text. The engine runs the plan and reports what was
sampled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from splitserve.orchestrator.engines.serving.blocks import BlockPool, block_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from splitserve.kv_transfer.orders import TransferResults


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt and its answer so far. Changed by the scheduler only."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    """Tokens with which the model, or the client, ends an answer."""
    sampling: object = None
    """How the engine chooses tokens; the scheduler does not look at it."""
    salt: str = ""
    kv_transfer_params: dict[str, object] | None = None
    answer: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV is in ``blocks``, or will be when the running step ends."""
    expected: int = 0
    """While parked: tokens that will come from outside."""
    cached: int = 0
    """Prompt tokens that were not computed here, when it was first computed."""
    status: Status = Status.WAITING
    finish_reason: str | None = None
    published: int = 0
    """Leading blocks that other prompts may use."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Chunk:
    """What one step computes of one request."""

    request: Request
    first: int
    tokens: int
    block_ids: tuple[int, ...]

    @property
    def samples(self) -> bool:
        """Whether the step gives the request a new token."""
        return self.first + self.tokens == self.request.length


@dataclass(frozen=True)
class StepPlan:
    """One step."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Progress:
    """A new token of a request, and whether it was the last."""

    request: Request
    token: int


class SchedulerHooks(Protocol):
    """What the scheduler asks the connector, in vLLM's order."""

    def arrived(self, request: Request) -> None:
        """Before anything is allocated."""

    def wanted_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Prompt tokens after ``computed_tokens`` that will come from outside; None: not known yet.
        Without effect.
        """

    def allocated(self, request: Request, external_tokens: int) -> None:
        """The request has its blocks; again with 0 once an external load is over."""

    def finished(self, request: Request, *, aborted: bool) -> bool:
        """Once per request; True keeps its blocks until it is reported as sent."""

    def step_reported(self, results: TransferResults) -> TransferResults:
        """What the workers reported, before the scheduler acts on it; the answer is what it acts
        on.
        """


class Scheduler:
    """All requests of an engine."""

    def __init__(
        self,
        hooks: SchedulerHooks,
        *,
        blocks: int,
        block_tokens: int,
        step_limit_tokens: int,
        running_limit_requests: int,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = BlockPool(blocks)
        self._hooks = hooks
        self._block_tokens = block_tokens
        self._step_limit_tokens = step_limit_tokens
        self._running_limit_requests = running_limit_requests
        self._prefix_caching = prefix_caching
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._parked: dict[str, Request] = {}
        self._aborted_parked: dict[str, Request] = {}
        self._sending: dict[str, Request] = {}
        """Finished requests whose blocks are still read for a peer."""

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request has arrived."""
        assert len(request.prompt) > 0
        self._waiting.append(request)
        self._hooks.arrived(request)

    def abort(self, request: Request) -> None:
        """The request ends; its blocks are free, or will be when its transfer is reported. Ended
        ones are ignored.
        """
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self._running.remove(request)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        else:
            self._aborted_parked[request.id] = self._parked.pop(request.id)
        self._finish(request, "abort", keep_blocks=request.status is Status.PARKED)

    @property
    def has_work(self) -> bool:
        """Whether a step may compute something."""
        return bool(self._running or self._waiting)

    @property
    def awaits_reports(self) -> bool:
        """Whether blocks wait for a report of the transfer threads."""
        return bool(self._parked or self._aborted_parked or self._sending)

    @property
    def parked(self) -> Mapping[str, Request]:
        """Requests that wait for their prompts, and for which somebody waits."""
        return self._parked

    @property
    def running_requests(self) -> int:
        """Requests that are being computed."""
        return len(self._running)

    @property
    def waiting_requests(self) -> int:
        """Requests that are not, parked ones included."""
        return len(self._waiting) + len(self._parked)

    # -- a step --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """What to compute next."""
        chunks: list[Chunk] = []
        preempted: list[str] = []
        budget = self._step_limit_tokens
        for request in list(self._running):
            if request.id in preempted or not budget:
                continue
            tokens = min(request.length - request.computed, budget)
            while not self._grow(request, tokens):
                victim = self._running.pop()
                self._preempt(victim)
                preempted.append(victim.id)
                if victim is request:
                    break
            else:
                chunks.append(self._planned(request, tokens))
                budget -= tokens
        if not preempted:
            chunks += self._admit(budget)
        return StepPlan(tuple(chunks), tuple(preempted))

    def _admit(self, budget: int) -> list[Chunk]:
        """Take up waiting requests in their order until one does not fit."""
        chunks: list[Chunk] = []
        undecided: list[Request] = []
        while self._waiting and budget and len(self._running) < self._running_limit_requests:
            request = self._waiting[0]
            if request.blocks:
                shared, external = [], 0
            else:
                shared = self._cached_blocks(request)
                request.computed = len(shared) * self._block_tokens
                wanted = self._hooks.wanted_tokens(request, request.computed)
                if wanted is None:
                    request.computed = 0
                    undecided.append(self._waiting.popleft())
                    continue
                external = wanted
            tokens = external or min(request.length - request.computed, budget)
            if not self._grow(request, tokens, shared):
                request.computed = request.computed if request.blocks else 0
                break
            self._waiting.popleft()
            self._hooks.allocated(request, external)
            if external:
                request.status, request.expected = Status.PARKED, external
                self._parked[request.id] = request
                continue
            request.cached = request.cached or request.computed
            request.status = Status.RUNNING
            self._running.append(request)
            chunks.append(self._planned(request, tokens))
            budget -= tokens
        self._waiting.extendleft(reversed(undecided))
        return chunks

    def update(
        self, plan: StepPlan, sampled: Mapping[str, int], results: TransferResults
    ) -> list[Progress]:
        """The step has run: ``sampled`` holds the new token of each request whose chunk
        ``samples``.
        """
        progress = []
        for chunk in plan.chunks:
            request = chunk.request
            if not chunk.samples:
                continue
            token = sampled[request.id]
            request.answer.append(token)
            reason = self._end_of(request, token)
            if reason is not None:
                self._running.remove(request)
                self._finish(request, reason, keep_blocks=False)
            progress.append(Progress(request, token))
        results = self._hooks.step_reported(results)
        for request_id in results.finished_receiving:
            self._received(request_id, failed=request_id in results.failed_receiving)
        for request_id in results.finished_sending:
            assert request_id in self._sending, f"{request_id} is not waited for as sent"
            self._free(self._sending.pop(request_id))
        return progress

    # -- inside --------------------------------------------------------------------------------

    def _cached_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the request's beginning already; never its last token, which must be
        computed.
        """
        if not self._prefix_caching:
            return []
        usable = (request.length - 1) // self._block_tokens
        return self.pool.find(self.hashes(request)[:usable])

    def hashes(self, request: Request) -> list[bytes]:
        """Of the request's full blocks."""
        return block_hashes(request.tokens, self._block_tokens, request.salt)

    def _grow(self, request: Request, tokens: int, shared: Sequence[int] = ()) -> bool:
        """Give the request blocks for ``tokens`` more; False, and nothing changed, when there are
        too few.
        """
        needed = -(-(request.computed + tokens) // self._block_tokens)
        taken = self.pool.take(shared, max(0, needed - len(request.blocks) - len(shared)))
        if taken is None:
            return False
        request.blocks += taken
        return True

    def _planned(self, request: Request, tokens: int) -> Chunk:
        """The chunk, after which the request counts as computed so far."""
        chunk = Chunk(request, request.computed, tokens, tuple(request.blocks))
        request.computed += tokens
        self._publish(request)
        return chunk

    def _publish(self, request: Request) -> None:
        full = request.computed // self._block_tokens
        if not self._prefix_caching or full <= request.published:
            return
        hashes = self.hashes(request)
        for index in range(request.published, full):
            self.pool.publish(request.blocks[index], hashes[index])
        request.published = full

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.status, request.computed = Status.WAITING, 0
        self._waiting.appendleft(request)

    def _received(self, request_id: str, *, failed: bool) -> None:
        """A parked request's transfer is over."""
        aborted = self._aborted_parked.pop(request_id, None)
        if aborted is not None:
            self._free(aborted)
            return
        assert request_id in self._parked, f"{request_id} is not waited for as received"
        request = self._parked.pop(request_id)
        if failed:
            self._free(request)
            request.computed = 0
        else:
            request.computed += request.expected
            self._publish(request)
            request.cached = request.computed
            if request.computed == request.length:
                request.computed -= 1
        request.expected = 0
        request.status = Status.WAITING
        self._waiting.appendleft(request)

    def _end_of(self, request: Request, token: int) -> str | None:
        if len(request.answer) > request.min_tokens and token in request.end_ids:
            return "stop"
        return "length" if len(request.answer) >= request.max_tokens else None

    def _finish(self, request: Request, reason: str, *, keep_blocks: bool) -> None:
        request.status, request.finish_reason = Status.FINISHED, reason
        if self._hooks.finished(request, aborted=reason == "abort"):
            assert not keep_blocks, f"{request.id} is both sent and received"
            self._sending[request.id] = request
        elif not keep_blocks:
            self._free(request)

    def _free(self, request: Request) -> None:
        self.pool.give_back(request.blocks)
        request.blocks, request.published = [], 0

"""A modelled vLLM engine around the real ``Legs``: steps, blocks, parked requests, preemption, and
an answer that depends on every page.

What it copies from vLLM: a decode leg is parked until it is reported as received; the blocks of an
aborted parked request stay until then, those of a finished prefill leg until it is reported as
sent; a preempted request computes again from its start. It has no prefix cache: the real engines'
is tested with the mock engine and with vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from simulation.memory import BLOCK_TOKENS, LAYERS, Memory, blocks_for, page_of
from simulation.prefixes import PrefixCache
from simulation.transfers import Transfers
from simulation.world import Process
from splitserve.kv_transfer.cache.engine_cache import PromptIdentity
from splitserve.kv_transfer.engine_endpoint import EngineDescription, Order, PeerIsDead
from splitserve.kv_transfer.holdings import PATIENCE_S
from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.engines.legs import EngineLoad, Legs

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.cluster import Cluster

SECRET = b"a secret for the simulation only"
TOKEN_S = 0.0005
IDLE_S = 0.1
"""Between steps that nothing asks for; what is new asks for one at once."""
STEP_TOKENS = 8
"""Tokens that one step computes at most."""


def token(prompt: tuple[int, ...], number: int) -> int:
    """The right answer's token of that number."""
    return (sum(prompt) * 31 + len(prompt) * 7 + number * 13) % 1_000


WRONG = -1
"""The token of an answer that was computed from wrong pages."""


class State(Enum):
    """Where a request is in its engine."""

    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"
    FINISHED = "finished"
    """Its blocks are still held for a peer, or by one."""


@dataclass
class EngineRequest:
    """One leg in its engine."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    params: TransferParams | None
    answer: Callable[[int | None], None]
    """Called with every token, and with None at the end."""
    resumed: int = 0
    """The prompt's last tokens that are the beginning of the answer."""
    state: State = State.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    has_landed: bool = False
    """Its prompt's pages came from a peer; they are left as they came."""
    tokens: list[int] = field(default_factory=list)


class Engine:
    """One life of an engine."""

    def __init__(self, cluster: Cluster, node: str, number: int, blocks: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.network = cluster.network
        self.node = self.host = self.address = node
        self.incarnation = f"{node}#{number}"
        self.can_revoke = cluster.can_revoke
        self.process = Process(self.world, self.incarnation)
        self.memory = Memory(self.world, self.incarnation, blocks)
        self.known_dead: set[str] = set()
        self.requests: dict[str, EngineRequest] = {}
        description = EngineDescription(
            incarnation=self.incarnation,
            fingerprint={},
            control_addresses=(node,),
            block_tokens=BLOCK_TOKENS,
            total_blocks=blocks,
            max_model_len=1_000,
            tensor_parallel=1,
            transport="modelled",
        )
        self.prefixes = PrefixCache()
        is_cached = self.prefixes.has if cluster.has_prefixes else None
        self.legs = Legs(SECRET, "tcp://127.0.0.1:1", description, self._load, is_cached)
        self.transfers = Transfers(self, cluster.new_number())
        self._is_stepping = False
        self._is_idle = False
        """A step is planned that nothing asks for."""
        self._turn = 0

    def _load(self) -> EngineLoad:
        states = [request.state for request in self.requests.values()]
        holdings = self.transfers.holdings()
        self._check_overdue(holdings.overdue_writers)
        return EngineLoad(
            running=states.count(State.RUNNING),
            waiting=states.count(State.WAITING) + states.count(State.PARKED),
            free_blocks=self.memory.free_blocks,
            rank_counters=[self.transfers.counters()],
            rank_holdings=[holdings],
            now=self.world.now,
        )

    def _check_overdue(self, writers: tuple[str, ...]) -> None:
        """Every writer has had the time to fence that it is given at least."""
        patience_s = min(self.cluster.fence_timeout_s, PATIENCE_S)
        asked = {
            session.peer_incarnation
            for session in self.transfers.receiving.sessions()
            if session.is_quarantined
            and session.quarantined_since is not None
            and self.world.now - session.quarantined_since >= patience_s
        }
        if not asked.issuperset(writers):
            self.world.fail(f"{self.incarnation}: of {writers}, only {asked} are overdue")

    # -- from outside --------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """A leg arrives."""
        self.requests[request.id] = request
        sealed = seal(request.params, SECRET) if request.params is not None else None
        self.legs.arrived(request.id, sealed, request.prompt, PromptIdentity())
        self.wake()

    def abort(self, request_id: str) -> None:
        """The connection of a leg was closed."""
        request = self.requests.get(request_id)
        if request is None or request.state is State.FINISHED:
            return
        is_parked = request.state is State.PARKED
        request.state = State.FINISHED
        kept = self.legs.finished(request_id, aborted=True, blocks=len(request.blocks))
        if not (kept or is_parked):
            self._forget(request)
        self.wake()

    def order(self, order: Order) -> None:
        """The agent relays something."""
        if isinstance(order, PeerIsDead):
            self.known_dead.add(order.incarnation)
        self.legs.endpoint.order(order)
        self.wake()

    def preempt(self) -> None:
        """The engine takes a running request's blocks back, as when it runs out of them."""
        running = [r for r in self.requests.values() if r.state is State.RUNNING and not r.tokens]
        if not running or (self._is_stepping and not self._is_idle):
            return
        request = self.world.random.choice(running)
        self.world.note("{} preempts {}", self.incarnation, request.id)
        self.legs.preempted(request.id)
        self.transfers.begin_step(self.legs.take_orders())
        self.memory.give_back(request.id, request.blocks)
        request.blocks, request.computed, request.state = [], 0, State.WAITING
        request.has_landed = False
        self.wake()

    def transfers_changed(self) -> None:
        """The transfer thread may have results: they are collected in a step."""
        self.wake()

    def wake(self) -> None:
        """Take a step if there is a reason for one, and soon."""
        if self._is_stepping and not self._is_idle:
            return
        if self.requests or self.legs.has_orders:
            self._plan(self.cluster.step_s / 10)

    def _plan(self, delay_s: float, *, is_idle: bool = False) -> None:
        self._is_stepping, self._is_idle = True, is_idle
        self._turn += 1
        self.process.work(delay_s, self._step, self._turn)

    # -- a step --------------------------------------------------------------------------------

    def _step(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._is_idle = False
        scheduled = self._schedule()
        if self.legs.must_hear_of_steps:
            for request, tokens in scheduled:
                self.legs.scheduled(request.id, request.computed, tokens, request.blocks)
        self.transfers.begin_step(self.legs.take_orders())
        total = sum(tokens for _, tokens in scheduled)
        step_s = self.cluster.step_s
        seconds = step_s + total * TOKEN_S if scheduled else step_s / 2
        computed = [(r, r.computed, n, list(r.blocks)) for r, n in scheduled if not r.has_landed]
        for layer in range(LAYERS) if computed else ():
            self.process.work(seconds * (layer + 1) / (LAYERS + 1), self._layer, layer, computed)
        self.process.work(seconds, self._end_step, scheduled)

    def _schedule(self) -> list[tuple[EngineRequest, int]]:
        room = STEP_TOKENS
        scheduled: list[tuple[EngineRequest, int]] = []
        for request in list(self.requests.values()):
            if request.state is State.WAITING and not self._admit(request):
                continue
            if request.state is not State.RUNNING or not room:
                continue
            missing = len(request.prompt) - request.computed
            tokens = min(room, missing) if missing > 0 else 1
            room -= tokens
            scheduled.append((request, tokens))
        return scheduled

    def _admit(self, request: EngineRequest) -> bool:
        """Give a waiting request its blocks; False when it stays where it is."""
        if request.blocks:  # It was parked, and is ready now.
            request.state = State.RUNNING
            self.legs.allocated(request.id, request.blocks, 0)
            return True
        needed = blocks_for(len(request.prompt) + request.max_tokens)
        wanted = self.legs.wanted_tokens(request.id, 0)
        if needed > self.memory.free_blocks:
            return False
        request.blocks = self.memory.take(request.id, needed)
        self.legs.allocated(request.id, request.blocks, wanted)
        request.state = State.PARKED if wanted else State.RUNNING
        return True

    def _layer(self, layer: int, computed: list[tuple[EngineRequest, int, int, list[int]]]) -> None:
        """A layer of the step has run, for requests that were aborted meanwhile too."""
        for request, before, tokens, blocks in computed:
            after = min(before + tokens, len(request.prompt))
            first = min(before, len(request.prompt) - 1) // BLOCK_TOKENS
            for block in range(first, blocks_for(after)):
                content = page_of(layer, request.prompt, block, after)
                self.memory.pages[layer, blocks[block]] = content
        self.transfers.layer_done(layer)

    def _end_step(self, scheduled: list[tuple[EngineRequest, int]]) -> None:
        self._is_stepping = False
        self.transfers.end_step()
        for request, tokens in scheduled:
            if request.state is State.RUNNING:
                self._advance(request, tokens)
        results = self.transfers.take_results()
        self.legs.settled(results.finished_sending, results.finished_receiving)
        for request_id in sorted(results.finished_receiving):
            self._received(request_id, failed=request_id in results.failed_receiving)
        for request_id in sorted(results.finished_sending):
            request = self.requests.get(request_id)
            if request is None or request.state is not State.FINISHED:
                self.world.fail(f"{self.incarnation}: {request_id} is reported as sent")
            assert request is not None
            self._forget(request)
        has_results = results.finished_sending or results.finished_receiving
        if scheduled or has_results or self.legs.has_orders:
            self.wake()
        elif any(r.state is not State.FINISHED for r in self.requests.values()):
            self._plan(IDLE_S, is_idle=True)

    def _received(self, request_id: str, *, failed: bool) -> None:
        request = self.requests.get(request_id)
        if request is None or request.state not in (State.PARKED, State.FINISHED):
            self.world.fail(f"{self.incarnation}: {request_id} is reported as received")
        assert request is not None
        if request.state is State.FINISHED:
            self._forget(request)
            return
        request.state = State.WAITING
        request.has_landed = not failed
        request.computed = len(request.prompt) - 1 if request.has_landed else 0

    def _advance(self, request: EngineRequest, tokens: int) -> None:
        request.computed += tokens
        if request.computed < len(request.prompt):
            return
        is_right = all(
            self.memory.pages.get((layer, request.blocks[block]))
            == page_of(layer, request.prompt, block, len(request.prompt))
            for layer in range(LAYERS)
            for block in range(blocks_for(len(request.prompt)))
        )
        asked = request.prompt[: len(request.prompt) - request.resumed]
        number = request.resumed + len(request.tokens)
        request.tokens.append(token(asked, number) if is_right else WRONG)
        request.answer(request.tokens[-1])
        if len(request.tokens) < request.max_tokens:
            return
        request.answer(None)
        request.state = State.FINISHED
        kept = self.legs.finished(
            request.id,
            aborted=False,
            blocks=len(request.blocks),
            block_hashes=lambda: self.prefixes.take(request.prompt),
        )
        if not kept:
            self._forget(request)

    def _forget(self, request: EngineRequest) -> None:
        if request.blocks:
            self.memory.give_back(request.id, request.blocks)
        del self.requests[request.id]

    # -- audits --------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """What an engine that nobody uses must not hold."""
        found = [f"block {b} of {owner}" for b, owner in self.memory.owners().items()]
        found += [f"request {request_id}" for request_id in self.requests]
        found += [f"receive of {s.request_id}" for s in self.transfers.receiving.sessions()]
        if self.transfers.sending.open_sessions:
            found.append(f"{self.transfers.sending.open_sessions} open sends")
        if self.transfers.sending.early_grants:
            found.append(f"{self.transfers.sending.early_grants} early grants")
        if self.transfers.copies:
            found.append(f"{len(self.transfers.copies)} writes")
        return [f"{self.incarnation}: {what}" for what in found]

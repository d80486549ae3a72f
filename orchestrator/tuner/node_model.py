"""A simulated node: vLLM's scheduler in small, with the times of a profile.

A step computes one token for each sequence that decodes, and prompt tokens with what is left of
``limits.step_tokens``, first come first served; at most ``limits.sequences`` take part. A request
gets all blocks that it will need before it begins, so nothing is preempted.

Steps of the same composition differ only by what their contexts grow: the time of the n-th is
``first + growth * (n - 1)``. They are taken as one *jump*, which is cut short at the end of the
step in which something happened that changes the next one. So an answer costs as many jumps as
requests come and go beside it, whatever its length.

Nodes of the same host that compute meanwhile make steps longer, as far as the profile says so. When
one begins or rests, the step under way goes on at another pace, and the jump ends with it.

The model is told the time and never asks for it; what follows is a list of facts for its owner.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from random import Random

    from splitserve.orchestrator.tuner.prefix_cache_model import BlockPool, Holding
    from splitserve.orchestrator.tuner.profile import Profile
    from splitserve.orchestrator.tuner.simulated_request import SimulatedRequest

LEAST_FACTOR = 0.2
"""No noise makes steps faster than this part of their time."""


class Kind(Enum):
    """What is asked of the node."""

    PREFILL = "prefill"
    """Compute the prompt, for another node."""
    DECODE = "decode"
    """Go on from a prompt that another node computes."""
    ALONE = "alone"
    """Compute the prompt and the answer."""


class Job:
    """One leg of a request. Its node changes it."""

    __slots__ = (
        "cached",
        "computed",
        "finish_step",
        "has_blocks",
        "holding",
        "is_over",
        "kind",
        "output",
        "prompt",
        "request",
        "started_s",
    )

    def __init__(self, request: SimulatedRequest, kind: Kind, prompt: int, output: int) -> None:
        self.request = request
        self.kind = kind
        self.prompt = prompt
        self.output = output
        """Tokens of the answer that come from this node."""
        self.computed = 0
        """Prompt tokens that the node has."""
        self.cached = 0
        """Of those, what it had before."""
        self.started_s = 0.0
        """When it got its blocks."""
        self.holding: Holding | None = None
        self.finish_step = 0
        """The node's step that samples its last token, once it decodes."""
        self.is_over = False


class What(Enum):
    """What a step brought."""

    RESERVED = "reserved"
    """A decode leg has its blocks and waits for the prompt."""
    PROMPT = "prompt"
    """A prefill leg's prompt is computed; the blocks are held on."""
    FIRST = "first"
    """The first token of an answer."""
    ENDED = "ended"
    """The last token of an answer."""


class Fact(NamedTuple):
    """Something that has happened to a job."""

    what: What
    job: Job
    step_s: float = 0.0
    """Of the step that finished a prompt, and the tokens it computed of it."""
    tokens: int = 0


class NodeModel:
    """One node. Its owner calls ``finish_jump`` and then ``begin`` at ``end_s``, whenever that is
    not None, and ``begin`` after everything else that it has told the node.
    """

    def __init__(
        self,
        name: str,
        profile: Profile,
        pool: BlockPool,
        *,
        speed: float,
        noise: float,
        rng: Random,
    ) -> None:
        self.name = name
        self.pool = pool
        self.busy_s = 0.0
        """Seconds of finished steps."""
        self.steps = 0
        self.decoding = 0
        """Sequences that decode; read only, like all that follows."""
        self.context = 0
        """Their tokens together."""
        self.prompts: list[Job] = []
        """Prompts that are computed, in the order of their coming."""
        self.waiting: deque[Job] = deque()
        """Prompts that are not begun, and decode legs without blocks."""
        self.landed: deque[Job] = deque()
        """Decode legs whose prompt has come."""
        self.parked = 0
        """Decode legs that have their blocks and wait for their prompt."""
        self.end_s: float | None = None
        """When the present jump ends; None when the node is idle."""
        self.gaps: list[float] = []
        self.gap_counts: list[int] = []
        self._finishing: list[tuple[int, int, Job]] = []
        self._joins = 0
        self._joined = 0
        """Jobs that joined for the present jump: they have no gap before its first token."""
        self._dropped: list[Job] = []
        self._profile = profile
        self._speed = speed
        self._noise = noise
        self._rng = rng
        self._limits = profile.limits
        self._base_s = profile.decode.base_s.value
        self._sequence_s = profile.decode.sequence_s.value
        self._context_s = profile.decode.context_s.value
        self._attention_s = profile.prefill.attention_s.value
        self._sending_s = profile.prefill.sending_s.value
        self._has_neighbours = profile.has_neighbours
        self._busy_neighbours = 0
        # The present jump
        self._start_s = 0.0
        self._count = 0
        self._first_s = 0.0
        self._growth_s = 0.0
        self._slowed_first_s = 0.0
        """What each busy neighbour adds to its first step."""
        self._slowed_growth_s = 0.0
        """And to its growth."""
        self._busy_at_start = 0
        self._late_s = 0.0
        """By which its last step is longer, since neighbours began or rested within it."""
        self._chunks: list[tuple[Job, int]] = []
        """What each step computes of which prompt."""
        self._fresh: list[Job] = []
        """Jobs whose first token comes in the first step."""
        self._has_room = True
        """Whether a prompt that comes now could take part in the next step."""

    # What the owner says

    def arrive(self, job: Job, now: float) -> None:
        """A leg has come. Its prompt, if it has one to compute, waits for a step."""
        self.waiting.append(job)
        if job.kind is not Kind.DECODE and self._has_room:
            self._cut(now)

    def reserve(self, now: float) -> list[Fact]:
        """Give blocks to decode legs that stand first; a fact for each that got them."""
        facts = []
        waiting = self.waiting
        while waiting and waiting[0].kind is Kind.DECODE and self._take_blocks(waiting[0], now):
            self.parked += 1
            facts.append(Fact(What.RESERVED, waiting.popleft()))
        return facts

    def land(self, job: Job, now: float) -> None:
        """The prompt of a parked decode leg has come."""
        assert job.holding is not None
        self.pool.register(job.holding)
        self.parked -= 1
        self.landed.append(job)
        self._cut(now)

    def release(self, job: Job, now: float) -> None:
        """The blocks of a computed prompt are not needed any more."""
        if job.holding is not None:
            self.pool.release(job.holding)
            job.holding = None
            if self.waiting:
                self._cut(now)

    def drop(self, job: Job, now: float) -> None:
        """The leg is cancelled; what it has is free after the present step."""
        if job.is_over:
            return
        if self.end_s is None:
            self._forget(job)
        else:
            self._dropped.append(job)
            self._cut(now)

    def neighbour_changed(self, by: int, now: float) -> None:
        """``by`` more nodes of the host compute from now on. What is left of the step under way
        takes as long as it does beside them, and the jump ends with it.
        """
        before, self._busy_neighbours = self._busy_neighbours, self._busy_neighbours + by
        if self.end_s is None:
            return
        self._cut(now)
        grown = self._count - 1
        slowed_s = self._slowed_first_s + self._slowed_growth_s * grown
        began_s = self._first_s + self._growth_s * grown
        took_s = began_s + (before - self._busy_at_start) * slowed_s
        if took_s > 0:
            changed_s = (self.end_s - now) * by * slowed_s / took_s
            self._late_s += changed_s
            self.end_s += changed_s

    @property
    def running(self) -> int:
        """Requests that the next step could compute."""
        return self.decoding + len(self.prompts)

    def first_token_s(self) -> float | None:
        """When the first tokens of ``fresh`` come, if that is before the jump's end."""
        if not self._fresh or self._count == 1:
            return None
        return self._start_s + self._first_s

    def take_fresh(self) -> list[Job]:
        """Those whose first token has come."""
        fresh, self._fresh = self._fresh, []
        return fresh

    # Steps

    def begin(self, now: float) -> bool:
        """Start a jump if there is something to compute and none is under way; whether one did."""
        if self.end_s is not None:
            return False
        self._join_landed()
        budget = max(0, self._limits.step_tokens - self.decoding)
        budget = self._plan(budget, now)
        if not (self.decoding or self._chunks):
            return False
        self._has_room = budget > 0
        self._count = count = self._steps_alike(budget)
        new = attended = sent = 0.0
        for job, tokens in self._chunks:
            new += tokens
            attended += tokens * (job.computed + tokens / 2)
            if job.kind is Kind.PREFILL:
                sent += tokens
        decoding = self.decoding
        if new:
            first = self._profile.step_seconds(new, attended, decoding, self.context)
            first += sent * self._sending_s
        else:
            first = self._base_s + self._sequence_s * decoding + self._context_s * self.context
        growth = self._context_s * decoding
        if count > 1 and new:
            growth += self._attention_s * new * new
        factor = 1.0 / self._speed
        if self._noise:
            spread = self._noise / math.sqrt(count)
            factor *= max(LEAST_FACTOR, 1.0 + spread * self._rng.gauss(0.0, 1.0))
        self._start_s = now
        self._first_s, self._growth_s = first * factor, growth * factor
        if self._has_neighbours:
            self._slow_down(new, attended, count, factor)
        self.end_s = now + self._seconds(count)
        return True

    def _slow_down(self, new: float, attended: float, count: int, factor: float) -> None:
        """The jump that begins takes what it does beside the neighbours that compute now."""
        profile, decoding, busy = self._profile, self.decoding, self._busy_neighbours
        slowed_s = profile.neighbour_seconds(new, attended, decoding, self.context)
        growth_s = self._context_s * decoding * profile.decode.neighbour.value
        if count > 1 and new:
            growth_s += self._attention_s * new * new * profile.prefill.neighbour.value
        self._slowed_first_s, self._slowed_growth_s = slowed_s * factor, growth_s * factor
        self._busy_at_start = busy
        self._first_s += busy * self._slowed_first_s
        self._growth_s += busy * self._slowed_growth_s

    def finish_jump(self, now: float) -> list[Fact]:
        """The jump that ends now is over; what it brought, in order."""
        facts: list[Fact] = []
        count, decoding = self._count, self.decoding
        took_s = self._seconds(count) + self._late_s
        last_s = self._first_s + self._growth_s * (count - 1) + self._late_s
        self._late_s = 0.0
        self.end_s = None
        self.busy_s += took_s
        self.steps += count
        if decoding:
            self.context += decoding * count
            fresh = self._joined
            if decoding * count > fresh:
                self.gaps.append(took_s / count)
                self.gap_counts.append(decoding * count - fresh)
            if fresh:
                self._joined = 0
                if self._fresh:
                    facts += [Fact(What.FIRST, job) for job in self.take_fresh()]
            finishing = self._finishing
            while finishing and finishing[0][0] <= self.steps:
                job = heappop(finishing)[2]
                if not job.is_over:
                    self._leave_batch(job, job.prompt + job.output)
                    facts.append(Fact(What.ENDED, job))
        if self._chunks:
            self._finish_chunks(count, last_s, facts)
        if self._dropped:
            for job in self._dropped:
                self._forget(job)
            self._dropped.clear()
        return facts

    def _join_landed(self) -> None:
        """Landed legs decode: their first step computes the last prompt token again."""
        landed, most = self.landed, self._limits.sequences - len(self.prompts)
        while landed and self.decoding < most:
            job = landed.popleft()
            job.computed = job.prompt
            self._join(job, job.prompt, self.steps + job.output)
            self._fresh.append(job)
            self._joined += 1

    def _join(self, job: Job, context: int, finish_step: int) -> None:
        self.decoding += 1
        self.context += context
        job.finish_step = finish_step
        self._joins += 1
        heappush(self._finishing, (finish_step, self._joins, job))

    def _plan(self, budget: int, now: float) -> int:
        """Fill the step with prompts; what is left of ``budget``."""
        chunks: list[tuple[Job, int]] = []
        self._chunks = chunks
        for job in self.prompts:
            if not budget:
                return 0
            tokens = min(job.prompt - job.computed, budget)
            chunks.append((job, tokens))
            budget -= tokens
        waiting, most = self.waiting, self._limits.sequences - self.decoding
        while budget and waiting and len(self.prompts) < most:
            job = waiting[0]
            if job.kind is Kind.DECODE or not self._take_blocks(job, now):
                break
            waiting.popleft()
            assert job.holding is not None
            self.pool.register(job.holding)
            self.prompts.append(job)
            tokens = min(job.prompt - job.computed, budget)
            chunks.append((job, tokens))
            budget -= tokens
        return budget

    def _take_blocks(self, job: Job, now: float) -> bool:
        pool, request = self.pool, job.request
        holding = pool.take(request.blocks, job.prompt, job.prompt + job.output)
        if holding is None:
            return False
        job.holding = holding
        job.started_s = now
        job.cached = pool.cached_tokens(holding)
        if job.kind is not Kind.DECODE:
            job.computed = job.cached
        return True

    def _steps_alike(self, budget: int) -> int:
        """How many steps have the composition that was planned."""
        count = 0
        if self._chunks:
            job, tokens = self._chunks[0]
            if budget or len(self._chunks) > 1:
                return 1
            count = (job.prompt - job.computed - 1) // tokens
            if count <= 1:
                return 1
        finishing = self._finishing
        while finishing and finishing[0][2].is_over:
            heappop(finishing)
        if finishing:
            most = finishing[0][0] - self.steps
            count = min(count, most) if count else most
        return count

    def _seconds(self, count: int) -> float:
        """The first so many steps of the present jump."""
        return count * self._first_s + self._growth_s * (count * (count - 1) // 2)

    def _cut(self, now: float) -> None:
        """The jump ends with the step that is under way now."""
        if self.end_s is None or self._count == 1:
            return
        passed = now - self._start_s
        half = self._growth_s / 2
        linear = self._first_s - half
        if half > 0:
            count = (math.sqrt(linear * linear + 4 * half * passed) - linear) / (2 * half)
        else:
            count = passed / self._first_s if self._first_s else self._count
        steps = max(1, math.ceil(count - 1e-9))
        if steps < self._count:
            self._count = steps
            self.end_s = self._start_s + self._seconds(steps)

    def _finish_chunks(self, count: int, last_s: float, facts: list[Fact]) -> None:
        for job, tokens in self._chunks:
            job.computed += tokens * count
            if job.computed < job.prompt or job.is_over:
                continue
            self.prompts.remove(job)
            assert job.holding is not None
            if job.kind is Kind.PREFILL:
                job.is_over = True
                self.pool.tell(job.holding)
                facts.append(Fact(What.PROMPT, job, last_s, tokens))
                continue
            facts.append(Fact(What.FIRST, job))
            if job.output > 1:
                self._join(job, job.prompt + 1, self.steps + job.output - 1)
            else:
                job.is_over = True
                self.pool.tell(job.holding)
                self.release(job, 0.0)
                facts.append(Fact(What.ENDED, job))
        self._chunks = []

    def _leave_batch(self, job: Job, context: int) -> None:
        self.decoding -= 1
        self.context -= context
        job.is_over = True
        assert job.holding is not None
        self.pool.tell(job.holding)
        self.pool.release(job.holding)
        job.holding = None

    def _forget(self, job: Job) -> None:
        """A cancelled leg is nowhere any more."""
        if job.is_over:
            return
        if job.finish_step:
            left = max(0, job.finish_step - self.steps)
            self._leave_batch(job, job.prompt + job.output - left)
            return
        job.is_over = True
        if job in self.prompts:
            self.prompts.remove(job)
        elif job in self.landed:
            self.landed.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        else:
            self.parked -= 1
        if job.holding is not None:
            self.pool.release(job.holding)
            job.holding = None

"""Carries out a plan of probes on a live cluster, round by round, within a time and without
standing in anybody's way.

The router places a probe only on nodes that nobody else uses, so a node that is busy is tried again
a little later, and left out when it stays busy. Whatever a client's request may have disturbed is
measured anew. Prompts that would take longer than ``longest_s`` to compute are cut, which bounds
what a client can lose to a probe.

Where nodes share a host some probes are made once more while another node of the host, the
neighbour, answers one short stream after the other.

It knows neither HTTP nor the terminal; time comes from the event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from splitserve.orchestrator.tuner.probe_plan import (
    STREAM_TOKENS,
    DecodeProbe,
    PrefillProbe,
    SplitProbe,
    TransferProbe,
    within,
)
from splitserve.orchestrator.tuner.profile_fit import (
    BesideSample,
    DecodeSample,
    PrefillSample,
    SplitSample,
    TransferSample,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from splitserve.orchestrator.tuner.probe_plan import Plan, Probe

ROUNDS_LIMIT = 5
RETRY_S = 0.2
ATTEMPTS = 3
"""How often a probe that somebody disturbed is made again."""
FIRST_GAPS = 3
"""Gaps of each stream that are not counted: its neighbours may still be computing their prompts."""
LEAST_GAPS = 4
LEAST_BLOCKS = 2
"""Prompts are never cut below this: there would be no transfer to measure."""


class ProbeError(Exception):
    """The cluster cannot be measured; the message says why and what to do."""


class BusyError(Exception):
    """The router did not place the probe: the message says what is in its way."""


@dataclass(frozen=True)
class Answer:
    """When each token of an answer came, in seconds after its request was sent, by one clock for
    all.
    """

    sent: float
    tokens: tuple[float, ...]

    @property
    def first(self) -> float:
        """Seconds from the request to the first token."""
        return self.tokens[0] - self.sent


class Cluster(Protocol):
    """A running cluster as probes see it."""

    async def ask(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        decode: str,
        prefill: str = "",
        begun: Callable[[], None] | None = None,
    ) -> Answer:
        """Send one probe; ``begun`` is called when its first token is there. Raises ``BusyError``
        or ``ProbeError``.
        """

    async def placed_legs(self) -> dict[str, int]:
        """How many legs each node has had; and raises ``ProbeError`` when the measuring has to
        stop.
        """


@dataclass
class Measured:
    """What has been found."""

    prefill: list[PrefillSample] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    transfer: list[TransferSample] = field(default_factory=list)
    split: list[SplitSample] = field(default_factory=list)
    prefill_beside: list[BesideSample] = field(default_factory=list)
    decode_beside: list[BesideSample] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Why probes were not made."""
    rounds: int = 0

    @property
    def count(self) -> int:
        """Number of samples."""
        plain = len(self.prefill) + len(self.decode) + len(self.transfer) + len(self.split)
        return plain + len(self.prefill_beside) + len(self.decode_beside)


class Prober:
    """Makes the probes. ``run`` is called once."""

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        *,
        prefill_nodes: Sequence[str],
        decode_nodes: Sequence[str],
        neighbours: Mapping[str, Sequence[str]],
        vocabulary: range,
        block_tokens: int,
        has_prefix_cache: bool,
        budget_s: float,
        longest_s: float,
        patience_s: float,
        draws: random.Random,
        progress: Callable[[str, float], None],
    ) -> None:
        """``neighbours`` are the others of each node's host. ``progress`` hears what is done now,
        and which part of the time is over.
        """
        self._cluster = cluster
        self._plan = plan
        self._prefill_nodes = prefill_nodes
        self._decode_nodes = decode_nodes
        self._neighbours = neighbours
        self._vocabulary = vocabulary
        self._block_tokens = block_tokens
        self._has_prefix_cache = has_prefix_cache
        self._budget_s = budget_s
        self._longest_s = longest_s
        self._patience_s = patience_s
        self._draws = draws
        self._progress = progress
        self._limit_tokens: float = float("inf")
        """Prompt tokens that take ``longest_s``, as far as is known."""
        self._shared: dict[object, list[list[int]]] = {}
        """Prompts that later rounds use again."""
        self._measured = Measured()
        self._done = 0

    async def run(self) -> Measured:
        """Rounds until the time is over, at most ``ROUNDS_LIMIT``, or until clients have kept the
        nodes busy for ``patience_s`` in all. The first one is finished whatever it takes. Raises
        ``ProbeError``.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        end = began + self._budget_s
        await self._warm_up()
        plan = self._plan
        probes: list[Probe] = [*plan.prefill, *plan.decode, *plan.transfer, *plan.split]
        for number in range(ROUNDS_LIMIT):
            for probe in probes:
                if (number and loop.time() > end) or self._patience_s <= 0:
                    return self._measured
                self._done += 1
                by_count = self._done / (self._plan.size * ROUNDS_LIMIT)
                by_time = (loop.time() - began) / max(self._budget_s, 1e-9)
                self._progress(_name_of(probe), min(1.0, max(by_count, by_time)))
                await self._make(probe, number)
            self._measured.rounds += 1
        return self._measured

    async def _warm_up(self) -> None:
        """Every node has computed something once: its first steps may take longer."""
        for node in {*self._prefill_nodes, *self._decode_nodes}:
            await self._alone(
                lambda node=node: self._ask_together([self._fresh(8)], 4, node),  # type: ignore[misc]
                {node: 1},
                "the first probe",
            )

    async def _make(self, original: Probe, number: int) -> None:
        probe = within(original, self._limit_tokens, self._block_tokens)
        if probe is None:
            return
        if isinstance(probe, PrefillProbe):
            node = self._prefill_nodes[number % len(self._prefill_nodes)]
            await self._measure_prefill(probe, node, self._neighbour(original, node, number))
        elif isinstance(probe, DecodeProbe):
            node = self._decode_nodes[number % len(self._decode_nodes)]
            await self._measure_decode(probe, node, self._neighbour(original, node, number))
        elif isinstance(probe, SplitProbe):
            await self._measure_split(probe, *self._pair(number))
        else:
            await self._measure_transfer(probe, *self._pair(number))

    def _pair(self, number: int) -> tuple[str, str]:
        """Another pair in each round, until all have had their turn."""
        prefills, decodes = self._prefill_nodes, self._decode_nodes
        number %= len(prefills) * len(decodes)
        return prefills[number % len(prefills)], decodes[number // len(prefills) % len(decodes)]

    def _neighbour(self, probe: Probe, node: str, number: int) -> str:
        """Beside which node the probe is made once more; empty for beside none."""
        others = self._neighbours.get(node, ())
        if not others or probe not in self._plan.beside:
            return ""
        return others[number % len(others)]

    async def _measure_prefill(self, probe: PrefillProbe, node: str, neighbour: str) -> None:
        async def work() -> list[Answer]:
            beginnings = [self._beginning(node, probe.cached)] * probe.prompts
            if probe.cached:
                await self._ask_together([[*beginnings[0], *self._fresh(1)]], 1, node)
            prompts = [beginning + self._fresh(probe.new) for beginning in beginnings]
            return await self._ask_together(prompts, 1, node)

        legs = {node: probe.prompts + bool(probe.cached)}
        times: list[float] = []
        while len(times) < 2 and (not times or times[0] > self._longest_s / 2):
            answers = await self._alone(work, legs, _name_of(probe))
            if not answers:
                return
            times.append(_until_first(answers))
            self._measured.prefill.append(PrefillSample(probe, times[-1]))
        self._note_long(probe, min(times))
        # Longer beside a neighbour, so one that is long already could become too long
        if neighbour and times[-1] <= self._longest_s / 2:
            answers = await self._beside(neighbour, work, legs, _name_of(probe))
            if answers:
                sample = BesideSample(times[-1], _until_first(answers))
                self._measured.prefill_beside.append(sample)

    def _note_long(self, probe: PrefillProbe, seconds: float) -> None:
        """The best of two tries took so long that a longer prompt would take too long."""
        if seconds > self._longest_s / 2 and not probe.cached:
            reach = probe.computed_tokens * self._longest_s / seconds
            least = LEAST_BLOCKS * self._block_tokens + 1
            self._limit_tokens = min(self._limit_tokens, max(reach, least))

    async def _measure_decode(self, probe: DecodeProbe, node: str, neighbour: str) -> None:
        key = (node, probe)
        if key not in self._shared:
            self._shared[key] = [self._fresh(probe.context) for _ in range(probe.streams)]

        async def work() -> list[Answer]:
            # With their prompts in the cache all streams begin at about the same time
            await self._ask_together(self._shared[key], 1, node)
            return await self._ask_together(self._shared[key], STREAM_TOKENS, node)

        legs = {node: 2 * probe.streams}
        answers = await self._alone(work, legs, _name_of(probe))
        gap = mean_gap(answers) if answers else None
        if gap is None:
            return
        self._measured.decode.append(DecodeSample(probe, gap))
        if neighbour:
            answers = await self._beside(neighbour, work, legs, _name_of(probe))
            beside = mean_gap(answers) if answers else None
            if beside is not None:
                self._measured.decode_beside.append(BesideSample(gap, beside))

    async def _measure_transfer(self, probe: TransferProbe, prefill: str, decode: str) -> None:
        prompt = self._fresh(probe.tokens)
        cached = 0
        if self._has_prefix_cache:
            cached = (probe.tokens - 1) // self._block_tokens * self._block_tokens

        async def work() -> list[Answer]:
            if self._has_prefix_cache:
                await self._ask_together([prompt], 1, prefill)
            return [await self._cluster.ask(prompt, 2, decode=decode, prefill=prefill)]

        answers = await self._alone(
            work, {prefill: 1 + self._has_prefix_cache, decode: 1}, _name_of(probe)
        )
        if answers:
            self._measured.transfer.append(
                TransferSample(prefill, decode, probe.tokens, cached, answers[0].first)
            )

    async def _measure_split(self, probe: SplitProbe, prefill: str, decode: str) -> None:
        async def work() -> list[Answer]:
            alone = await self._cluster.ask(self._fresh(probe.tokens), 1, decode=prefill)
            prompt = self._fresh(probe.tokens)
            return [alone, await self._cluster.ask(prompt, 2, decode=decode, prefill=prefill)]

        answers = await self._alone(work, {prefill: 2, decode: 1}, _name_of(probe))
        if answers:
            alone, split = answers
            self._measured.split.append(SplitSample(probe.tokens, alone.first, split.first))

    async def _ask_together(
        self, prompts: Sequence[Sequence[int]], tokens: int, node: str
    ) -> list[Answer]:
        tasks = [
            asyncio.ensure_future(self._cluster.ask(prompt, tokens, decode=node))
            for prompt in prompts
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # one that failed takes the others with it
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _alone(
        self,
        work: Callable[[], Awaitable[list[Answer]]],
        legs: dict[str, int],
        name: str,
    ) -> list[Answer]:
        """The answers, when nobody else had the nodes meanwhile; none when they were never free."""
        reason = ""
        attempts = 0
        while attempts < ATTEMPTS and self._patience_s > 0:
            before = await self._cluster.placed_legs()
            try:
                answers = await work()
            except BusyError as busy:
                reason = str(busy)
                self._patience_s -= RETRY_S
                await asyncio.sleep(RETRY_S)
                continue
            after = await self._cluster.placed_legs()
            came = {node: after.get(node, 0) - before.get(node, 0) for node in legs}
            if came == legs:
                return answers
            attempts += 1
            reason = "clients' requests came to its nodes"
        self._measured.left_out.append(f"{name}: {reason}")
        return []

    async def _beside(
        self,
        neighbour: str,
        work: Callable[[], Awaitable[list[Answer]]],
        legs: Mapping[str, int],
        name: str,
    ) -> list[Answer]:
        """As ``_alone``, while the neighbour computes from before the first probe to after the
        last one.
        """
        expected = {**legs, neighbour: 0}

        async def both() -> list[Answer]:
            expected[neighbour] = 0
            begun, is_over = asyncio.Event(), False

            async def keep_busy() -> None:
                while not is_over:
                    expected[neighbour] += 1
                    prompt = self._fresh(self._plan.companion_tokens)
                    await self._cluster.ask(
                        prompt, STREAM_TOKENS, decode=neighbour, begun=begun.set
                    )

            companion = asyncio.ensure_future(keep_busy())
            companion.add_done_callback(lambda _: begun.set())
            try:
                await begun.wait()  # the answer, or why there is none, has its deadline
                answers = await work()
                is_over = True
                await companion
                return answers
            finally:
                companion.cancel()
                await asyncio.gather(companion, return_exceptions=True)

        return await self._alone(both, expected, f"{name} beside a busy {neighbour}")

    def _beginning(self, node: str, tokens: int) -> list[int]:
        """A prompt's beginning, the same in each round; a longer one begins with a shorter one."""
        if not tokens:
            return []
        (longest,) = self._shared.setdefault(node, [[]])
        longest += self._fresh(max(0, tokens - len(longest)))
        return longest[:tokens]

    def _fresh(self, tokens: int) -> list[int]:
        """Ids that no cache has."""
        return self._draws.choices(self._vocabulary, k=tokens)


def _until_first(answers: Sequence[Answer]) -> float:
    """From the first probe sent to the last first token."""
    sent = min(answer.sent for answer in answers)
    return max(answer.tokens[0] for answer in answers) - sent


def mean_gap(answers: Sequence[Answer]) -> float | None:
    """Mean time between the tokens of a stream while all streams were running; None when that was
    too short.
    """
    start = max(answer.tokens[min(FIRST_GAPS, len(answer.tokens) - 1)] for answer in answers)
    end = min(answer.tokens[-1] for answer in answers)
    spans: list[float] = []
    gaps = 0
    for answer in answers:
        within = [moment for moment in answer.tokens if start <= moment <= end]
        if len(within) > LEAST_GAPS:
            spans.append(within[-1] - within[0])
            gaps += len(within) - 1
    return sum(spans) / gaps if gaps else None


def _name_of(probe: Probe) -> str:
    """In words, for people."""
    if isinstance(probe, PrefillProbe):
        behind = f" behind {probe.cached}" if probe.cached else ""
        times = f"{probe.prompts} x " if probe.prompts > 1 else ""
        return f"prompt of {times}{probe.new} tokens{behind}"
    if isinstance(probe, DecodeProbe):
        return f"{probe.streams} streams at {probe.context} tokens"
    if isinstance(probe, SplitProbe):
        return f"split prompt of {probe.tokens} tokens"
    return f"transfer of {probe.tokens} tokens"

"""What is asked of a cluster while it is measured, and when it is left alone."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from splitserve.orchestrator.tuner import probing
from splitserve.orchestrator.tuner.probe_plan import (
    STREAM_TOKENS,
    DecodeProbe,
    Plan,
    plan_probes,
)
from splitserve.orchestrator.tuner.probing import (
    ATTEMPTS,
    ROUNDS_LIMIT,
    Answer,
    BusyError,
    Measured,
    ProbeError,
    Prober,
    mean_gap,
)
from splitserve.orchestrator.tuner.profile import EngineLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMITS = EngineLimits(
    step_tokens=128, sequences=8, block_tokens=16, total_blocks=1000, max_model_len=512
)
PLAN = plan_probes(LIMITS, has_prefix_cache=True)
VOCABULARY = range(1000, 30_000)


class FakeCluster:
    """Answers at once; a prompt token seems to take ``token_s``."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int, str, str]] = []
        self.legs: dict[str, int] = {}
        self.token_s = 0.0
        self.busy: set[str] = set()
        self.visitors = 0
        """So many times a client's request comes to ``d0`` beside a probe."""
        self.stops_after: int | None = None

    async def ask(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        decode: str,
        prefill: str = "",
        begun: Callable[[], None] | None = None,
    ) -> Answer:
        if decode in self.busy:
            raise BusyError(f"1 requests of clients are on {decode}")
        self.asked.append((tuple(prompt), tokens, decode, prefill))
        for node in filter(None, (decode, prefill)):
            self.legs[node] = self.legs.get(node, 0) + 1
        first = 1.0 + len(prompt) * self.token_s
        return Answer(0.0, tuple(first + 0.01 * n for n in range(tokens)))

    async def placed_legs(self) -> dict[str, int]:
        if self.stops_after is not None and len(self.asked) > self.stops_after:
            raise ProbeError("stopped: clients suffer")
        if self.visitors:
            self.visitors -= 1
            self.legs["d0"] = self.legs.get("d0", 0) + 1
        return dict(self.legs)


def prober(cluster: FakeCluster, **changes: Any) -> Prober:
    """With much time and one pair."""
    settings: dict[str, Any] = {
        "prefill_nodes": ["p0"],
        "decode_nodes": ["d0"],
        "neighbours": {},
        "vocabulary": VOCABULARY,
        "block_tokens": 16,
        "has_prefix_cache": True,
        "budget_s": 1000,
        "longest_s": 1000,
        "patience_s": 1,
        "draws": random.Random(1),
        "progress": lambda words, part: None,
        "plan": PLAN,
    }
    return Prober(cluster, **(settings | changes))


async def measure(cluster: FakeCluster, **changes: Any) -> Measured:
    """All rounds."""
    return await prober(cluster, **changes).run()


async def test_every_probe_is_made_in_every_round() -> None:
    """On its nodes, with ids of the vocabulary, and the progress goes from nothing to all."""
    cluster = FakeCluster()
    parts: list[float] = []
    measured = await measure(cluster, progress=lambda words, part: parts.append(part))
    assert measured.rounds == ROUNDS_LIMIT
    assert measured.count == PLAN.size * ROUNDS_LIMIT
    assert not measured.left_out
    assert {prompt_id for prompt, *_ in cluster.asked for prompt_id in prompt} <= set(VOCABULARY)
    assert parts == sorted(parts)
    assert (parts[0] < 0.05, parts[-1]) == (True, 1.0)


async def test_a_transferred_prompt_is_new_to_the_decode_node() -> None:
    """The prefill node has computed it just before; nobody else has ever seen it."""
    cluster = FakeCluster()
    await measure(cluster, plan=Plan(PLAN.prefill, PLAN.decode, PLAN.transfer))
    seen: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for prompt, _, decode, prefill in cluster.asked:
        seen.setdefault(prompt, []).append((prefill, decode))
    split = [where for where in seen.values() if ("p0", "d0") in where]
    assert len(split) == len(PLAN.transfer) * ROUNDS_LIMIT
    assert all(where == [("", "p0"), ("p0", "d0")] for where in split)


async def test_a_split_prompt_is_new_to_both_nodes() -> None:
    """Right after another one of its length, alone on the prefill node."""
    cluster = FakeCluster()
    measured = await measure(cluster, plan=Plan((), (), (), PLAN.split))
    asked = cluster.asked[2:]  # behind one for each node
    lengths = [probe.tokens for probe in PLAN.split for _ in range(2)] * ROUNDS_LIMIT
    assert [len(prompt) for prompt, *_ in asked] == lengths
    assert [where for *_, where in asked] == ["", "p0"] * (len(asked) // 2)
    assert len({prompt for prompt, *_ in asked}) == len(asked)
    assert [sample.tokens for sample in measured.split] == lengths[::2]
    assert measured.count == len(PLAN.split) * ROUNDS_LIMIT


async def test_computed_prompts_are_new_and_cached_ones_are_not() -> None:
    """No prompt that is to be computed begins as an earlier one; one behind a cached beginning
    follows a prompt with that beginning.
    """
    cluster = FakeCluster()
    plan = Plan(PLAN.prefill, (), PLAN.transfer[:1])
    await measure(cluster, plan=plan)
    alone = [prompt for prompt, _, decode, prefill in cluster.asked if not prefill]
    behind = [probe for probe in plan.prefill if probe.cached]
    for probe in behind:
        followed = [
            after
            for before, after in itertools.pairwise(alone)
            if len(after) == probe.cached + probe.new and before[:-1] == after[: probe.cached]
        ]
        assert len({prompt[probe.cached :] for prompt in followed}) == ROUNDS_LIMIT
    lengths = {probe.new for probe in plan.prefill if not probe.cached}
    lengths -= {probe.cached + probe.new for probe in behind}
    fresh = [prompt for prompt in alone if len(prompt) in lengths]
    assert len({prompt[:8] for prompt in fresh}) == len(fresh) == len(lengths) * ROUNDS_LIMIT


async def test_nodes_take_turns() -> None:
    """Each round goes to others, until every pair has had its turn."""
    cluster = FakeCluster()
    nodes = {"prefill_nodes": ["p0", "p1"], "decode_nodes": ["d0", "d1"]}
    measured = await measure(cluster, **nodes)
    pairs = {(sample.prefill_node, sample.decode_node) for sample in measured.transfer}
    assert pairs == {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}
    assert {decode for _, _, decode, _ in cluster.asked} == {"p0", "p1", "d0", "d1"}


async def test_no_prompt_is_longer_than_allowed() -> None:
    """A token takes 10 ms and a prompt may take 1.5 s beside its first second: what is longer is
    not asked for, whatever for.
    """
    cluster = FakeCluster()
    cluster.token_s = 0.01
    await measure(cluster, longest_s=2.5)
    tokens = [len(prompt) for prompt, *_ in cluster.asked]
    assert max(tokens) <= 250  # the first that shows what a token takes
    assert sum(length > 150 for length in tokens) <= 2


async def test_time_is_kept_after_the_first_round() -> None:
    """However little there is, one round is made."""
    measured = await measure(FakeCluster(), budget_s=0)
    assert (measured.rounds, measured.count) == (1, PLAN.size)


async def test_a_busy_node_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience is for the whole measuring; then it ends with what there is."""
    monkeypatch.setattr(probing, "RETRY_S", 0.001)
    cluster = FakeCluster()
    cluster.busy = {"d0"}
    measured = await measure(cluster, patience_s=0.01)
    assert measured.count == 0
    assert measured.left_out[0].endswith("1 requests of clients are on d0")
    assert not cluster.asked or {decode for _, _, decode, _ in cluster.asked} == {"p0"}


async def test_what_clients_disturbed_is_measured_again() -> None:
    """And left out when they do so again and again."""
    cluster = FakeCluster()
    cluster.visitors = 4
    measured = await measure(cluster)
    assert measured.count == PLAN.size * ROUNDS_LIMIT
    cluster.visitors = 1_000_000
    measured = await measure(cluster)
    assert not measured.decode
    assert measured.prefill
    assert {line.partition(": ")[2] for line in measured.left_out} == {
        "clients' requests came to its nodes"
    }
    assert ATTEMPTS > 1


async def test_it_ends_when_it_has_to() -> None:
    """What the cluster raises ends the measuring at once."""
    cluster = FakeCluster()
    cluster.stops_after = 10
    with pytest.raises(ProbeError, match="clients suffer"):
        await measure(cluster)
    assert len(cluster.asked) < 20


async def test_a_failed_probe_takes_its_batch_with_it() -> None:
    """Nobody waits for the others, and none of them goes on."""
    cluster = FakeCluster()
    going = 0

    async def ask(prompt: Sequence[int], tokens: int, *, decode: str, **_: Any) -> Answer:
        nonlocal going
        if tokens == STREAM_TOKENS:
            going += 1
            try:
                if going == 2:
                    raise ProbeError("broken")
                async with asyncio.timeout(5):
                    await asyncio.Event().wait()
            finally:
                going -= 1
        return Answer(0.0, (1.0,) * tokens)

    cluster.ask = ask  # type: ignore[method-assign]
    with pytest.raises(ProbeError, match="broken"):
        await measure(cluster, plan=Plan((), (DecodeProbe(2, 16),), ()))
    assert going == 0


def test_the_gap_between_tokens() -> None:
    """Counted while all streams run: not before the last one has its fourth token, nor after the
    first one has ended.
    """
    early = Answer(0, tuple(0.1 * n for n in range(20)))
    late = Answer(0, tuple(0.5 + 0.1 * n + 0.02 * max(0, n - 10) for n in range(20)))
    gap = mean_gap([early, late])
    assert gap is not None
    assert 0.1 <= gap < 0.11
    assert mean_gap([early]) == pytest.approx(0.1)
    assert mean_gap([early, Answer(0, tuple(3 + 0.1 * n for n in range(20)))]) is None


async def test_one_slow_answer_cuts_nothing() -> None:
    """A prompt that took long is asked for once more before it counts as long."""
    cluster = FakeCluster()
    plain, slow = cluster.ask, iter([True])

    async def ask(prompt: Sequence[int], tokens: int, *, decode: str, **others: Any) -> Answer:
        answer = await plain(prompt, tokens, decode=decode, **others)
        if len(prompt) == PLAN.prefill[0].new and next(slow, False):
            return Answer(0.0, (2000.0,) * tokens)
        return answer

    cluster.ask = ask  # type: ignore[method-assign]
    await measure(cluster)
    assert max(len(prompt) for prompt, *_ in cluster.asked) == PLAN.prefill[-1].new

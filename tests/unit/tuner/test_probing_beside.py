"""Some probes are made once more while another node of the host computes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from splitserve.orchestrator.tuner import probing
from splitserve.orchestrator.tuner.probe_plan import Plan, plan_probes
from splitserve.orchestrator.tuner.probing import (
    ROUNDS_LIMIT,
    Answer,
    BusyError,
    Measured,
    ProbeError,
    Prober,
)
from splitserve.orchestrator.tuner.profile import EngineLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLAN = plan_probes(
    EngineLimits(
        step_tokens=128, sequences=8, block_tokens=16, total_blocks=1000, max_model_len=512
    ),
    has_prefix_cache=True,
)
SLOWDOWN = 0.4


class Host:
    """A prefill node p0 and a decode node d0 that slow each other. A probe lasts longer than one
    stream of a neighbour, so that takes several.
    """

    def __init__(self) -> None:
        self.legs: Counter[str] = Counter()
        self.computing: Counter[str] = Counter()
        self.streams = 0
        """Of neighbours."""
        self.busy: set[str] = set()
        self.visitors = 0
        """So many times a client's request comes to p0 while d0 is measured beside it."""
        self.first_s = 0.1

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
        for node in filter(None, (decode, prefill)):
            self.legs[node] += 1
        if begun is not None:
            if not self.streams:
                await asyncio.sleep(0)  # the first stream has to come through
            self.streams += 1
            begun()
        self.computing[decode] += 1
        is_beside = self._is_beside(decode)
        for _ in range(7 if begun is None else 3):
            await asyncio.sleep(0)
            assert begun is not None or self._is_beside(decode) == is_beside, "not all the time"
        self.computing[decode] -= 1
        if is_beside and decode == "d0" and self.visitors:
            self.visitors -= 1
            self.legs["p0"] += 1
        slowed = 1 + SLOWDOWN * is_beside
        first = self.first_s * slowed
        return Answer(0.0, tuple(first + 0.01 * slowed * n for n in range(tokens)))

    def _is_beside(self, node: str) -> bool:
        return any(count for other, count in self.computing.items() if other != node)

    async def placed_legs(self) -> dict[str, int]:
        return dict(self.legs)


async def measure(host: Host, **changes: Any) -> Measured:
    """All rounds, with much time."""
    settings: dict[str, Any] = {
        "prefill_nodes": ["p0"],
        "decode_nodes": ["d0"],
        "neighbours": {"p0": ["d0"], "d0": ["p0"]},
        "vocabulary": range(1000, 30_000),
        "block_tokens": 16,
        "has_prefix_cache": True,
        "budget_s": 1000,
        "longest_s": 1000,
        "patience_s": 1,
        "draws": random.Random(1),
        "progress": lambda words, part: None,
        "plan": PLAN,
    }
    return await Prober(host, **(settings | changes)).run()


async def test_the_same_is_measured_with_and_without_a_busy_neighbour() -> None:
    """In every round, in pairs that show the slowdown; the neighbour computes all the time that
    such a probe takes, and never beside another one.
    """
    host = Host()
    measured = await measure(host)
    assert not measured.left_out
    assert len(measured.prefill_beside) == len(measured.decode_beside) == 3 * ROUNDS_LIMIT
    assert measured.count == (PLAN.size + 6) * ROUNDS_LIMIT
    for pair in (*measured.prefill_beside, *measured.decode_beside):
        assert pair.beside_s == pytest.approx(pair.alone_s * (1 + SLOWDOWN))
    assert [sample.seconds for sample in measured.prefill] == pytest.approx(
        [0.1] * len(measured.prefill)
    )
    assert [sample.seconds for sample in measured.decode] == pytest.approx(
        [0.01] * len(measured.decode)
    )
    assert host.streams > 6 * ROUNDS_LIMIT
    assert not +host.computing


async def test_only_nodes_that_share_a_host() -> None:
    """Of two decode nodes, in turns, one has a neighbour; without any nothing is made twice."""
    decode = {"decode_nodes": ["d0", "d1"]}
    measured = await measure(Host(), **decode)
    assert len(measured.decode_beside) == 3 * len(range(0, ROUNDS_LIMIT, 2))
    host = Host()
    measured = await measure(host, neighbours={"p0": [], "d0": []})
    assert (measured.count, host.streams) == (PLAN.size * ROUNDS_LIMIT, 0)


async def test_neighbours_take_turns() -> None:
    """Of several each keeps a round busy."""
    host = Host()
    others = {"neighbours": {"d0": ["n0", "n1"]}}
    await measure(host, plan=Plan((), PLAN.decode, (), (), PLAN.beside), **others)
    assert host.legs["n0"] > 0
    assert host.legs["n1"] > 0


async def test_a_client_on_the_neighbour_counts() -> None:
    """What it may have disturbed is measured again."""
    host = Host()
    host.visitors = 1
    measured = await measure(host)
    assert host.visitors == 0
    assert len(measured.decode_beside) == 3 * ROUNDS_LIMIT
    assert not measured.left_out


async def test_a_busy_neighbour_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is left out, and says beside which node; the rest has been measured."""
    monkeypatch.setattr(probing, "RETRY_S", 0.001)
    host = Host()
    host.busy = {"d0"}
    plan = Plan(PLAN.prefill, (), (), (), PLAN.beside)
    measured = await measure(host, patience_s=0.01, decode_nodes=["p0"], plan=plan)
    assert measured.prefill
    assert not measured.prefill_beside
    assert measured.left_out[-1].endswith("beside a busy d0: 1 requests of clients are on d0")
    assert not +host.computing


async def test_what_is_long_is_not_made_longer() -> None:
    """A prompt that takes more than half of what it may is not sent beside a busy node."""
    host = Host()
    measured = await measure(host, longest_s=0.15)
    assert measured.prefill
    assert not measured.prefill_beside
    assert measured.decode_beside


async def test_a_neighbour_that_breaks_ends_the_measuring() -> None:
    """With its reason, and no stream goes on."""
    host = Host()
    plain = host.ask

    async def ask(prompt: Sequence[int], tokens: int, **others: Any) -> Answer:
        if others.get("begun") is not None and host.streams == 4:
            raise ProbeError("broken")
        return await plain(prompt, tokens, **others)

    host.ask = ask  # type: ignore[method-assign]
    with pytest.raises(ProbeError, match="broken"):
        await measure(host)
    assert not +host.computing

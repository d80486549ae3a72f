"""What the mock engine's steps and landings take, with a clock that a test moves."""

from __future__ import annotations

import pytest

from splitserve.kv_transfer.orders import TransferResults
from splitserve.orchestrator.engines.mock import timing
from splitserve.orchestrator.engines.mock.server import arguments, build
from splitserve.orchestrator.engines.mock.timing import (
    CATCH_UP_LIMIT_S,
    Landings,
    StepClock,
    Timing,
    profile_timing,
)
from splitserve.orchestrator.engines.serving.scheduler import Chunk, Request, StepPlan
from splitserve.orchestrator.tuner.profile import (
    DecodeTime,
    EngineLimits,
    PrefillTime,
    Profile,
    TransferTime,
    exactly,
    write_profile,
)

PROFILE = Profile(
    model="mock",
    engine="mock 1",
    hardware="none",
    limits=EngineLimits(
        step_tokens=512, sequences=16, block_tokens=32, total_blocks=1000, max_model_len=4096
    ),
    kv_bytes_per_token=1000,
    prefill=PrefillTime(exactly(0.01), exactly(0.001), exactly(1e-6)),
    decode=DecodeTime(exactly(0.02), exactly(0.001), exactly(1e-5)),
    transfers=(TransferTime("", "", exactly(0.5), exactly(1e6)),),
)


class Clock:
    """Stands still until somebody sleeps; every sleep ends ``late_s`` too late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now = 100.0
        self.late_s = late_s
        self.sleeps = 0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += seconds + self.late_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the module's time."""
    clock = Clock()
    monkeypatch.setattr(timing.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(timing.asyncio, "sleep", clock.sleep)
    return clock


async def _steps(clock: StepClock, count: int, *, computes_prompts: bool = False) -> None:
    for _ in range(count):
        clock.begin(0.01, computes_prompts=computes_prompts)
        for layer in range(4):
            await clock.layer_due(layer)


async def test_being_late_does_not_add_up(clock: Clock) -> None:
    """A hundred steps, each woken 3 ms too late, take their time and 3 ms."""
    clock.late_s = 0.003
    await _steps(StepClock(4), 100)
    assert clock.now - 100 == pytest.approx(1.003)


async def test_layers_are_spread_over_a_prompt(clock: Clock) -> None:
    """One wait per layer when prompts are computed, one in all when answers are."""
    step = StepClock(4)
    await _steps(step, 1, computes_prompts=True)
    assert clock.sleeps == 4
    await _steps(step, 1)
    assert clock.sleeps == 5
    assert clock.now == pytest.approx(100.02)


async def test_time_that_was_lost_is_not_made_up_for(clock: Clock) -> None:
    """After a long stop steps are as long as ever, but for a little; after a rest entirely so."""
    step = StepClock(4)
    await _steps(step, 1)
    clock.now += 5
    began = clock.now
    await _steps(step, 10)
    assert clock.now - began == pytest.approx(0.1 - CATCH_UP_LIMIT_S)
    clock.now += 0.005
    step.rest()
    began = clock.now
    await _steps(step, 10)
    assert clock.now - began == pytest.approx(0.1)


def test_a_step_takes_what_the_profile_says() -> None:
    """Prompt tokens attend to what is before them; single tokens count as an answer's."""
    prompt, answer = Request("a", (1,) * 300, 5), Request("b", (1,) * 50, 5, answer=[1])
    landed = Request("c", (1,) * 100, 5)
    chunks = (
        Chunk(prompt, 100, 200, ()),
        Chunk(answer, 50, 1, ()),
        Chunk(landed, 99, 1, ()),
    )
    expected = PROFILE.step_seconds(200, 200 * 200, 2, 51 + 100)
    assert profile_timing(PROFILE, 1).step_s(StepPlan(chunks)) == pytest.approx(expected)
    assert profile_timing(PROFILE, 2).step_s(StepPlan(chunks)) == pytest.approx(expected / 2)


def test_landings_share_a_link(clock: Clock) -> None:
    """Two prompts of 100 tokens behind each other, at 0.01 s a token, and 1 s of latency."""
    landings = Landings(Timing(lambda plan: 0, 1.0, 0.01))
    parked = {name: Request(name, (1,) * 101, 5, expected=100) for name in "abc"}
    landings.parked(parked)
    clock.now += 0.5
    both = TransferResults(finished_receiving=frozenset("ab"))
    assert not landings.held_back(both, parked).finished_receiving
    seen = []
    for step in range(1, 51):
        clock.now = 100.5 + step / 10 + 0.001
        told = landings.held_back(TransferResults(), parked).finished_receiving
        seen += [(name, step) for name in sorted(told)]
    # the link carries one until 101 and the other until 102
    assert sorted(step for _, step in seen) == [15, 25]


def test_a_landing_in_the_middle_of_a_step_counts_from_there(clock: Clock) -> None:
    """The engine is told at the end of that step, if the latency is over by then."""
    landings = Landings(Timing(lambda plan: 0, 1.0, 0.01))
    parked = {name: Request(name, (1,) * 101, 5, expected=100) for name in "ab"}
    landings.parked(parked)
    clock.now += 2
    landings.seen(frozenset("a"))
    clock.now += 0.9
    landings.seen(frozenset("ab"))
    clock.now += 0.2
    both = TransferResults(finished_receiving=frozenset("ab"))
    assert landings.held_back(both, parked).finished_receiving == {"a"}
    clock.now += 0.9
    assert landings.held_back(TransferResults(), parked).finished_receiving == {"b"}


async def test_a_step_is_looked_at_while_it_runs(clock: Clock) -> None:
    """Every few milliseconds, and it takes no longer for that."""
    step = StepClock(1)
    looks: list[float] = []
    step.begin(0.01, computes_prompts=False)
    began = clock.now
    await step.layer_due(0, lambda: looks.append(clock.now - began))
    assert looks == pytest.approx([0.004, 0.008, 0.01])


def test_what_failed_or_was_given_up_is_told_at_once(clock: Clock) -> None:
    """Nothing is held for those."""
    landings = Landings(Timing(lambda plan: 0, 1.0, 0.01))
    parked = {name: Request(name, (1,) * 101, 5, expected=100) for name in "ab"}
    landings.parked(parked)
    failed = TransferResults(finished_receiving=frozenset("abc"), failed_receiving=frozenset("a"))
    assert landings.held_back(failed, parked).finished_receiving == {"a", "c"}
    del parked["b"]
    assert landings.held_back(TransferResults(), parked).finished_receiving == {"b"}


def test_the_engine_reads_a_profile(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By its flag; what cannot be read is refused with the file and the field."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    flags = ["--model", "m", "--port", "1", "--profile", str(path)]
    with pytest.raises(ValueError, match=r"profile\.json: No such file"):
        build(arguments().parse_args(flags))
    path.write_bytes(write_profile(PROFILE))
    build(arguments().parse_args(flags))
    with pytest.raises(ValueError, match="--speed 0 must be above 0"):
        build(arguments().parse_args([*flags, "--speed", "0"]))
    with pytest.raises(ValueError, match="leave out"):
        build(arguments().parse_args([*flags, "--seconds-per-step", "1"]))
    path.write_text("{}")
    with pytest.raises(ValueError, match="missing required field"):
        build(arguments().parse_args(flags))

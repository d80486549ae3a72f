"""Who waits, who is refused, and which nodes are chosen."""

from __future__ import annotations

from collections import Counter

import pytest
from router_stubs.core_story import Driver, names

from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core.effects import AnswerError, StartAlone, StartPair
from splitserve.orchestrator.core.placement import PlacementLimits, decision


def test_a_prefill_node_holds_one_leg_and_those_ahead() -> None:
    """With prefill_ahead_requests 1 the third request waits until a leg is answered."""
    driver = Driver("p0", "d0")
    assert names(driver.request("r1")) == ["StartPair"]
    assert names(driver.request("r2")) == ["StartPair"]
    assert driver.request("r3") == []
    assert names(driver.do(ev.PrefillAnswered("r1", 1, 200))) == ["StartPair"]
    assert not driver.core.queue


def test_short_prompts_share_a_prefill_step() -> None:
    """With prefill_batch_tokens 100 a node takes legs of 30 tokens until a fourth would not fit;
    one that is larger than the batch goes to a node with a free slot all the same.
    """
    driver = Driver(
        "p0", "d0", placement={"prefill_ahead_requests": 0, "prefill_batch_tokens": 100}
    )
    for name in ("r1", "r2", "r3"):
        assert names(driver.request(name, prompt_tokens=30)) == ["StartPair"]
    assert driver.request("r4", prompt_tokens=30) == []
    assert names(driver.do(ev.PrefillAnswered("r1", 1, 200))) == ["StartPair"]
    other = Driver("p0", "d0", placement={"prefill_ahead_requests": 0, "prefill_batch_tokens": 100})
    assert names(other.request("r1", prompt_tokens=500)) == ["StartPair"]


def test_the_queue_is_bounded() -> None:
    """One more than queue_limit_requests gets 429 with Retry-After, the age of the oldest waiting
    request.
    """
    driver = Driver("p0", "d0", queue_limit_requests=2, placement={"prefill_ahead_requests": 0})
    for name in ("r1", "r2", "r3"):
        driver.request(name)
    driver.now += 7
    effects = driver.request("r4")
    assert isinstance(effects[0], AnswerError)
    assert (effects[0].status, effects[0].retry_after_s) == (429, 7)
    assert len(driver.core.queue) == 2


def test_waiting_ends_with_the_queue_timeout() -> None:
    """503 with Retry-After after queue_timeout_s."""
    driver = Driver("p0", "d0", queue_timeout_s=3, placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    driver.request("r2")
    effects = driver.pass_time(3)
    assert names(effects) == ["AnswerError", "EndRequest"]
    assert (effects[0].status, effects[0].retry_after_s) == (503, 3)  # type: ignore[union-attr]


def test_the_queue_is_first_come_first_served() -> None:
    """A small request does not pass a large one that waits for decode blocks."""
    driver = Driver("p0", "d0")
    driver.request("r1", prompt_tokens=800, output_tokens=100)
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    assert driver.request("large", prompt_tokens=800, output_tokens=100) == []
    assert driver.request("small") == []
    driver.do(ev.FirstDataArrived("r1", 1))
    effects = driver.do(ev.DecodeEnded("r1", 1))
    started = [e.request_id for e in effects if isinstance(e, StartPair)]
    assert started == ["large", "small"]


def test_a_request_that_needs_no_slot_passes_one_that_waits_for_a_slot() -> None:
    """It goes to the decode node while the other keeps its place in the queue."""
    driver = Driver("p0", "d0", placement={"prefill_ahead_requests": 0})
    driver.request("r1")
    driver.request("r2")
    assert names(driver.request("r3", alone_because="n > 1")) == ["StartAlone"]
    assert list(driver.core.queue) == ["r2"]


def test_decode_blocks_are_counted_before_the_engine_reports_them() -> None:
    """Two requests of 57 blocks do not fit into 100; the second waits for the first one's end."""
    driver = Driver("p0", "d0")
    driver.request("r1", prompt_tokens=800, output_tokens=100)
    assert driver.request("r2", prompt_tokens=800, output_tokens=100) == []
    driver.do(ev.PrefillAnswered("r1", 1, 200))
    driver.report("d0", free_blocks=43, running=1)
    assert len(driver.core.queue) == 1
    driver.do(ev.FirstDataArrived("r1", 1))
    assert "StartPair" in names(driver.do(ev.DecodeEnded("r1", 1)))


def test_leased_blocks_count_against_admission() -> None:
    """What the engine holds for a peer is not free, even while estimates are generous."""
    driver = Driver("p0", "d0")
    driver.report("d0", free_blocks=40, leased_blocks=60, running=1)
    assert driver.request("r1", prompt_tokens=640, output_tokens=160) == []
    assert names(driver.report("d0", free_blocks=100)) == ["StartPair"]


def test_an_idle_node_takes_what_can_never_fit() -> None:
    """The engine refuses it better than the router could; it must not wait for ever."""
    driver = Driver("p0", "d0")
    driver.report("d0", free_blocks=10)
    effects = driver.request("r1", prompt_tokens=100_000, output_tokens=None)
    assert names(effects) == ["StartPair"]


def test_equal_nodes_get_equal_shares() -> None:
    """2P2D and 400 requests that end in the order of their arrival: 200 each, and a third node is
    used at once.
    """
    driver = Driver("p0", "p1", "d0", "d1")
    counts: Counter[str] = Counter()
    for number in range(400):
        (effect,) = driver.request(f"r{number}")
        assert isinstance(effect, StartPair)
        counts.update((effect.prefill.node, effect.decode.node))
        if number % 4 == 3:
            for old in range(number - 3, number + 1):
                driver.do(ev.PrefillAnswered(f"r{old}", 1, 200))
                driver.do(ev.FirstDataArrived(f"r{old}", 1))
                driver.do(ev.DecodeEnded(f"r{old}", 1))
    assert counts == {"p0": 200, "p1": 200, "d0": 200, "d1": 200}


def test_the_least_loaded_node_is_chosen() -> None:
    """Fewest requests first; a node whose leg just broke is the last choice for a second."""
    driver = Driver("p0", "d0", "d1", "d2", placement={"prefill_ahead_requests": 9})
    first = driver.request("r1")[0]
    assert isinstance(first, StartPair)
    assert first.decode.node == "d0"
    driver.do(ev.DecodeFailed("r1", 1, "reset"))
    chosen = [driver.request(f"s{i}")[0] for i in range(3)]
    assert [e.decode.node for e in chosen if isinstance(e, StartPair)] == ["d2", "d1", "d2"]
    driver.now += 1.1
    last = driver.request("t")[0]
    assert isinstance(last, StartPair)
    assert last.decode.node == "d0"


@pytest.mark.parametrize(
    ("alone_because", "tokens", "threshold", "has_prefill", "expected"),
    [
        ("", 1, 0, True, "split"),
        ("", 99, 100, True, "alone_short_prompt"),
        ("", 100, 100, True, "split"),
        ("n > 1", 1000, 0, True, "alone_not_splittable"),
        ("", 1000, 0, False, "alone_no_prefill_node"),
    ],
)
def test_what_is_split(
    alone_because: str, tokens: int, threshold: int, has_prefill: bool, expected: str
) -> None:
    """Threshold 0 splits everything that can be split; shorter prompts than the threshold stay
    whole.
    """
    limits = PlacementLimits(min_uncached_tokens=threshold)
    assert decision(alone_because, tokens, limits, has_prefill) == expected


def test_a_short_prompt_goes_to_decode_alone() -> None:
    """The threshold is compared with the prompt's estimate."""
    driver = Driver("p0", "d0", placement={"min_uncached_tokens": 64})
    assert isinstance(driver.request("r1", prompt_tokens=63)[0], StartAlone)
    assert isinstance(driver.request("r2", prompt_tokens=64)[0], StartPair)

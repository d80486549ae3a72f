"""The mock scheduler against hooks that remember what they were told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from splitserve.kv_transfer.orders import TransferResults
from splitserve.orchestrator.engines.serving.scheduler import Request, Scheduler, StepPlan

BLOCK = 4
END = 256
NOTHING = TransferResults()


@dataclass
class Hooks:
    """Wants what ``wants`` says for a request, keeps the blocks of those in ``keeps``."""

    wants: set[str] = field(default_factory=set)
    keeps: set[str] = field(default_factory=set)
    told: list[tuple[object, ...]] = field(default_factory=list)

    def arrived(self, request: Request) -> None:
        self.told.append(("arrived", request.id))

    def wanted_tokens(self, request: Request, computed_tokens: int) -> int:
        return len(request.prompt) - computed_tokens if request.id in self.wants else 0

    def allocated(self, request: Request, external_tokens: int) -> None:
        self.told.append(("allocated", request.id, external_tokens))
        self.wants.discard(request.id)

    def finished(self, request: Request, *, aborted: bool) -> bool:
        self.told.append(("finished", request.id, aborted))
        return request.id in self.keeps

    def step_reported(self, results: TransferResults) -> TransferResults:
        return results


@dataclass
class World:
    """A scheduler of 11 usable blocks of 4 tokens, and steps of 8 tokens."""

    hooks: Hooks = field(default_factory=Hooks)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.hooks,
            blocks=12,
            block_tokens=BLOCK,
            step_limit_tokens=8,
            running_limit_requests=4,
        )

    def add(self, name: str, prompt_tokens: int, max_tokens: int = 1, start: int = 100) -> Request:
        prompt = tuple(range(start, start + prompt_tokens))
        request = Request(name, prompt, max_tokens, end_ids=frozenset({END}))
        self.scheduler.add(request)
        return request

    def step(self, token: int = 65, results: TransferResults = NOTHING) -> StepPlan:
        plan = self.scheduler.schedule()
        sampled = {chunk.request.id: token for chunk in plan.chunks if chunk.samples}
        self.scheduler.update(plan, sampled, results)
        return plan

    @property
    def free(self) -> int:
        return self.scheduler.pool.free_blocks


def spans(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request, first token, tokens) per chunk."""
    return [(chunk.request.id, chunk.first, chunk.tokens) for chunk in plan.chunks]


@pytest.fixture
def world() -> World:
    return World()


def test_a_long_prompt_is_computed_in_chunks(world: World) -> None:
    """Steps of 8 tokens, then one per token; a second request fills what is left of a step."""
    a = world.add("a", 13, max_tokens=2)
    world.add("b", 2, start=200)
    assert spans(world.step()) == [("a", 0, 8)]
    assert spans(world.step()) == [("a", 8, 5), ("b", 0, 2)]
    assert spans(world.step()) == [("a", 13, 1)]
    assert a.finish_reason == "length"
    assert world.free == 11


def test_a_known_beginning_is_not_computed_again(world: World) -> None:
    """Full blocks are shared, but the last token is computed always."""
    world.add("a", 8)
    world.step()
    b = world.add("b", 8)
    assert spans(world.step()) == [("b", 4, 4)]
    assert b.cached == 4


def test_a_beginning_is_shared_from_the_step_that_computes_it(world: World) -> None:
    """As in vLLM, a request of the same step may use blocks that the step is about to fill."""
    world.add("a", 6)
    world.add("b", 6)
    plan = world.step()
    assert spans(plan) == [("a", 0, 6), ("b", 4, 2)]
    assert plan.chunks[0].block_ids[0] == plan.chunks[1].block_ids[0]


def test_salts_do_not_share(world: World) -> None:
    """Equal prompts of other tenants are computed again."""
    world.add("a", 8)
    world.step()
    other = Request("b", tuple(range(100, 108)), 1, salt="tenant")
    world.scheduler.add(other)
    assert spans(world.step()) == [("b", 0, 8)]


def test_a_parked_request_waits_for_its_report(world: World) -> None:
    """Blocks at once, no computing; after the report only the last token is computed, and the
    blocks are shared.
    """
    world.hooks.wants = {"a"}
    world.add("a", 8)
    assert spans(world.step()) == []
    assert world.free == 9
    assert ("allocated", "a", 8) in world.hooks.told
    assert spans(world.step()) == []
    world.add("b", 8)
    assert spans(world.step()) == [("b", 0, 8)]  # a's blocks are not offered yet
    world.step(results=TransferResults(finished_receiving=frozenset({"a"})))
    assert spans(world.step()) == [("a", 7, 1)]
    assert world.hooks.told.count(("allocated", "a", 0)) == 1
    assert world.free == 11


def test_only_what_is_missing_is_wanted(world: World) -> None:
    """A parked request keeps its own known beginning."""
    world.add("a", 8)
    world.step()
    world.hooks.wants = {"b"}
    world.add("b", 11)
    world.step()
    assert ("allocated", "b", 3) in world.hooks.told


def test_a_failed_transfer_is_computed_here(world: World) -> None:
    """The blocks are given back, and the whole prompt is computed."""
    world.hooks.wants = {"a"}
    world.add("a", 8)
    world.step()
    failed = frozenset({"a"})
    world.step(results=TransferResults(finished_receiving=failed, failed_receiving=failed))
    assert world.free == 11
    assert spans(world.step()) == [("a", 0, 8)]


def test_an_aborted_parked_request_keeps_its_blocks(world: World) -> None:
    """Until it is reported: somebody may still write into them."""
    world.hooks.wants = {"a"}
    a = world.add("a", 8)
    world.step()
    world.scheduler.abort(a)
    assert world.hooks.told[-1] == ("finished", "a", True)
    world.step()
    assert world.free == 9
    assert world.scheduler.awaits_reports
    world.step(results=TransferResults(finished_receiving=frozenset({"a"})))
    assert world.free == 11
    assert not world.scheduler.awaits_reports


def test_a_finished_prefill_keeps_its_blocks(world: World) -> None:
    """Until it is reported as sent."""
    world.hooks.keeps = {"a"}
    world.add("a", 8)
    world.step()
    assert world.free == 9
    world.step(results=TransferResults(finished_sending=frozenset({"a"})))
    assert world.free == 11


@pytest.mark.parametrize(
    "results",
    [
        TransferResults(finished_sending=frozenset({"a"})),
        TransferResults(finished_receiving=frozenset({"a"})),
    ],
)
def test_an_unexpected_report_is_fatal(world: World, results: TransferResults) -> None:
    """As in vLLM: nobody waits for it, so somebody's bookkeeping is wrong."""
    world.add("a", 4, max_tokens=2)
    world.step()
    with pytest.raises(AssertionError, match="is not waited for"):
        world.step(results=results)


def test_a_report_comes_once(world: World) -> None:
    """The second one is fatal."""
    world.hooks.keeps = {"a"}
    world.add("a", 8)
    world.step()
    sent = TransferResults(finished_sending=frozenset({"a"}))
    world.step(results=sent)
    with pytest.raises(AssertionError):
        world.step(results=sent)


def test_the_latest_request_is_preempted(world: World) -> None:
    """When blocks run out the last one gives its back, and is computed again later, answer
    included.
    """
    a = world.add("a", 16, max_tokens=20)
    b = world.add("b", 16, max_tokens=20, start=200)
    preempted: list[str] = []
    while "b" not in preempted:
        preempted += world.step().preempted
    assert preempted == ["b"]
    had = len(b.answer)
    assert had > 0
    while a.finish_reason is None or b.finish_reason is None:
        world.step()
    assert (len(a.answer), len(b.answer)) == (20, 20)
    assert world.free == 11


def test_a_request_that_does_not_fit_waits(world: World) -> None:
    """No running request is preempted for a new one; it starts when there is room."""
    a = world.add("a", 38, max_tokens=2)
    while not a.answer:
        world.step()
    b = world.add("b", 16, start=200)
    assert spans(world.step()) == [("a", 38, 1)]
    assert spans(world.step()) == [("b", 0, 8)]
    world.step()
    assert b.finish_reason == "length"


@pytest.mark.parametrize("steps", range(4))
def test_an_abort_gives_everything_back(world: World, steps: int) -> None:
    """At any moment of a request that is computed here; a second abort is harmless."""
    request = world.add("a", 12, max_tokens=8)
    for _ in range(steps):
        world.step()
    world.scheduler.abort(request)
    world.scheduler.abort(request)
    assert world.free == 11
    assert [told for told in world.hooks.told if told[0] == "finished"] == [("finished", "a", True)]
    assert spans(world.step()) == []


def test_prefixes_can_be_forgotten(world: World) -> None:
    """Once no request has blocks: the same prompt is computed again."""
    world.add("a", 9)
    assert spans(world.step()) == [("a", 0, 8)]
    assert not world.scheduler.pool.forget()
    world.step()
    world.add("b", 9)
    assert spans(world.step()) == [("b", 8, 1)]
    assert world.scheduler.pool.forget()
    world.add("c", 9)
    assert spans(world.step()) == [("c", 0, 8)]
    assert world.free == 9


def test_answers_end(world: World) -> None:
    """At the end token unless it is ignored or too early, at a stop id, at the limit."""
    plain = world.add("a", 3, max_tokens=9)
    world.step(token=END)
    assert plain.finish_reason == "stop"
    ignoring = Request("b", (1, 2), 2)
    world.scheduler.add(ignoring)
    world.step(token=END)
    world.step(token=END)
    assert ignoring.finish_reason == "length"
    early = Request("c", (3, 4), 9, min_tokens=1, end_ids=frozenset({77, END}))
    world.scheduler.add(early)
    world.step(token=END)
    assert early.finish_reason is None
    world.step(token=77)
    assert early.finish_reason == "stop"

"""Tenants take turns, weighted by what they are served; one tenant alone has a plain queue."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.orchestrator.core.fair_queue import FairQueue

TENANTS = ("a", "b", "c")


def filled(*keys: str, weights: dict[str, float] | None = None) -> FairQueue[str]:
    """A queue of keys like ``a1``: the first letter is the tenant."""
    queue: FairQueue[str] = FairQueue(weights)
    for key in keys:
        queue.add(key, key, key[0])
    return queue


def served(queue: FairQueue[str], costs: dict[str, float] | None = None, limit: int = 99) -> str:
    """The keys in the order in which they are served; costs are 1 or by tenant."""
    order: list[str] = []
    while len(order) < limit and (key := queue.first()) is not None:
        assert queue.serve(key, key[0], (costs or {}).get(key[0], 1.0))
        order.append(key)
    return " ".join(order)


def test_one_tenant_is_first_come_first_served() -> None:
    """Whatever its requests cost."""
    assert served(filled("a1", "a2", "a3"), {"a": 7.0}) == "a1 a2 a3"


def test_tenants_take_turns() -> None:
    """However many one of them has waiting, and whoever came first."""
    assert served(filled("a1", "a2", "a3", "a4", "b1", "b2")) == "a1 b1 a2 b2 a3 a4"


def test_turns_are_weighted_by_cost() -> None:
    """A tenant whose requests cost three times as much gets a third of the requests."""
    queue = filled(*(f"a{i}" for i in range(40)), *(f"b{i}" for i in range(40)))
    order = served(queue, {"a": 3.0}, limit=40)
    assert Counter(key[0] for key in order.split()) == {"a": 10, "b": 30}


def test_a_weight_multiplies_the_turns() -> None:
    """Weight 2 beside 1: two thirds."""
    queue = filled(*(f"a{i}" for i in range(40)), *(f"b{i}" for i in range(40)), weights={"a": 2.0})
    order = served(queue, limit=30)
    assert Counter(key[0] for key in order.split()) == {"a": 20, "b": 10}


def test_nobody_saves_up_turns_while_away() -> None:
    """A tenant that comes after the others were served long is next, and then has equal turns."""
    queue = filled(*(f"a{i}" for i in range(60)))
    served(queue, limit=50)
    for number in range(5):
        queue.add(f"b{number}", f"b{number}", "b")
    assert served(queue, limit=6) == "b0 a50 b1 a51 b2 a52"


def test_leaving_for_a_moment_wins_nothing() -> None:
    """A tenant that always has one request waiting, and is absent between two, is not served more
    often than one that waits all the time.
    """
    queue = filled("a0", *(f"b{i}" for i in range(50)))
    counts: Counter[str] = Counter()
    for number in range(40):
        key = queue.first()
        assert key is not None
        queue.serve(key, key[0], 1.0)
        counts[key[0]] += 1
        if key[0] == "a":
            queue.add(f"a{number + 1}", f"a{number + 1}", "a")
    assert counts == {"a": 20, "b": 20}


def test_a_retried_request_is_first_of_its_tenant() -> None:
    """Before its tenant's others, not before other tenants; what it costs now is the caller's."""
    queue = filled("a1", "a2", "b1", "b2")
    served(queue, limit=1)
    queue.add("a1", "a1", "a", is_first=True)
    assert served(queue) == "b1 a1 b2 a2"


def test_those_that_may_pass_are_found_in_their_order() -> None:
    """By turns over tenants; the others keep their places."""
    queue = filled("a1", "b1")
    for key in ("a2", "a3", "b2"):
        queue.add(key, key, key[0], may_pass=True)
    passed = []
    while (key := queue.first_that_may_pass()) is not None:
        queue.serve(key, key[0], 1.0)
        passed.append(key)
    assert passed == ["a2", "b2", "a3"]
    assert sorted(queue) == ["a1", "b1"]
    assert queue.passing == 0


def test_who_is_refused_when_the_queue_is_full() -> None:
    """The latest of the tenant that holds most; the newcomer when it would hold as much itself."""
    queue = filled("a1", "a2", "a3", "b1")
    assert queue.whom_to_refuse("a") is None
    assert queue.whom_to_refuse("b") == "a3"
    assert queue.whom_to_refuse("c") == "a3"
    even = filled("a1", "a2", "b1", "b2")
    assert even.whom_to_refuse("a") is even.whom_to_refuse("b") is None
    assert even.whom_to_refuse("c") == "a2"
    assert filled("a1", "a2", "b1", weights={"a": 2.0}).whom_to_refuse("b") is None


def test_who_came_back_is_never_refused() -> None:
    """It had a place, and may be in the middle of its answer; it does not count against its tenant
    either.
    """
    queue = filled("a1", "a2", "b1")
    for key in ("a1", "a2"):
        queue.discard(key, "a")
        queue.add(key, key, "a", is_first=True)
    assert queue.whom_to_refuse("b") is queue.whom_to_refuse("c") is None
    queue.add("b2", "b2", "b")
    assert queue.whom_to_refuse("c") == "b2"
    queue.discard("a1", "a")
    queue.add("a1", "a1", "a")
    assert queue.whom_to_refuse("c") == "b2"
    for key in ("a3", "a4"):
        queue.add(key, key, "a")
    assert queue.whom_to_refuse("c") == "a4"


def test_a_key_waits_once() -> None:
    """A second one of the same name is our own mistake."""
    with pytest.raises(AssertionError, match="waits already"):
        filled("a1", "a1")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add first", "serve", "discard"]),
            st.sampled_from(TENANTS),
            st.booleans(),
            st.integers(0, 9),
        ),
        max_size=80,
    )
)
def test_it_holds_what_was_put_in(steps: list[tuple[str, str, bool, int]]) -> None:
    """Compared with one list per tenant: nothing is lost, doubled or reordered within a tenant, and
    an empty queue remembers nobody.
    """
    queue: FairQueue[str] = FairQueue()
    lines: dict[str, deque[str]] = {tenant: deque() for tenant in TENANTS}
    may_pass: set[str] = set()
    for number, (what, tenant, passes, cost) in enumerate(steps):
        line = lines[tenant]
        if what.startswith("add"):
            key = f"{tenant}{number}"
            queue.add(key, key, tenant, may_pass=passes, is_first=what == "add first")
            (line.appendleft if what == "add first" else line.append)(key)
            may_pass |= {key} if passes else set()
        elif what == "serve":
            first = queue.first()
            assert (first is None) == (not any(lines.values()))
            if first is not None:
                assert first == lines[first[0]][0]
                assert queue.serve(first, first[0], cost)
                lines[first[0]].popleft()
        elif line:
            key = line[cost % len(line)]
            line.remove(key)
            assert queue.discard(key, tenant)
            assert not queue.discard(key, tenant)
        left = [key for line in lines.values() for key in line]
        assert sorted(queue) == sorted(queue.values()) == sorted(left)
        assert len(queue) == sum(queue.waiting().values()) == len(left)
        assert queue.passing == len(may_pass & set(left))
        assert all(queue.first_of(t) == (lines[t][0] if lines[t] else None) for t in TENANTS)
    if not len(queue):
        assert not queue._tags
        assert queue._clock == 0.0


@given(st.lists(st.integers(1, 20), min_size=60, max_size=60))
def test_shares_are_even_to_within_one_request(costs: list[int]) -> None:
    """While two tenants wait all the time, what they were served differs by the largest cost at
    most, after every single turn.
    """
    queue = filled(*(f"{tenant}{i}" for tenant in "ab" for i in range(60)))
    total = {"a": 0, "b": 0}
    for cost in costs:
        key = queue.first()
        assert key is not None
        queue.serve(key, key[0], cost)
        total[key[0]] += cost
        assert abs(total["a"] - total["b"]) <= max(costs)

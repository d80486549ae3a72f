"""The controller's rules, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.controlled import (
    ANSWERS,
    BALANCED,
    BATCH_TOKENS,
    PROMPTS,
    TARGETS,
    Mix,
    Story,
    nodes_of,
)

from splitserve.orchestrator.tuner.controller import ControllerSettings, Finished, NodeSeen

WARM = 4
"""Windows of the warm-up."""


def test_a_load_that_wants_another_split() -> None:
    """After the warm-up, when two decisions agree, a decode node becomes a prefill node; the line
    says which, why, and what is expected.
    """
    story, nodes = Story(), nodes_of(2, 2)
    decisions = story.windows(WARM + 1, PROMPTS, nodes)
    assert [decision.is_change for decision in decisions] == [False] * WARM + [True]
    assert decisions[0].why == "watches for 120 s before it decides; 30 s have passed"
    assert decisions[-2].why.startswith("waits for the next decision to agree: 3:1 would serve")
    last = decisions[-1]
    assert (last.node, last.role) == ("d0", "prefill")
    assert last.why.startswith("d0 becomes prefill: 3:1 would serve ")
    assert "of 6 requests/s with prompts of 1000 and answers of 30 tokens in time, 2:2 " in last.why
    assert "\n" not in last.why
    assert last.outlook is not None
    assert str(last.outlook.best) == "3:1"


def test_the_other_direction() -> None:
    """A load of long answers makes the prefill node with the fewest legs a decode node."""
    story = Story()
    nodes = [node._replace(legs=3 - n) for n, node in enumerate(nodes_of(2, 2))]
    last = story.windows(WARM + 1, ANSWERS, nodes)[-1]
    assert (last.node, last.role) == ("p1", "decode")


def test_a_split_that_is_right_is_kept() -> None:
    """And the line says what it does."""
    last = Story().windows(WARM + 4, BALANCED, nodes_of(2, 2))[-1]
    assert not last.is_change
    assert last.why.startswith("keeps 2:2, which would serve ")


def test_nothing_is_decided_from_few_requests() -> None:
    """However long it has watched."""
    story = Story()
    last = story.windows(10, Mix(1 / 60, 1000, 30), nodes_of(2, 2))[-1]
    assert last.why == "has seen too few requests end to decide anything"


@pytest.mark.parametrize(
    ("mix", "nodes", "words"),
    [
        (PROMPTS, nodes_of(3, 1), "keeps 3:1"),
        (Mix(30.0, 1000, 5), nodes_of(3, 1), "keeps 3:1"),
        (ANSWERS, nodes_of(1, 3), "keeps 1:3"),
        (Mix(20.0, 20, 300), nodes_of(1, 3), "keeps 1:3"),
        (PROMPTS, nodes_of(0, 4), "no prefill node is usable: nothing to divide"),
        (PROMPTS, nodes_of(4, 0), "no decode node is usable: nothing to divide"),
    ],
)
def test_the_last_node_of_a_role_is_never_changed(
    mix: Mix, nodes: list[NodeSeen], words: str
) -> None:
    """However much the load leans to the other side."""
    decisions = Story().windows(WARM + 4, mix, nodes)
    assert not any(decision.is_change for decision in decisions)
    assert decisions[-1].why.startswith(words)


@pytest.mark.parametrize("what", [{"is_usable": False}, {"is_slow": True}, {"can_flip": False}])
def test_dead_slow_and_fixed_nodes_are_left_alone(what: dict[str, bool]) -> None:
    """Of three decode nodes the one without that is changed, although others have fewer legs."""
    nodes = nodes_of(2, 3)
    odd = [node._replace(**what) if node.name in ("d0", "p0") else node for node in nodes]
    odd = [node._replace(legs=5) if node.name == "d2" else node for node in odd]
    changes = [d.node for d in Story().windows(WARM + 3, PROMPTS, odd) if d.is_change]
    assert set(changes) == {"d1"}


def test_a_dead_node_is_not_counted() -> None:
    """Two prefill nodes of which one is dead are one, and no reason to take it away."""
    nodes = [n._replace(is_usable=n.name != "p1") for n in nodes_of(2, 2)]
    last = Story().windows(WARM + 3, ANSWERS, nodes)[-1]
    assert not last.is_change
    assert last.outlook is not None
    assert (last.outlook.current.prefill, last.outlook.current.decode) == (1, 2)


def test_nodes_that_cannot_change_roles() -> None:
    """That is what is said."""
    nodes = [node._replace(can_flip=False) for node in nodes_of(2, 2)]
    last = Story().windows(WARM + 1, PROMPTS, nodes)[-1]
    assert last.why.startswith("no decode node may change its role: 3:1 would serve")


def test_one_long_prompt_changes_nothing() -> None:
    """A prompt as long as those of a minute together, and a long answer too."""
    story, nodes = Story(), nodes_of(2, 2)
    story.windows(WARM + 2, BALANCED, nodes)
    story.controller.arrived(story.now, 100_000)
    long = Finished(100_000, 0, 20_000, 100_000)
    story.controller.served(story.now, long, 50.0, 0.05)
    before = story.window(BALANCED, nodes)
    for decision in (before, *story.windows(4, BALANCED, nodes)):
        assert decision.why.startswith("keeps 2:2")
        assert decision.outlook is not None
        assert decision.outlook.forecast.prompt_tokens == pytest.approx(600, rel=0.02)
        assert decision.outlook.forecast.answer_tokens == pytest.approx(150, rel=0.02)


def test_a_small_gain_is_no_reason() -> None:
    """With a larger ``least_gain`` the same load changes nothing."""
    wanted = ControllerSettings(TARGETS, batch_tokens=BATCH_TOKENS, least_gain=0.999)
    last = Story(wanted).windows(WARM + 3, PROMPTS, nodes_of(2, 2))[-1]
    assert "3:1 is not enough better" in last.why


def test_a_burst_changes_nothing() -> None:
    """One window of many long prompts may want another split; the next decision does not agree."""
    story, nodes = Story(), nodes_of(2, 2)
    story.windows(WARM + 4, BALANCED, nodes)
    decisions = [story.window(Mix(6.0, 1800, 10), nodes), *story.windows(4, BALANCED, nodes)]
    assert decisions[0].why.startswith("waits for the next decision to agree: 3:1 ")
    assert [decision.why[:9] for decision in decisions[1:]] == ["keeps 2:2"] * 4


def test_two_decisions_have_to_agree() -> None:
    """The first that wants another split waits for the second."""
    story, nodes = Story(), nodes_of(2, 2)
    story.windows(WARM + 4, BALANCED, nodes)
    leaning = [story.window(PROMPTS, nodes) for _ in range(6)]
    first = next(d for d in leaning if not d.why.startswith("keeps"))
    assert first.why.startswith("waits for the next decision to agree: 3:1 ")
    assert leaning[leaning.index(first) + 1].is_change


def test_one_change_in_five_minutes() -> None:
    """After a change the next one waits, and the line says how long; then it is made at once."""
    story, nodes = Story(), nodes_of(2, 6)
    decisions = story.windows(WARM + 1, Mix(12.0, 1000, 20), nodes)
    assert decisions[-1].is_change
    story.controller.changed(story.now)
    nodes = nodes_of(3, 5)
    waiting = story.windows(9, Mix(12.0, 1000, 20), nodes)
    assert not any(decision.is_change for decision in waiting)
    assert waiting[0].why.startswith("waits 270 s more after the last change: ")
    assert story.window(Mix(12.0, 1000, 20), nodes).is_change


def test_missed_targets_shorten_the_wait() -> None:
    """To ``missed_interval_s``, and one decision is enough."""
    story, nodes = Story(), nodes_of(2, 6)
    story.windows(WARM + 1, Mix(12.0, 1000, 20), nodes)
    story.controller.changed(story.now)
    decisions = [story.window(Mix(12.0, 1000, 20), nodes, is_late=True) for _ in range(4)]
    assert [decision.is_change for decision in decisions] == [False, False, False, True]
    assert decisions[0].why.startswith("waits 90 s more")
    assert decisions[-1].missed == 1.0


def test_a_node_that_owes_is_waited_for() -> None:
    """No second change while the first is not over."""
    nodes = [n._replace(owes=n.name == "p1") for n in nodes_of(2, 2)]
    last = Story().windows(WARM + 2, PROMPTS, nodes)[-1]
    assert last.why.startswith("waits for p1, which owes work of its old role: 3:1")


def test_a_load_that_no_split_carries() -> None:
    """The split that carries most is the best, and the line does not promise anything."""
    last = Story().windows(WARM + 1, Mix(30.0, 1500, 30), nodes_of(2, 4))[-1]
    assert last.is_change
    assert last.role == "prefill"
    assert "5:1 could carry" in last.why
    assert "too late: no split meets the targets" in last.why


def test_failed_requests_count_as_missed() -> None:
    """As those that were refused for want of room."""
    story = Story()
    story.controller.failed(1.0)
    assert story.window(BALANCED, nodes_of(2, 2)).missed == pytest.approx(1 / 121)


def test_many_nodes() -> None:
    """A thousand nodes are decided about as eight are."""
    short = ControllerSettings(TARGETS, window_s=1.0, warm_up_s=1.0, batch_tokens=BATCH_TOKENS)
    decision = Story(short).windows(3, Mix(1500.0, 1000, 30), nodes_of(500, 500))[-1]
    assert decision.role == "prefill"


lengths = st.integers(1, 4000)


@settings(max_examples=60, deadline=None)
@given(
    mixes=st.lists(st.builds(Mix, st.floats(0.5, 8.0), lengths, lengths), min_size=1, max_size=3),
    flags=st.lists(
        st.builds(
            NodeSeen,
            st.just(""),
            st.sampled_from(["prefill", "decode"]),
            is_usable=st.booleans(),
            is_slow=st.booleans(),
            can_flip=st.booleans(),
            owes=st.booleans(),
            legs=st.integers(0, 3),
        ),
        max_size=7,
    ),
)
def test_a_role_always_keeps_a_node(mixes: list[Mix], flags: list[NodeSeen]) -> None:
    """Whatever comes and whatever nodes there are: a node that is changed works, may change, and
    leaves another one that works in its role. Changes are carried out at once.
    """
    nodes = {f"n{n}": node._replace(name=f"n{n}") for n, node in enumerate(flags)}
    quick = ControllerSettings(
        TARGETS, window_s=5.0, change_interval_s=10.0, missed_interval_s=5.0, warm_up_s=10.0
    )
    story = Story(quick)
    for mix in mixes:
        for _ in range(4):
            decision = story.window(mix, list(nodes.values()))
            if not decision.is_change:
                continue
            node = nodes[decision.node]
            assert node.is_usable
            assert node.can_flip
            assert not node.is_slow
            assert decision.role != node.role
            nodes[decision.node] = node._replace(role=decision.role)
            working = [n for n in nodes.values() if n.is_usable and not n.is_slow]
            assert {n.role for n in working} == {"prefill", "decode"}
            story.controller.changed(story.now)


def test_it_follows_the_load_and_stays() -> None:
    """From answers to prompts: one node after the other, and then no more."""
    story = Story(replace(Story().settings, change_interval_s=60.0, missed_interval_s=60.0))
    nodes = {node.name: node for node in nodes_of(1, 3)}
    changes = []
    for number in range(30):
        mix = ANSWERS if number < 6 else PROMPTS
        decision = story.window(mix, list(nodes.values()))
        if decision.is_change:
            changes.append((number, decision.role))
            nodes[decision.node] = nodes[decision.node]._replace(role=decision.role)
            story.controller.changed(story.now)
    assert [role for _, role in changes] == ["prefill", "prefill"]
    assert 6 < changes[0][0] < 12
    assert changes[1][0] - changes[0][0] in (2, 3, 4)

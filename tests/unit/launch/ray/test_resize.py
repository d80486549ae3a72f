"""Another size of a cluster on a Ray cluster that is played by a fake."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_ray import SECRET, TEXT, FakeRay, up

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.ray.resize import resize, running_order


def scale(ray: FakeRay, pool: str, replicas: int) -> None:
    """As the command does it, after it has drained what goes."""
    running = running_order(ray)  # type: ignore[arg-type]
    resize(ray, running, pool, replicas, {}, print)  # type: ignore[arg-type]


def sizes_told(ray: FakeRay) -> list[tuple[dict[str, int], int]]:
    """What each actor was told, each once."""
    found: list[tuple[dict[str, int], int]] = []
    for plain in ray.actors.values():
        told = (plain["sizes"], plain["edition"])
        found += [told] if told not in found else []
    return found


def test_a_pool_grows_by_an_actor_with_its_room() -> None:
    """Only the host that gets it is asked; the others live on, and every actor is told."""
    ray = FakeRay()
    up(ray)
    ray.asked.clear()
    scale(ray, "decode", 3)
    assert ray.asked == {"beta": ["decode-2"]}
    assert ray.ended == []
    assert sorted(ray.actors) == ["decode-0", "decode-1", "decode-2", "prefill-0", "router"]
    assert ray.groups["decode-2"] == "id-b"
    assert ray.actors["decode-2"]["secret"] == SECRET.hex()
    assert sizes_told(ray) == [({"prefill": 1, "decode": 3}, 1)]


def test_a_pool_shrinks_with_its_room() -> None:
    """Nothing is left of the node that goes, nor asked of any host."""
    ray = FakeRay()
    up(ray)
    ray.asked.clear()
    scale(ray, "decode", 1)
    assert ray.ended == ["decode-1"]
    assert sorted(ray.groups) == ["decode-0", "prefill-0"]
    assert ray.asked == {}
    assert sizes_told(ray) == [({"prefill": 1, "decode": 1}, 1)]


@pytest.mark.parametrize("replicas", [2, 3])
def test_up_adopts_a_scaled_cluster_and_finishes_what_was_interrupted(replicas: int) -> None:
    """With the YAML that it was started from, or one of the new size: what is missing is added,
    what is too much ends, and an actor that has missed the change is told.
    """
    ray = FakeRay()
    up(ray)
    scale(ray, "decode", 3)
    del ray.actors["decode-1"]
    ray.actors["prefill-0"] |= {"sizes": {}, "edition": 0}
    ray.actors["decode-3"] = ray.actors["decode-2"] | {"name": "decode-3"}
    ray.groups["decode-3"] = "id-a"
    brought = up(ray, TEXT.replace("replicas: 2", f"replicas: {replicas}"))
    assert brought.is_adopted
    assert brought.order.sizes == {"prefill": 1, "decode": 3}
    assert sorted(ray.actors) == ["decode-0", "decode-1", "decode-2", "prefill-0", "router"]
    assert sorted(ray.groups) == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    assert sizes_told(ray) == [({"prefill": 1, "decode": 3}, 1)]


@pytest.mark.parametrize(
    ("facts", "has_room", "replicas", "words"),
    [
        ({"problems": ["model.path: no folder"]}, True, 3, "on beta (10.0.0.2): model.path"),
        ({}, False, 3, "no room for decode-2 within 0.05 s"),
        ({}, True, 30, "take 31 CPU"),
    ],
)
def test_what_the_hosts_cannot_hold_changes_nothing(
    facts: dict[str, Any], has_room: bool, replicas: int, words: str
) -> None:
    """It is refused as by `up`, and the room is given back."""
    ray = FakeRay()
    up(ray)
    before, groups = dict(ray.actors), dict(ray.groups)
    ray.facts["beta"], ray.has_room = facts, has_room
    with pytest.raises(ConfigError) as caught:
        scale(ray, "decode", replicas)
    assert words in caught.value.problems[0]
    assert (ray.actors, ray.groups) == (before, groups)


def test_of_two_changes_at_a_time_one_is_refused() -> None:
    """The first actor that is told knows the other already."""
    ray = FakeRay()
    up(ray)
    ray.learns = False
    with pytest.raises(StartError, match="changed by somebody else meanwhile"):
        scale(ray, "decode", 3)
    assert "decode-2" not in ray.actors
    assert "decode-2" not in ray.groups


def test_a_cluster_whose_actors_are_silent_has_no_known_size() -> None:
    """Nothing is guessed."""
    ray = FakeRay()
    up(ray)
    ray.silent = True
    with pytest.raises(StartError, match="no actor of the cluster answers"):
        running_order(ray)  # type: ignore[arg-type]

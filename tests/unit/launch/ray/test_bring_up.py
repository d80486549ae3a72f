"""How ``up`` brings a cluster up on a Ray cluster that is not there: it is played by a fake."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from splitserve.orchestrator.config import ConfigError, parse
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.ray.bring_up import Brought, Wanted, bring_up
from splitserve.orchestrator.launch.ray.host_check import free_port, secret_mark
from splitserve.orchestrator.launch.ray.order import Order, source_text
from splitserve.orchestrator.launch.ray.placement import RayHost
from splitserve.orchestrator.launch.ray.ray_cluster import SilentActorError
from splitserve.orchestrator.observe.own_version import own_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.launch.ray.placement import Group

TEXT = """
name: c
launcher: ray
engine: mock
model: {path: m}
router: {port: 0}
ray: {placement_timeout_s: 0.05}
decode: {replicas: 2}
security: {api_keys: [{tenant: a, key_file: k}]}
"""
SECRET = bytes(range(32))
HOSTS = [
    RayHost("id-a", "10.0.0.1", "alpha", {"CPU": 8}, {"rack": "1"}, is_head=True),
    RayHost("id-b", "10.0.0.2", "beta", {"CPU": 8}, {"rack": "2"}),
]


class FakeRay:
    """A Ray cluster of two hosts. Actors answer with their orders unless they are ``silent``."""

    def __init__(self) -> None:
        self.actors: dict[str, dict[str, Any]] = {}
        self.where: dict[str, Any] = {}
        self.ended: list[str] = []
        self.silent = False
        self.silent_names: set[str] = set()
        self.groups: list[str] = []
        self.has_room = True
        self.facts: dict[str, dict[str, Any]] = {}
        """By host: what it says otherwise than the others."""
        self.cannot_say: dict[str, StartError] = {}
        self.asked: dict[str, list[str]] = {}

    def names(self) -> list[str]:
        return sorted([*self.actors, "somebody-elses"])

    def hosts(self) -> list[RayHost]:
        return HOSTS

    def own_host_id(self) -> str:
        return "id-of-no-host"

    def reserve(self, group: Group) -> None:
        self.groups = [name for name in self.groups if name != group.name] + [group.name]

    def group_names(self) -> list[str]:
        return self.groups

    def release(self, name: str) -> bool:
        self.groups = [other for other in self.groups if other != name]
        return True

    def hosts_of(self, group: Group) -> list[str] | None:
        return ["id-a", "id-b"][: len(group.nodes)] if self.has_room else None

    def start(self, name: str, plain: dict[str, Any], _: object, **where: Any) -> None:
        self.actors.setdefault(name, plain)
        self.where[name] = where

    def ask(self, name: str, method: str, limit_s: float) -> Any:
        assert method == "told"
        if self.silent or name in self.silent_names:
            raise SilentActorError(name)
        return self.actors[name]

    def end(self, name: str) -> None:
        self.ended.append(name)
        del self.actors[name]

    def wait_until_gone(self, names: list[str], limit_s: float) -> list[str]:
        return []

    def on_host(self, host: RayHost, function: Any, *arguments: Any, limit_s: float) -> Any:
        if function is free_port:
            return 8123
        self.asked[host.hostname] = arguments[1]
        if host.hostname in self.cannot_say:
            raise self.cannot_say[host.hostname]
        plain = {
            "host": host.hostname,
            "splitserve": own_version(),
            "ray": "2.60.0",
            "unix_s": time.time(),
            "secret": secret_mark(SECRET),
            "problems": [],
        }
        return plain | self.facts.get(host.hostname, {})


def up(
    ray: FakeRay,
    text: str = TEXT,
    *,
    secret: bytes = SECRET,
    is_secret_given: bool = True,
    say: Callable[[str], None] = print,
) -> Brought:
    """One attempt."""
    wanted = Wanted(parse(text), "run-1", secret, is_secret_given, {}, say, lambda: False)
    return bring_up(ray, wanted)  # type: ignore[arg-type]


def problems_of(ray: FakeRay, text: str = TEXT, **more: Any) -> list[str]:
    """Why it was refused; no actor has been started."""
    before = dict(ray.actors)
    with pytest.raises(ConfigError) as caught:
        up(ray, text, **more)
    assert ray.actors == before
    return caught.value.problems


def test_everything_is_placed_and_told_where_the_router_is() -> None:
    """The router on Ray's head, where `up` is not on a host of Ray; each node in its bundle; each
    host asked about what it gets before.
    """
    ray = FakeRay()
    brought = up(ray)
    assert not brought.is_adopted
    assert (brought.order.router_host, brought.order.router_port) == ("10.0.0.1", 8123)
    assert ray.groups == ["prefill", "decode"]
    assert sorted(ray.actors) == ["decode-0", "decode-1", "prefill-0", "router"]
    assert ray.where["router"]["host"] == "id-a"
    group, index = ray.where["decode-1"]["bundle"]
    assert (group.name, index) == ("decode", 1)
    assert ray.asked == {"alpha": ["router", "prefill-0", "decode-0"], "beta": ["decode-1"]}
    assert ray.actors["decode-1"]["name"] == "decode-1"
    assert ray.actors["decode-1"]["secret"] == SECRET.hex()


def test_room_of_another_configuration_is_given_back() -> None:
    """An `up` that was killed early has left it; what is not ours stays."""
    ray = FakeRay()
    ray.groups = ["pair-0", "somebody-elses"]
    up(ray)
    assert ray.groups == ["somebody-elses", "prefill", "decode"]


def test_a_secret_in_files_is_not_sent() -> None:
    """Each host reads its own."""
    ray = FakeRay()
    up(ray, TEXT.replace("security: {", "security: {secret_file: s, "))
    assert {actor["secret"] for actor in ray.actors.values()} == {""}


def test_the_router_goes_where_labels_say() -> None:
    """A label that no host has is refused."""
    ray = FakeRay()
    wish = "ray: {router: {label_selector: {rack: '2'}}, "
    assert up(ray, TEXT.replace("ray: {", wish)).order.router_host == "10.0.0.2"
    wrong = TEXT.replace("ray: {", wish.replace("'2'", "'3'"))
    assert "none of the 2 hosts" in problems_of(FakeRay(), wrong)[0]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"problems": ["model.path: no folder"]}, "on beta (10.0.0.2): model.path: no folder"),
        ({"splitserve": "0.0.9"}, "on beta (10.0.0.2): splitserve 0.0.9 is installed, and"),
        ({"secret": "0123"}, "on beta (10.0.0.2): security.secret_file: it holds another"),
    ],
)
def test_what_a_host_lacks_names_the_host(facts: dict[str, Any], words: str) -> None:
    """And nothing is started."""
    ray = FakeRay()
    ray.facts["beta"] = facts
    (problem,) = problems_of(ray)
    assert problem.startswith(words)


@pytest.mark.parametrize(("ahead_s", "way"), [(30, "ahead of"), (-30, "behind")])
def test_a_clock_that_is_wrong_is_told(ahead_s: float, way: str) -> None:
    """As a warning: nothing that is decided depends on it."""
    ray, said = FakeRay(), list[str]()
    ray.facts["beta"] = {"unix_s": time.time() + ahead_s}
    up(ray, say=said.append)
    (line,) = said
    assert "on beta (10.0.0.2) the clock is" in line
    assert way in line


def test_too_little_room_is_refused_with_what_there_is() -> None:
    """At once where nobody could make room, else after ``placement_timeout_s``."""
    ray = FakeRay()
    assert "take 21 CPU" in problems_of(ray, TEXT.replace("replicas: 2", "replicas: 20"))[0]
    assert ray.groups == []
    ray.has_room = False
    assert "no room for prefill, decode within 0.05 s" in problems_of(ray)[0]


def test_what_runs_is_adopted_and_what_is_missing_added() -> None:
    """Also while it waits for a host; its run, port and secret are kept, and only the host that
    gets something new is asked.
    """
    ray = FakeRay()
    up(ray)
    del ray.actors["decode-1"]
    ray.asked.clear()
    before = dict(ray.actors)
    again = up(ray, secret=bytes(32), is_secret_given=False)
    assert again.is_adopted
    assert again.secret == SECRET
    assert ray.asked == {"beta": ["decode-1"]}
    assert {name: ray.actors[name] for name in before} == before
    assert "decode-1" in ray.actors
    assert ray.ended == []
    ray.has_room = False
    assert up(ray).is_adopted


def test_another_configuration_or_secret_is_refused() -> None:
    """With what differs, and the way out."""
    ray = FakeRay()
    up(ray)
    first, *found = problems_of(ray, TEXT.replace("path: m", "path: n"))
    assert "`splitserve down c`" in first
    assert found == ["model.path: 'm' runs, 'n' is in the YAML"]
    (problem,) = problems_of(ray, secret=bytes(32))
    assert "has another cluster secret" in problem


def test_a_host_that_cannot_be_asked_is_named() -> None:
    """Splitserve is not installed there, for example."""
    ray = FakeRay()
    ray.cannot_say["beta"] = StartError("beta (10.0.0.2): splitserve is not installed")
    assert problems_of(ray) == ["beta (10.0.0.2): splitserve is not installed"]


def test_actors_that_do_not_answer_are_not_taken_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Something of that name is there, and nobody knows what."""
    monkeypatch.setattr("splitserve.orchestrator.launch.ray.bring_up._TOLD_LIMIT_S", 0.01)
    ray = FakeRay()
    up(ray)
    ray.silent = True
    with pytest.raises(StartError, match="do not answer; `splitserve down`"):
        up(ray)


def test_a_router_whose_host_is_lost_moves_and_takes_the_nodes_along() -> None:
    """They are started again, for they know only the old address; also one that does not answer,
    since it starts again itself.
    """
    ray = FakeRay()
    lost = Order(
        name="router",
        run="run-0",
        config=source_text(parse(TEXT)),
        router_host="10.0.0.9",
        router_port=8123,
        secret=SECRET.hex(),
    )
    plain = msgspec.to_builtins(lost)
    ray.actors = {name: plain | {"name": name} for name in ("prefill-0", "decode-1")}
    ray.silent_names = {"decode-1"}
    brought = up(ray)
    assert brought.order.router_host == "10.0.0.1"
    assert brought.order.run == "run-0"
    assert sorted(ray.ended) == ["decode-1", "prefill-0"]
    assert {actor["router_host"] for actor in ray.actors.values()} == {"10.0.0.1"}

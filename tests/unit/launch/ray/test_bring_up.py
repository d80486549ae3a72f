"""How ``up`` brings a cluster up on a Ray cluster that is not there: it is played by a fake."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from support.fake_ray import SECRET, TEXT, FakeRay, up

from splitserve.orchestrator.config import ConfigError, parse
from splitserve.orchestrator.engines.transformers.findings import CodecQuality
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.quality_record import keep_record
from splitserve.orchestrator.launch.ray.order import Order, source_text

if TYPE_CHECKING:
    from pathlib import Path


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
    assert (brought.order.router_hosts, brought.order.router_port) == (("10.0.0.1",), 8123)
    assert ray.groups == {"prefill-0": "id-a", "decode-0": "id-b", "decode-1": "id-a"}
    assert sorted(ray.actors) == ["decode-0", "decode-1", "prefill-0", "router"]
    assert ray.where["router"]["host"] == "id-a"
    group, index = ray.where["decode-1"]["bundle"]
    assert (group.name, index) == ("decode-1", 0)
    assert ray.asked == {"alpha": ["router", "prefill-0", "decode-1"], "beta": ["decode-0"]}
    assert ray.actors["decode-1"]["name"] == "decode-1"
    assert ray.actors["decode-1"]["secret"] == SECRET.hex()


def test_room_of_another_configuration_is_given_back() -> None:
    """An `up` that was killed early has left it; what is not ours stays."""
    ray = FakeRay()
    ray.groups = {"pair-0": "", "somebody-elses": ""}
    before = set(ray.groups)
    up(ray)
    assert before & set(ray.groups) == {"somebody-elses"}
    assert len(ray.groups) > 2


def test_a_secret_in_files_is_not_sent() -> None:
    """Each host reads its own."""
    ray = FakeRay()
    up(ray, TEXT.replace("security: {", "security: {secret_file: s, "))
    assert {actor["secret"] for actor in ray.actors.values()} == {""}


def test_the_record_of_what_codecs_cost_is_sent(tmp_path: Path) -> None:
    """To every process; who brings missing ones up from a machine without the record hands on what
    the others have.
    """
    (tmp_path / "prose.txt").write_text("words")
    record = tmp_path / "quality.json"
    text = TEXT.replace("engine: mock\nmodel: {path: m}", "model: {path: owner/model}") + (
        f"cache: {{quality: {{text: {tmp_path}/prose.txt, record: {record}}}, tiers: "
        "[{type: cpu, capacity_bytes: 8 MiB}, {type: s3, url: 's3://b/p', codec: int8}]}\n"
        "prefill: {placement: {num_cpus: 1}}\n"
    )
    text = text.replace("decode: {", "decode: {placement: {num_cpus: 1}, ")
    text = text.replace("security: {", "security: {secret_file: s, ")
    keep_record(parse(text), [CodecQuality("int8", 0.001, 0.1, 0.99, 2.0, 100)])
    ray = FakeRay()
    up(ray, text)
    told = record.read_text()
    assert {actor["quality"] for actor in ray.actors.values()} == {told}
    record.unlink()
    del ray.actors["decode-0"]
    up(ray, text)
    assert ray.actors["decode-0"]["quality"] == told


def test_the_router_goes_where_labels_say() -> None:
    """A label that no host has is refused."""
    ray = FakeRay()
    wish = "ray: {router: {label_selector: {rack: '2'}}, "
    assert up(ray, TEXT.replace("ray: {", wish)).order.router_hosts == ("10.0.0.2",)
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
    assert ray.groups == {}
    ray.has_room = False
    assert "no room for prefill-0, decode-0, decode-1 within 0.05 s" in problems_of(ray)[0]


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
    assert ray.asked == {"alpha": ["decode-1"]}
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
    _, *found = problems_of(ray, TEXT.replace("replicas: 2", "replicas: 3"))
    assert found == [
        "decode.replicas: 2 runs, 3 is in the YAML; `splitserve scale decode 3` changes it"
    ]
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
        router_hosts=("10.0.0.9",),
        router_port=8123,
        secret=SECRET.hex(),
    )
    plain = msgspec.to_builtins(lost)
    ray.actors = {name: plain | {"name": name} for name in ("prefill-0", "decode-1")}
    ray.silent_names = {"decode-1"}
    brought = up(ray)
    assert brought.order.router_hosts == ("10.0.0.1",)
    assert brought.order.run == "run-0"
    assert sorted(ray.ended) == ["decode-1", "prefill-0"]
    assert {actor["router_hosts"] for actor in ray.actors.values()} == {("10.0.0.1",)}


TWO_ROUTERS = TEXT.replace("port: 0", "port: 0, replicas: 2")


def test_routers_go_to_different_hosts() -> None:
    """The first where one alone would; everybody knows both."""
    ray = FakeRay()
    brought = up(ray, TWO_ROUTERS)
    assert brought.order.router_hosts == ("10.0.0.1", "10.0.0.2")
    assert (ray.where["router"]["host"], ray.where["router-1"]["host"]) == ("id-a", "id-b")
    assert ray.actors["router-1"]["name"] == "router-1"
    assert ray.asked["beta"] == ["router-1", "decode-0"]
    assert {actor["router_hosts"] for actor in ray.actors.values()} == {("10.0.0.1", "10.0.0.2")}


def test_a_router_that_lost_its_host_keeps_its_address_while_another_serves() -> None:
    """Nodes that run would have to end to know another one."""
    ray, said = FakeRay(), list[str]()
    up(ray, TWO_ROUTERS)
    for name, plain in ray.actors.items():
        ray.actors[name] = {**plain, "router_hosts": ("10.0.0.1", "10.0.0.9")}
    del ray.actors["router-1"]
    brought = up(ray, TWO_ROUTERS, say=said.append)
    assert brought.order.router_hosts == ("10.0.0.1", "10.0.0.9")
    assert ray.ended == []
    assert "router-1" not in ray.actors
    assert brought.lost_routers == {"router-1"}
    assert any("router-1 is lost with its host 10.0.0.9" in line for line in said)

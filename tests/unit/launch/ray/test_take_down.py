"""How a cluster on Ray ends, on a Ray cluster that is played by a fake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.ray.placement import RayHost
from splitserve.orchestrator.launch.ray.ray_cluster import SilentActorError
from splitserve.orchestrator.launch.ray.take_down import take_down

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG = parse("launcher: ray\nengine: mock\nmodel: {path: m}\nsupervision: {stop_timeout_s: 1}")


class FakeRay:
    """Writes down what is ordered. ``silent`` actors have no host."""

    def __init__(self, *names: str, silent: Sequence[str] = ()) -> None:
        self.actors = {*names, "somebody-elses"}
        self.silent = silent
        self.groups = {"prefill", "pair-7", "not-ours"}
        self.stopped: list[str] = []
        self.swept: list[str] = []
        self.left: list[str] = []

    def names(self) -> list[str]:
        return sorted(self.actors)

    def hosts(self) -> list[RayHost]:
        return [RayHost(name, name, name, {}, {}) for name in ("a", "b")]

    def ask(self, name: str, method: str, *_: object, limit_s: float) -> Any:
        if name in self.silent:
            raise SilentActorError(name)
        if method == "stop":
            self.stopped.append(name)
            if name == "decode-0":
                self.actors.add("cache-aa")  # Brought by a node that came back meanwhile
        return {"run": "r"}

    def end(self, name: str) -> None:
        self.actors.discard(name)

    def group_names(self) -> list[str]:
        return sorted(self.groups)

    def release(self, name: str) -> bool:
        self.groups.remove(name)
        return True

    def wait_until_gone(self, names: Sequence[str], limit_s: float) -> list[str]:
        return sorted(set(names) & self.actors)

    def on_host(self, host: RayHost, _: object, *arguments: str, limit_s: float) -> list[str]:
        assert arguments == ("default", "r")
        self.swept.append(host.id)
        return self.left


def down(ray: FakeRay) -> bool:
    """One attempt."""
    return take_down(ray, CONFIG, drain_s=1.0, say=print)  # type: ignore[arg-type]


def test_the_router_stops_first_and_the_caches_last() -> None:
    """Actors that do not answer end all the same; what is not ours stays; every host is swept."""
    ray = FakeRay("router", "decode-0", "prefill-0", "cache-0f", silent=["prefill-0"])
    assert down(ray)
    assert ray.stopped == ["router", "decode-0", "cache-0f"]
    assert ray.actors == {"somebody-elses"}
    assert ray.groups == {"not-ours"}
    assert sorted(ray.swept) == ["a", "b"]


def test_what_does_not_end_is_named() -> None:
    """With its host, and what to do."""
    ray = FakeRay("router")
    ray.left = ["process 7"]
    with pytest.raises(StartError, match=r"process 7 on a.*run `splitserve down` again"):
        down(ray)


def test_nothing_is_no_error() -> None:
    """It has been taken down before."""
    ray = FakeRay()
    ray.groups = {"not-ours"}
    assert not down(ray)
    assert ray.swept == []

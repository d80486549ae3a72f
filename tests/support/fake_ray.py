"""A Ray cluster that is not there, and what `up` does with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.ray.bring_up import Brought, Wanted, bring_up
from splitserve.orchestrator.launch.ray.host_check import free_port, secret_mark
from splitserve.orchestrator.launch.ray.placement import RayHost
from splitserve.orchestrator.launch.ray.ray_cluster import SilentActorError
from splitserve.orchestrator.observe.own_version import own_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.launch.base import StartError
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
        self.groups: dict[str, str] = {}
        """To each the host where it was wished."""
        self.has_room = True
        self.learns = True
        """Nobody else has changed the size."""
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

    def group_names(self) -> list[str]:
        return [*self.groups, "a-group-of-somebody-else"]

    def reserve(self, group: Group, target: str = "", *, may_replace: bool = False) -> bool:
        is_new = group.name not in self.groups
        self.groups.setdefault(group.name, target)
        return is_new

    def release(self, name: str) -> bool:
        return self.groups.pop(name, None) is not None

    def hosts_of(self, group: Group) -> list[str] | None:
        if not self.has_room:
            return None
        wished = self.groups[group.name]
        return [wished] if wished else ["id-a", "id-b"][: len(group.nodes)]

    def start(self, name: str, plain: dict[str, Any], _: object, **where: Any) -> None:
        self.actors.setdefault(name, plain)
        self.where[name] = where

    def ask(self, name: str, method: str, *arguments: Any, limit_s: float) -> Any:
        if self.silent or name in self.silent_names:
            raise SilentActorError(name)
        if method == "learn":
            sizes, edition = arguments
            self.actors[name] = {**self.actors[name], "sizes": sizes, "edition": edition}
            return self.learns
        return self.actors[name] if method == "told" else {}

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

"""What ``doctor`` says of a Ray cluster, which is played by a fake."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError, parse
from splitserve.orchestrator.launch.checks.model import model
from splitserve.orchestrator.launch.checks.on_ray import on_ray
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.finding import Severity
from splitserve.orchestrator.launch.ray import ray_cluster
from splitserve.orchestrator.launch.ray.placement import RayHost

if TYPE_CHECKING:
    import pytest

TEXT = "launcher: ray\nengine: mock\nmodel: {path: m}\ndecode: {replicas: 3}\n"


def subject_of(text: str = TEXT) -> Subject:
    """Nothing of it runs here."""
    return Subject(parse(text), {}, here=frozenset())


def has_hosts(monkeypatch: pytest.MonkeyPatch, *hosts: RayHost) -> None:
    """A Ray cluster of these can be reached."""

    class Fake:
        def hosts(self) -> list[RayHost]:
            return list(hosts)

        def close(self) -> None:
            """Nothing is held."""

    monkeypatch.setattr(ray_cluster, "connect", lambda _: Fake())


def host(address: str, cpus: float = 4.0) -> RayHost:
    """A host of that address."""
    return RayHost(address, address, f"at-{address}", {"CPU": cpus}, {})


def test_other_launchers_do_not_need_it() -> None:
    """And nothing is asked."""
    finding = on_ray(subject_of("engine: mock\nmodel: {path: m}"))
    assert (finding.severity, finding.detail) == (Severity.OK, "not used")


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (problem,) = on_ray(subject_of()).problems
    assert "pip install 'splitserve[ray]'" in str(problem)


def test_a_ray_cluster_that_is_not_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason."""

    def nowhere(_: object) -> None:
        raise ConfigError(["ray.address: no Ray cluster"])

    monkeypatch.setattr(ray_cluster, "connect", nowhere)
    finding = on_ray(subject_of())
    assert finding.severity is Severity.FAIL
    assert finding.failures == ["ray.address: no Ray cluster"]


def test_room_and_protection_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room fails; a Ray cluster that others can reach without a token is a warning."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    has_hosts(monkeypatch, host("127.0.0.2"))
    assert on_ray(subject_of()).severity is Severity.OK
    has_hosts(monkeypatch, host("127.0.0.2", cpus=3.0))
    (failure,) = on_ray(subject_of()).failures
    assert "take 4 CPU" in failure
    has_hosts(monkeypatch, host("10.0.0.2"))
    finding = on_ray(subject_of())
    assert finding.severity is Severity.WARN
    assert "RAY_AUTH_MODE=token" in str(finding.problems[0])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert on_ray(subject_of()).severity is Severity.OK


def test_the_model_is_looked_for_on_the_hosts() -> None:
    """It need not be where `up` is called."""
    finding = model(subject_of("launcher: ray\nmodel: {path: /no/such/model}"))
    assert finding.severity is Severity.OK

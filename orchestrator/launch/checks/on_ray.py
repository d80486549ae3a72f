"""Whether the Ray cluster of ``launcher: ray`` is there, has room, and keeps strangers out."""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.launch.finding import Finding, told, warning
from splitserve.orchestrator.launch.ray.installed import require_ray
from splitserve.orchestrator.launch.ray.placement import obstacles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem
    from splitserve.orchestrator.launch.ray.placement import RayHost

TESTED_RAY = "2.60"


def on_ray(subject: Subject) -> Finding:
    """It can be reached from here, its hosts could hold the cluster, and it asks for a token."""
    check = "ray"
    if subject.config.launcher != "ray":
        return Finding(check, "not used")
    try:
        require_ray()
        from splitserve.orchestrator.launch.ray.ray_cluster import connect, version

        cluster = connect(subject.config)
    except ConfigError as error:
        return Finding(check, "no Ray cluster", told(error.problems))
    try:
        hosts = cluster.hosts()
    finally:
        cluster.close()
    problems = [*told(obstacles(subject.config, hosts)), *_strange(version()), *_open(hosts)]
    names = ", ".join(f"{host.hostname} ({host.address})" for host in hosts)
    return Finding(check, f"Ray {version()} with {len(hosts)} hosts: {names}", tuple(problems))


def _strange(found: str) -> Iterator[Problem]:
    if not found.startswith(f"{TESTED_RAY}."):
        yield warning(
            "launcher",
            f"Ray {found} is installed; splitserve is tested with {TESTED_RAY}",
            f"run `pip install 'ray=={TESTED_RAY}.*'` on every host",
        )


def _open(hosts: Sequence[RayHost]) -> Iterator[Problem]:
    """Whoever reaches Ray may run programs on its hosts, and read what actors are told."""
    is_local = all(ipaddress.ip_address(host.address).is_loopback for host in hosts)
    if is_local or os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return
    yield warning(
        "ray.address",
        "this Ray cluster asks nobody for a token: whoever reaches its ports can run programs on "
        "all hosts and read the cluster secret",
        "start Ray with RAY_AUTH_MODE=token, or keep its ports within a network of trusted hosts",
    )

"""Every check by its name, cheapest first, those that ask somebody else last.

The quick ones are what ``up`` makes before it starts anything: nothing is changed, no model is
loaded, and a check of this machine takes at most a second. The others measure, and only ``doctor``
makes them. The names are part of ``doctor --json`` and of ``docs/doctor.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.checks.autotune import autotune
from splitserve.orchestrator.launch.checks.cache import cache
from splitserve.orchestrator.launch.checks.certificates import certificates
from splitserve.orchestrator.launch.checks.configuration import (
    configuration,
    policy,
    roles,
    secrets,
)
from splitserve.orchestrator.launch.checks.engine_args import engine_args
from splitserve.orchestrator.launch.checks.fingerprints import fingerprints
from splitserve.orchestrator.launch.checks.folders import folders
from splitserve.orchestrator.launch.checks.limits import limits
from splitserve.orchestrator.launch.checks.memory import memory, shared_memory
from splitserve.orchestrator.launch.checks.model import chat_template, model
from splitserve.orchestrator.launch.checks.network import addresses, ports, proxies
from splitserve.orchestrator.launch.checks.on_ray import on_ray
from splitserve.orchestrator.launch.checks.processors import cpus, gpus, numa
from splitserve.orchestrator.launch.checks.software import rights, software
from splitserve.orchestrator.launch.checks.tiers import clocks, tiers
from splitserve.orchestrator.launch.checks.tracing import tracing
from splitserve.orchestrator.launch.checks.transport import transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Finding


@dataclass(frozen=True)
class Check:
    """One question about a cluster on this machine."""

    name: str
    find: Callable[[Subject], Finding]
    measures: bool = False
    """It moves bytes and takes seconds."""
    after: tuple[str, ...] = ()
    """Checks that must not have failed: their problems would only be told again."""


CHECKS = (
    Check("configuration", configuration),
    Check("roles", roles),
    Check("cpus", cpus),
    Check("gpus", gpus),
    Check("numa", numa),
    Check("memory", memory),
    Check("shared_memory", shared_memory),
    Check("limits", limits),
    Check("ports", ports),
    Check("proxies", proxies),
    Check("folders", folders),
    Check("model", model),
    Check("chat_template", chat_template),
    Check("software", software),
    Check("engine_args", engine_args),
    Check("fingerprints", fingerprints),
    Check("policy", policy),
    Check("autotune", autotune),
    Check("tracing", tracing),
    Check("secrets", secrets),
    Check("certificates", certificates),
    Check("rights", rights),
    Check("addresses", addresses),
    Check("cache", cache),
    Check("ray", on_ray, measures=True, after=("configuration",)),
    Check(
        "transport",
        transport,
        measures=True,
        after=("configuration", "cpus", "software", "rights", "addresses", "ports"),
    ),
    Check("tiers", tiers, measures=True),
    Check("clocks", clocks, measures=True),
)

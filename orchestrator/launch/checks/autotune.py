"""What ``policy.autotune`` needs before anything is started: a profile of this cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.finding import Finding, told
from splitserve.orchestrator.tuner.matching import mismatch
from splitserve.orchestrator.tuner.profile import ProfileError, parse_profile

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.checks.subject import Subject

_KEY = "policy.autotune.profile"


def autotune(subject: Subject) -> Finding:
    """The profile can be read and is of this cluster."""
    check, asked_for = "autotune", subject.config.policy.autotune
    if asked_for.mode == "off" or not subject.has_router:
        return Finding(check, "off")
    problem = _problem(subject.config)
    detail = f"{asked_for.mode}, by {asked_for.profile}"
    return Finding(check, detail, told([problem] if problem else []))


def _problem(config: ClusterConfig) -> str:
    path = Path(config.policy.autotune.profile or "")
    try:
        profile = parse_profile(path.read_bytes(), str(path))
    except OSError as error:
        return (
            f"{_KEY}: {path} cannot be read ({error.strerror}); start the cluster with "
            f"policy.autotune.mode off, measure it with `splitserve profile {config.name}`, and "
            "start it again"
        )
    except ProfileError as error:
        return f"{_KEY}: {error}"
    wrong = mismatch(profile, config)
    return f"{_KEY}: {path} is not a profile of this cluster: {wrong}" if wrong else ""

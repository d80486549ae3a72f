"""What ``policy.autotune`` needs before anything is started: a profile of this cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.finding import Finding
from splitserve.orchestrator.tuner.matching import mismatch
from splitserve.orchestrator.tuner.profile import ProfileError, parse_profile

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig

_KEY = "policy.autotune.profile"


def autotune_finding(config: ClusterConfig) -> Finding:
    """Whether the profile can be read and is of this cluster; the configuration's paths are filled
    in.
    """
    check, autotune = "autotune", config.policy.autotune
    if autotune.mode == "off":
        return Finding(check, "off")
    detail = f"{autotune.mode}, by {autotune.profile}"
    problem = _problem(config)
    return Finding(check, detail, (problem,) if problem else ())


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

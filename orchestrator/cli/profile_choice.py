"""Which profile ``tune`` and ``simulate`` take: a file that is named, or the cluster's last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from splitserve.orchestrator.cli.errors import RefusedError
from splitserve.orchestrator.launch.files import ClusterFiles
from splitserve.orchestrator.tuner.matching import foreign_hardware, foreign_node, mismatch
from splitserve.orchestrator.tuner.profile import Profile, ProfileError, parse_profile

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.config import ClusterConfig

Nodes = Mapping[str, Mapping[str, Any]]
"""The router's status of each node, by name."""


def chosen_profile(path: Path | None, config: ClusterConfig, running: Nodes) -> Profile:
    """The profile at ``path``, or the cluster's own. Raises ``RefusedError`` when it is of another
    cluster than that YAML, or those running nodes.
    """
    own = ClusterFiles(config.name).profile_path
    if path is None and not own.is_file():
        raise RefusedError(
            f"there is no profile of {config.name} ({own}); measure one on the running cluster "
            f"with `splitserve profile {config.name}`, or give --profile FILE"
        )
    chosen = path or own
    profile = profile_at(chosen)
    wrong = mismatch(profile, config) or foreign_node(profile, running)
    if wrong:
        raise RefusedError(f"{chosen} is not a profile of {config.name}: {wrong}")
    if hardware := foreign_hardware(profile, running):
        click.echo(f"warning: {chosen} was {hardware}; measure again to be sure", err=True)
    return profile


def profile_at(path: Path) -> Profile:
    """The profile in that file. Raises ``RefusedError`` when it holds none."""
    try:
        return parse_profile(path.read_bytes(), str(path))
    except ProfileError as error:
        raise RefusedError(str(error)) from error

"""From a YAML to everything a launcher needs, and what of it may be shown."""

from __future__ import annotations

import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from splitserve.orchestrator.config import (
    ConfigError,
    load,
    nodes,
    secret_for,
)
from splitserve.orchestrator.config.cache_checks import shown_url
from splitserve.orchestrator.config.credentials import SECRET_NAMES
from splitserve.orchestrator.engines.command import engine_command
from splitserve.orchestrator.launch.checks.model import model_of
from splitserve.orchestrator.launch.files import ClusterFiles
from splitserve.orchestrator.launch.paths import with_cache_paths, with_log_dir, with_profile_path
from splitserve.orchestrator.launch.ports import with_ports
from splitserve.orchestrator.launch.preflight import preflight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.orchestrator.config import ClusterConfig

HIDDEN = "(hidden)"


@dataclass(frozen=True)
class Plan:
    """A cluster that has passed every check and can be started."""

    source: str
    config: ClusterConfig
    """With every port and the folder of the logs filled in."""
    model: str
    """Folder or Hub id for the engines."""
    run: str
    """Marker of this run."""
    secret: bytes


def plan(source: str, environ: Mapping[str, str]) -> Plan:
    """What ``up SOURCE`` would start. Raises ``ConfigError`` with everything that is wrong, or
    ``RunningClusterError`` where that cluster itself is in the way; nothing has been started.
    """
    config = load(source)
    if config.launcher == "ray":
        return _on_ray(source, config, environ)
    config = with_profile_path(with_cache_paths(config))
    try:
        preflight(config, environ)
    except ConfigError as error:
        # Its own ports would be found in use
        ClusterFiles(config.name).refuse_running()
        raise ConfigError(error.problems, source) from error
    config = with_log_dir(with_ports(config))
    return Plan(source, config, model_of(config), secrets.token_hex(8), secret_for(config, environ))


def _on_ray(source: str, config: ClusterConfig, environ: Mapping[str, str]) -> Plan:
    """The hosts have the checks to pass, ports and folders are found there; here a folder of the
    model that is named from where ``up`` was called gets its whole path.
    """
    folder = Path(config.model.path).expanduser()
    if config.engine != "mock" and folder.is_dir():
        model = config.model.model_copy(
            update={"path": str(folder.absolute()), "served_name": config.model.name}
        )
        config = config.model_copy(update={"model": model})
    try:
        secret = secret_for(config, environ)
    except ConfigError as error:
        raise ConfigError(error.problems, source) from error
    return Plan(source, config, config.model.path, secrets.token_hex(8), secret)


def shown_config(config: ClusterConfig) -> str:
    """The resolved configuration as YAML; values of variables with telling names are hidden, and
    user names and passwords in URLs.
    """
    data: dict[str, Any] = config.model_dump(exclude_none=True)
    for tier in data.get("cache", {}).get("tiers", ()):
        if "url" in tier:
            tier["url"] = shown_url(tier["url"])
    for pool in ("prefill", "decode"):
        data[pool]["env"] = shown_env(data[pool]["env"])
    text: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
    return text


def shown_commands(plan: Plan) -> dict[str, str]:
    """The command line of each node's engine, with the variables it gets; without secrets."""
    shown = {}
    for node in nodes(plan.config):
        command = engine_command(plan.config, node, plan.model, f"{node.name}-INCARNATION")
        variables = [
            f"{name}={shlex.quote(value)}" for name, value in shown_env(command.env).items()
        ]
        pin = [f"taskset -c {','.join(map(str, node.cpus))}"] if node.cpus else []
        shown[node.name] = " ".join([*variables, *pin, shlex.join(command.argv)])
    return shown


def shown_env(env: dict[str, str]) -> dict[str, str]:
    """``env`` with secret-looking values hidden."""
    return {name: HIDDEN if SECRET_NAMES.search(name) else value for name, value in env.items()}

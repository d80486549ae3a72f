"""What a host of the Ray cluster is asked before anything of the cluster starts there: the checks
that ``splitserve node`` would make, its versions, its clock and its secret. Run there by Ray.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import ray

from splitserve.kv_transfer.channel import SECRET_FILE_ENV, mac
from splitserve.orchestrator.agent.processes import marked
from splitserve.orchestrator.config import SECRET_ENV, ConfigError, for_router, shared_secret
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.children import sweep
from splitserve.orchestrator.launch.paths import (
    with_cache_paths,
    with_log_dir,
    with_profile_path,
)
from splitserve.orchestrator.launch.ports import free_run
from splitserve.orchestrator.launch.preflight import findings
from splitserve.orchestrator.launch.ray.host_process import host_folder
from splitserve.orchestrator.launch.ray.order import (
    ROUTER,
    Order,
    hosted,
    order_of,
    router_names,
)
from splitserve.orchestrator.observe.own_version import own_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.orchestrator.config import ClusterConfig

_SECRET_MARK = "host of a Ray cluster"


def check_host(plain: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What this host says of itself, and what keeps ``names`` (nodes and routers) from running
    here.
    """
    order = order_of(plain)
    facts = {
        "host": socket.gethostname(),
        "splitserve": own_version(),
        "ray": ray.__version__,
        "unix_s": time.time(),
        "secret": "",
        "problems": list[str](),
    }
    try:
        config = hosted(order, ray.util.get_node_ip_address())
        environ = _environ(order)
        facts["secret"] = secret_mark(shared_secret(config, environ))
        facts["problems"] = list(_problems(config, environ, names))
    except ConfigError as error:
        facts["problems"] = error.problems
    return facts


def free_port() -> int:
    """A port that is free on this host's address now."""
    return free_run([ray.util.get_node_ip_address()])


def secret_mark(secret: bytes) -> str:
    """What tells two secrets apart and neither of them."""
    return mac(secret, _SECRET_MARK)[:8].hex()


def sweep_host(cluster: str, run: str) -> list[str]:
    """No process of ``run`` is left on this host, and no secret of the cluster on its disk; returns
    the processes that do not end.
    """
    sweep(run)
    for path in host_folder(cluster).rglob("*.secret"):
        path.unlink(missing_ok=True)
    return [str(process) for process in marked(run)]


def _environ(order: Order) -> dict[str, str]:
    environ = {**os.environ, **order.router_environment, **order.cache_environment}
    if order.secret:
        environ.pop(SECRET_FILE_ENV, None)
        environ[SECRET_ENV] = order.secret
    return environ


def _problems(config: ClusterConfig, environ: dict[str, str], names: list[str]) -> Iterable[str]:
    filled = with_log_dir(with_profile_path(with_cache_paths(config)))
    routers = router_names(config.router.replicas)
    here = [n for n in names if n not in routers]
    subjects = [Subject(filled, environ, here=frozenset(here))] if here else []
    for name in (name for name in names if name in routers):
        own = for_router(filled, routers.index(name))
        subjects.append(Subject(own, environ, here=frozenset({ROUTER})))
    found = [
        problem for s in subjects for finding, _ in findings(s) for problem in finding.failures
    ]
    return dict.fromkeys(found)

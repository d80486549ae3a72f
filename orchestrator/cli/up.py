"""``splitserve up``, ``down`` and ``status``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitserve.kv_transfer.cache.settings import CacheSettings
from splitserve.kv_transfer.cache.socket_path import is_listening
from splitserve.orchestrator.agent.status_file import NodeStatus, read_status
from splitserve.orchestrator.cli.audit import show_audit
from splitserve.orchestrator.cli.background import start_in_background
from splitserve.orchestrator.cli.display import owed_in_words, role_of, stage_of
from splitserve.orchestrator.cli.entry import EXIT_INTERRUPTED
from splitserve.orchestrator.cli.errors import EXIT_NOT_RUNNING
from splitserve.orchestrator.cli.far_nodes import seen_by_router
from splitserve.orchestrator.cli.on_ray import down_on_ray
from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError
from splitserve.orchestrator.cli.running import run_cluster
from splitserve.orchestrator.config import load, load_resolved
from splitserve.orchestrator.config.flips import flip_obstacle
from splitserve.orchestrator.launch.children import sweep
from splitserve.orchestrator.launch.files import ClusterFiles, known_clusters
from splitserve.orchestrator.launch.plan import Plan, plan, shown_commands, shown_config
from splitserve.orchestrator.launch.quality_gate import hold_quality
from splitserve.orchestrator.launch.ray.placement import described

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.files import ClusterRecord

_POLL_S = 0.2
_ROUTER_TIMEOUT_S = 2.0
_DOWN_MARGIN_S = 30.0
_DOWN_DEFAULT_S = 90.0


@click.command()
@click.argument("config", default="quickstart")
@click.option("--dry-run", is_flag=True, help="Check, print what would be started, start nothing.")
@click.option("--detach", is_flag=True, help="Return when the cluster serves; it keeps running.")
def up(config: str, dry_run: bool, detach: bool) -> None:
    """Bring up the cluster of CONFIG, a YAML file or a built-in name, and keep it up until
    Ctrl-C.
    """
    prepared = plan(config, os.environ)
    if dry_run:
        _show(prepared)
        return
    if detach and prepared.config.launcher == "ray":
        hold_quality(prepared.config, prepared.source, click.echo)
        name = prepared.config.name
        if not asyncio.run(run_cluster(prepared, Console(markup=False), leaves=True)):
            click.echo(f"{name} has been stopped")
            raise click.exceptions.Exit(EXIT_INTERRUPTED)
        click.echo(f"{name} serves; `splitserve down {name}` stops it")
        return
    if detach:
        start_in_background(prepared)
        return
    hold_quality(prepared.config, prepared.source, click.echo)
    asyncio.run(run_cluster(prepared, Console(markup=False)))
    click.echo(f"{prepared.config.name} has been stopped")


@click.command()
@click.argument("name", required=False)
def down(name: str | None) -> None:
    """Stop the cluster NAME (default: the only one that runs), also what is left of one whose `up`
    was killed. NAME may be its YAML: on a Ray cluster it is found from any host.
    """
    if name is not None and name.endswith((".yaml", ".yml")):
        config = load(name)
        name = config.name
        if config.launcher == "ray" and not ClusterFiles(name).is_held():
            down_on_ray(ClusterFiles(name), config)
            return
    files = chosen_cluster(name)
    record = files.record()
    if record is not None and record.launcher == "ray" and not files.is_held():
        down_on_ray(files, load_resolved(files.config_path))
        return
    if record is None or not files.is_running():
        if record is not None:
            sweep(record.run)
            files.remove_record()
            click.echo(f"{files.name} was not running; removed what was left of it")
            return
        raise click.exceptions.Exit(not_running(files.name))
    _say_what_is_waited_for(files, record)
    os.kill(record.pid, signal.SIGTERM)
    if not _wait_until_stopped(files, _stop_limit_s(files)):
        click.echo(f"{files.name} does not stop; killing it", err=True)
        os.kill(record.pid, signal.SIGKILL)
        _wait_until_stopped(files, _DOWN_MARGIN_S)
    if record.launcher == "ray" and files.record() is not None:
        down_on_ray(files, load_resolved(files.config_path))
        return
    sweep(record.run)
    if record.launcher == "none":
        click.echo(f"the router of {files.name} has been stopped; its nodes run on, each by itself")
        return
    files.remove_record()
    click.echo(f"{files.name} has been stopped")


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--audit", is_flag=True, help="Compare what the engines hold with what the router "
    "believes; exit status 4 when anything differs.")  # fmt: skip
def status(name: str | None, as_json: bool, audit: bool) -> None:
    """Show the clusters of this user: endpoints, nodes, load. Exit status 3 when none runs."""
    if audit:
        files = chosen_cluster(name)
        record = files.record()
        if record is None or not files.is_running():
            raise click.exceptions.Exit(not_running(files.name))
        show_audit(files, record, as_json=as_json)
        return
    clusters = [ClusterFiles(name)] if name else known_clusters()
    found = [_facts(files, record) for files in clusters if (record := files.record()) is not None]
    if as_json:
        click.echo(json.dumps({"clusters": found}, indent=1))
    elif not found:
        click.echo(
            f"no cluster{f' named {name!r}' if name else ''} is running; start one with "
            "`splitserve up`"
        )
    else:
        for facts in found:
            _print_cluster(facts)
    if not any(facts["running"] for facts in found):
        raise click.exceptions.Exit(EXIT_NOT_RUNNING)


def _show(prepared: Plan) -> None:
    click.echo(f"# {prepared.source}, resolved")
    click.echo(shown_config(prepared.config))
    if prepared.config.launcher == "ray":
        click.echo("# on the Ray cluster, whose hosts have not been asked:")
        for line in described(prepared.config):
            click.echo(f"#   {line}")
        return
    for name, command in shown_commands(prepared).items():
        click.echo(f"# {name}:\n#   {command}")
    click.echo(f"# roles: {roles_in_words(flip_obstacle(prepared.config))}")


def chosen_cluster(name: str | None) -> ClusterFiles:
    """The cluster NAME, or the only one there is."""
    if name is not None:
        return ClusterFiles(name)
    clusters = known_clusters()
    if len(clusters) == 1:
        return clusters[0]
    if not clusters:
        raise click.exceptions.Exit(not_running(None))
    names = ", ".join(files.name for files in clusters)
    raise click.UsageError(f"several clusters are known ({names}); name one")


def not_running(name: str | None) -> int:
    """Say so; returns the exit status."""
    click.echo(f"no cluster{f' named {name!r}' if name else ''} is running", err=True)
    return EXIT_NOT_RUNNING


def _say_what_is_waited_for(files: ClusterFiles, record: ClusterRecord) -> None:
    """One line when requests are to finish first; none while the cluster does not serve."""
    if record.phase != "serving":
        return
    told = [status["requests"] for status in _router_statuses(files, record).values() if status]
    if count := sum(requests["running"] + requests["waiting"] for requests in told):
        limits = _supervision(files)
        bound = f", at most {limits['drain_timeout_s']:g} s" if limits else ""
        click.echo(f"waits for {count} request{'s' if count > 1 else ''} to finish{bound}")


def _stop_limit_s(files: ClusterFiles) -> float:
    """What `up` may take: drain, engine stop, margins."""
    limits = _supervision(files)
    if limits is None:
        return _DOWN_DEFAULT_S
    return limits["drain_timeout_s"] + limits["stop_timeout_s"] + _DOWN_MARGIN_S


def _supervision(files: ClusterFiles) -> dict[str, float] | None:
    """Of the resolved configuration; None where that cannot be read: a cluster is stopped all the
    same.
    """
    try:
        found = json.loads(files.config_path.read_bytes())["supervision"]
        return {key: float(found[key]) for key in ("drain_timeout_s", "stop_timeout_s")}
    except (OSError, ValueError, KeyError):
        return None


def _wait_until_stopped(files: ClusterFiles, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while files.is_held():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _facts(files: ClusterFiles, record: ClusterRecord) -> dict[str, Any]:
    running = is_alive(files, record)
    routers = _router_statuses(files, record) if running else {}
    router = next((status for status in routers.values() if status), {})
    if record.launcher == "ray" and not router:
        running = False
    names = _names(record, router) if running else ()
    nodes = [_node_status(files, record, router, name) for name in names]
    return {
        "name": record.name,
        "running": running,
        "phase": record.phase if running else _phase_of_silence(record),
        "url": f"{record.url}/v1",
        "routers": [
            {"url": f"{url}/v1", "answers": bool(status), **status.get("requests", {})}
            for url, status in routers.items()
        ],
        "pid": record.pid,
        "source": record.source,
        "uptime_s": round(time.time() - record.started, 1),
        "log_dir": record.log_dir,
        "cache": _cache_state(files) if running else "",
        "autotune": router.get("autotune"),
        "flip_obstacle": next((n.flip_obstacle for n in nodes if n and n.flip_obstacle), ""),
        "nodes": [
            msgspec.to_builtins(node) | {"owed": _owed(router, node.node)}
            for node in nodes
            if node is not None
        ],
    }


def is_alive(files: ClusterFiles, record: ClusterRecord) -> bool:
    """Whether the cluster has not been stopped, as far as this machine knows."""
    return files.is_running() and (record.launcher == "ray" or psutil.pid_exists(record.pid))


def _phase_of_silence(record: ClusterRecord) -> str:
    if record.launcher == "ray":
        return "the router does not answer"
    return "ended without stopping"


def _names(record: ClusterRecord, router: dict[str, Any]) -> list[str]:
    """The nodes that this machine was told of, and on Ray those that the router has heard of since
    another machine has scaled the cluster.
    """
    heard = {*router.get("nodes", ()), *router.get("loading", ())}
    more = heard - set(record.nodes) if record.launcher == "ray" else ()
    return [*record.nodes, *sorted(more)]


def _node_status(
    files: ClusterFiles, record: ClusterRecord, router: dict[str, Any], name: str
) -> NodeStatus | None:
    if record.launcher != "local":
        return seen_by_router(router, name)
    return read_status(files.run_dir, name)


def _router_statuses(files: ClusterFiles, record: ClusterRecord) -> dict[str, dict[str, Any]]:
    """What only the routers know, by their URLs; empty for one that does not answer."""
    found = {}
    for one in record.routers:
        try:
            found[one.url] = RouterClient(files, one).status(_ROUTER_TIMEOUT_S)
        except RouterSilentError:
            found[one.url] = {}
    return found


def _owed(router: dict[str, Any], name: str) -> dict[str, int] | None:
    """What a node that has changed its role still owes of the old one."""
    node = router.get("nodes", {}).get(name)
    owed: dict[str, int] | None = node["owed"] if node and node["is_flipping"] else None
    return owed


def roles_in_words(obstacle: str) -> str:
    """Whether nodes may change them."""
    if obstacle:
        return f"fixed: {obstacle}"
    return "nodes may change them with `splitserve flip NODE prefill|decode`"


def autotune_in_words(told: dict[str, Any]) -> str:
    """What the router said last about the ratio of its nodes."""
    latest = told["decisions"][0] if told["decisions"] else None
    why = latest["why"] if latest else "has decided nothing yet"
    advises = "advises: " if latest and latest["node"] and told["mode"] == "advise" else ""
    return f"{told['mode']}; {advises}{why}"


def _cache_state(files: ClusterFiles) -> str:
    """Whether the cache server takes connections; empty for a cluster without a cache."""
    try:
        settings = msgspec.json.decode(files.cache_settings_path.read_bytes(), type=CacheSettings)
    except (FileNotFoundError, msgspec.DecodeError):
        return ""
    return "ready" if is_listening(settings.socket_path) else "does not answer"


def _print_cluster(facts: dict[str, Any]) -> None:
    console = Console(markup=False)
    about = f"  {facts['phase']}  {facts['url']}  (pid {facts['pid']}, from {facts['source']})"
    console.print(Text.assemble((facts["name"], "bold"), about), soft_wrap=True)
    if not facts["running"]:
        console.print(f"`splitserve down {facts['name']}` removes what is left", highlight=False)
        return
    table = Table()
    for column in ("node", "role", "state", "running", "waiting", "KV blocks used", "restarts"):
        table.add_column(column)
    for node in facts["nodes"]:
        used = node["total_blocks"] - node["free_blocks"]
        status = msgspec.convert(node, type=NodeStatus)
        state = stage_of(status)
        blocks = f"{used} of {node['total_blocks']}"
        if node["quarantined_blocks"]:
            blocks += f" ({node['quarantined_blocks']} quarantined)"
        numbers = [str(node["running"]), str(node["waiting"]), blocks, str(node["restarts"])]
        table.add_row(node["node"], role_of(status), state, *numbers)
    console.print(table)
    for router in facts["routers"] if len(facts["routers"]) > 1 else ():
        state = "does not answer"
        if router["answers"]:
            state = f"{router['running']} requests running, {router['waiting']} waiting"
        console.print(f"router {router['url']}: {state}", highlight=False, soft_wrap=True)
    for node in facts["nodes"]:
        if node["owed"]:
            line = f"{node['node']} still owes {owed_in_words(node['owed'])} of its old role"
            console.print(line, highlight=False, soft_wrap=True)
    if facts["nodes"]:
        roles = roles_in_words(facts["flip_obstacle"])
        console.print(f"roles: {roles}", highlight=False, soft_wrap=True)
    if facts["autotune"]:
        line = autotune_in_words(facts["autotune"])
        console.print(f"autotune: {line}", highlight=False, soft_wrap=True)
    if facts["cache"]:
        state = facts["cache"]
        more = "; `splitserve cache stat` says more" if state == "ready" else ""
        if not more:
            more = f": the nodes compute everything; its log is {facts['log_dir']}/cache.log"
        console.print(f"cache: {state}{more}", highlight=False, soft_wrap=True)

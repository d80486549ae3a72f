"""``splitserve trace``: where one request's time went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from splitserve.orchestrator.cli.errors import EXIT_FAILED
from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError
from splitserve.orchestrator.cli.running_nodes import name_of
from splitserve.orchestrator.cli.up import chosen_cluster
from splitserve.orchestrator.cli.waterfall import waterfall

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

ROUTER_LOG = "router.log"
MORE_ROUTER_LOGS = "router-*.log"
"""Of the other routers, where there are several."""


class UnknownRequestError(click.ClickException):
    """Nobody knows the request; the message says where it was looked for."""

    exit_code = EXIT_FAILED


@click.command()
@click.argument("request_id")
@click.argument("cluster", required=False)
@click.option("--json", "as_json", is_flag=True, help="The record itself.")
def trace(request_id: str, cluster: str | None, as_json: bool) -> None:
    """Show where the time of a request went. REQUEST_ID is its `x-request-id`, as the client sent
    it or as it stands in the answer's headers; CLUSTER a name, or the YAML it was started from
    (default: the only one that runs).

    Of several requests with that id the latest is shown. The router keeps the latest requests;
    older ones are looked for in its log, also when the cluster has ended.
    """
    files = chosen_cluster(name_of(cluster))
    found = files.record()
    record, where = None, ""
    if found is not None and files.is_running():
        record, where = _asked(files, found, request_id)
    if record is None:
        log_dir = _log_dir(files, found)
        record, source = logged(log_dir, request_id)
        if record is None:
            raise UnknownRequestError(_unknown(request_id, files, where, log_dir))
        where = f"from {source}"
    if as_json:
        click.echo(json.dumps(record, indent=1))
        return
    console = Console(highlight=False, markup=False)
    console.print(waterfall(record, console.width), soft_wrap=True)
    if where:
        console.print(f"({where})", style="dim", soft_wrap=True)


def _log_dir(files: ClusterFiles, record: ClusterRecord | None) -> Path:
    """Of the run, or of the last one that is known."""
    if record is not None:
        return Path(record.log_dir)
    try:
        return Path(json.loads(files.config_path.read_bytes())["observability"]["log_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return files.log_dir


def logged(log_dir: Path, request_id: str) -> tuple[dict[str, Any] | None, Path | None]:
    """The latest line of a request in a router's log, and the file it stands in."""
    # Other processes' lines are never taken for a router's
    logs = [log_dir / ROUTER_LOG, *sorted(log_dir.glob(MORE_ROUTER_LOGS))]
    for path in (*logs, *(log.with_name(f"{log.name}.1") for log in logs)):
        record = _last_line(path, request_id)
        if record is not None:
            return record, path
    return None, None


def _last_line(path: Path, request_id: str) -> dict[str, Any] | None:
    """The last line of the request by the client's id, else by the router's own."""
    needle = json.dumps(request_id, ensure_ascii=False).encode()
    found: dict[str, Any] | None = None
    try:
        with path.open("rb") as lines:
            for line in lines:
                if needle not in line or not line.startswith(b"{"):
                    continue
                record = _record(line)
                if record is None or request_id not in (record.get("request_id"), record.get("id")):
                    continue
                if found is None or record.get("request_id") == request_id:
                    found = record
    except FileNotFoundError:
        return None
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    """A request's record; None for any other line, and for one that was cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.get("event") == "request" else None


def _asked(
    files: ClusterFiles, record: ClusterRecord, request_id: str
) -> tuple[dict[str, Any] | None, str]:
    """A router's record, or why there is none: only the one that served it can have it."""
    why = ""
    for one in record.routers:
        try:
            timeline = RouterClient(files, one).timeline(request_id)
        except (RouterSilentError, OSError) as error:
            why = str(error)
            continue
        if timeline:
            return timeline, ""
    return None, why or "the router does not keep it (any more)"


def _unknown(request_id: str, files: ClusterFiles, why: str, log_dir: Path) -> str:
    router = why or f"no cluster named {files.name!r} is running"
    return (
        f"no request {request_id!r} is known: {router}, and {log_dir / ROUTER_LOG} and its "
        "predecessor have no line of it. A request is known when it has ended; lines are written "
        "unless `observability.log_level` is warning or error"
    )

"""``splitserve up --detach``: the same ``up`` in a session of its own, shown until it serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING

import click

from splitserve.orchestrator.cli.entry import EXIT_INTERRUPTED
from splitserve.orchestrator.cli.running import SERVING_LINE
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.files import ClusterFiles

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.files import ClusterRecord
    from splitserve.orchestrator.launch.plan import Plan

_POLL_S = 0.2
_END_S = 10.0
"""For an `up` that has not started anything yet to end."""
_LOG_LINES = 15


def start_in_background(prepared: Plan) -> None:
    """The cluster serves, and what its `up` printed meanwhile has been printed here.

    Raises ``StartError`` when it ends before. Ctrl-C ends this command with status 130: a cluster
    that is being started goes on, and of one that is not yet nothing is left.
    """
    files = ClusterFiles(prepared.config.name)
    files.lock().close()
    log_path = files.log_dir / "up.log"
    command = [sys.executable, "-m", "splitserve.orchestrator.cli.main", "up", prepared.source]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        with log_path.open(encoding="utf-8", errors="replace") as shown:
            record = _show_until_serving(files, process, shown)
    except KeyboardInterrupt:
        _let_go(files, process)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    if record is None:
        text = log_path.read_text(errors="replace")
        lines = tuple(text.splitlines()[-_LOG_LINES:])
        raise StartError(f"it did not start; its log is {log_path}", lines)
    click.echo(f"{record.name} serves on {record.url}/v1; `splitserve down {record.name}` stops it")


def _show_until_serving(
    files: ClusterFiles, process: subprocess.Popen[bytes], log: IO[str]
) -> ClusterRecord | None:
    """The record of the cluster that serves, None when `up` has ended. It ends by itself when its
    engines are not ready in time, so this does, too.
    """
    rest = ""
    while process.poll() is None:
        record = _record_of(files, process)
        serves = record is not None and record.phase == "serving"
        # Read after the record: what was printed before it served is in the log by now
        *lines, rest = (rest + log.read()).split("\n")
        for line in lines:
            if line != SERVING_LINE:
                click.echo(line)
        if serves:
            return record
        time.sleep(_POLL_S)
    return None


def _let_go(files: ClusterFiles, process: subprocess.Popen[bytes]) -> None:
    """Say what becomes of the cluster."""
    name = files.name
    if _record_of(files, process) is not None:
        click.echo(
            f"\n{name} goes on in the background; `splitserve status {name}` shows how far it is, "
            f"`splitserve down {name}` stops it",
            err=True,
        )
        return
    # `down` would not find it yet
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    click.echo(f"\n{name} has not been started", err=True)


def _record_of(files: ClusterFiles, process: subprocess.Popen[bytes]) -> ClusterRecord | None:
    """What that `up` has written; None while there is nothing of it."""
    record = files.record()
    return record if record is not None and record.pid == process.pid else None

"""``splitserve top``: a running cluster, live in the terminal."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.live import Live

from splitserve.orchestrator.cli.errors import EXIT_FAILED
from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError
from splitserve.orchestrator.cli.running_nodes import name_of
from splitserve.orchestrator.cli.top_frame import Cluster, Size, absence, frame
from splitserve.orchestrator.cli.up import chosen_cluster, not_running

if TYPE_CHECKING:
    from rich.text import Text

    from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord

ANSWER_LIMIT_S = 5.0


@click.command()
@click.argument("cluster", required=False)
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.2, max=60),
    default=1.0,
    show_default=True,
    help="Seconds between frames.",
)
def top(cluster: str | None, once: bool, interval_s: float) -> None:
    """Show the running cluster CLUSTER (a name, or the YAML it was started from; default: the only
    one that runs): its nodes, load, rates, times to the first token and latest requests, until
    Ctrl-C.

    Without a terminal one frame is printed.
    """
    files = chosen_cluster(name_of(cluster))
    found = files.record()
    if found is None or not files.is_running():
        raise click.exceptions.Exit(not_running(files.name))
    console = Console(highlight=False, markup=False)
    view = View(files, found)
    try:
        if once or not console.is_terminal:
            console.print(view.look(Size(console.width)), soft_wrap=True)
        else:
            view.follow(console, interval_s)
    finally:
        view.close()
    if not view.is_answered:
        raise click.exceptions.Exit(EXIT_FAILED)


class View:
    """Looks at one cluster again and again, also after its router or all of it was started
    anew.
    """

    def __init__(self, files: ClusterFiles, record: ClusterRecord) -> None:
        self._files = files
        self._record = record
        self._router = RouterClient(files, record, keep_alive=True)
        self._silent_since: float | None = None
        self.is_answered = False
        """The last look was answered."""

    def follow(self, console: Console, interval_s: float) -> None:
        """Frame after frame, until Ctrl-C or SIGTERM; either leaves the terminal as it was."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    began = time.monotonic()
                    live.update(self.look(Size(console.width, console.height)), refresh=True)
                    time.sleep(max(0.0, began + interval_s - time.monotonic()))
        except KeyboardInterrupt:
            self.is_answered = True  # Nobody asks for the last look's success

    def look(self, size: Size) -> Text:
        """One frame, of the status or of its absence."""
        self._find_again()
        cluster = Cluster(
            self._record.name, self._record.url, self._record.phase, self._record.started
        )
        try:
            status = self._router.status(ANSWER_LIMIT_S)
        except (RouterSilentError, OSError) as error:
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            self.is_answered = False
            return absence(cluster, self._why(error), now - self._silent_since, size)
        self._silent_since = None
        self.is_answered = True
        return frame(cluster, status, time.time(), size)

    def close(self) -> None:
        """No connection is open."""
        self._router.close()

    def _find_again(self) -> None:
        """Another ``up`` of the same name may serve at another address."""
        record = self._files.record()
        if record is None or record == self._record:
            return
        if record.run != self._record.run:
            self._router.close()
            self._router = RouterClient(self._files, record, keep_alive=True)
        self._record = record

    def _why(self, error: Exception) -> str:
        if not self._files.is_running():
            return f"{self._record.name} is not running any more; `splitserve up` starts it again"
        return str(error)

"""`splitserve up` as a real process, and everything below it, found by a variable in the
environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK = "SPLITSERVE_TEST_MARK"
POLL_S = 0.05

T = TypeVar("T")


def wait_for(
    question: Callable[[], T], limit_s: float, what: str, story: Callable[[], str] = str
) -> T:
    """The first answer that is true; fails with ``what`` and ``story()`` at the
    limit.
    """
    end = time.monotonic() + limit_s
    while True:
        answer = question()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:g} s for {what}\n{story()}")
        time.sleep(POLL_S)


class UpProcess:
    """One `splitserve up CONFIG` with a state folder of its own below ``folder``."""

    def __init__(self, config: str | Path, folder: Path, env: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.env = {
            **os.environ,
            **(env or {}),
            MARK: self.mark,
            "XDG_STATE_HOME": str(folder / "state"),
        }
        self.output_path = folder / "up.out"
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.command(), "up", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )

    @staticmethod
    def command() -> list[str]:
        return [sys.executable, "-m", "splitserve.orchestrator.cli.main"]

    def run(self, *arguments: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Another `splitserve` command beside this cluster."""
        return subprocess.run(
            [*self.command(), *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def logs(self) -> list[Path]:
        """The log files of the cluster's router, agents and engines."""
        return list((Path(self.env["XDG_STATE_HOME"]) / "splitserve").glob("*/*/*.log"))

    def story(self) -> str:
        """The output of `up` and the ends of all logs, for a failed test."""
        ends = [f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in self.logs()]
        return "\n".join([self.output(), *ends])

    def status(self) -> dict[str, Any] | None:
        """The cluster as `splitserve status --json` tells it, None when there is none."""
        clusters = json.loads(self.run("status", "--json").stdout)["clusters"]
        return clusters[0] if clusters else None

    def node(self, name: str) -> dict[str, Any]:
        """What the agent of ``name`` wrote last, {} when there is nothing."""
        for path in (Path(self.env["XDG_STATE_HOME"]) / "splitserve").glob(f"*/{name}.status.json"):
            found: dict[str, Any] = json.loads(path.read_bytes())
            return found
        return {}

    def operator(self) -> dict[str, str]:
        """The header of a request with the token that `up` has left for operators."""
        (token,) = Path(self.env["XDG_STATE_HOME"]).glob("splitserve/*/operator.token")
        return {"Authorization": f"Bearer {token.read_text()}"}

    def wait_until_serving(self, limit_s: float = 120) -> None:
        """`up` says that it serves."""

        def serving() -> bool:
            assert self.process.poll() is None, f"`up` ended:\n{self.output()}"
            return "serving;" in self.output()

        wait_for(serving, limit_s, "`up` to serve", self.story)

    def processes(self) -> list[psutil.Process]:
        """Every living process with this test's mark, `up` included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def pids(self, words: str) -> list[int]:
        """Processes whose command line contains ``words`` (arguments joined by blanks), tethers and
        guards of others excepted.
        """
        pids = []
        for process in self.processes():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if words in line and (".guard" not in line or ".guard" in words):
                pids.append(process.pid)
        return pids

    def wait_until_nothing_is_left(self, limit_s: float = 20) -> None:
        """No process with the mark lives."""

        def left() -> str:
            return "\n".join(str(process) for process in self.processes()) + self.output()

        wait_for(lambda: not self.processes(), limit_s, "every process to end", left)

    def wait_for_end(self, limit_s: float = 60) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"`up` runs on:\n{self.output()}") from None

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Kill whatever is left; a test that passed leaves nothing."""
        kill(process.pid for process in self.processes())
        self.process.wait(10)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue

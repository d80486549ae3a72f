"""One process of the cluster on a host of Ray, below its actor: the command that a person would
start there, its files, and what becomes of it.

The command is tied to a thread of this process that lives as long as it does: when the actor is
killed, whatever the way, the kernel kills the command, an agent's guard its engine. What an actor
before this one has left (both killed in one moment) is ended before the command starts again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kv_transfer.cache.socket_path import is_listening
from splitserve.kv_transfer.channel import SECRET_FILE_ENV
from splitserve.orchestrator.agent.agent import EXIT_ENGINE_FAILED, EXIT_STOPPED
from splitserve.orchestrator.agent.processes import NODE_MARKER_ENV, RUN_MARKER_ENV
from splitserve.orchestrator.agent.status_file import NodeStatus, read_status, status_path
from splitserve.orchestrator.config import SECRET_ENV, ConfigError, parse, router_urls
from splitserve.orchestrator.config.ray_checks import WILDCARDS
from splitserve.orchestrator.launch.child_logs import bound_log, tail
from splitserve.orchestrator.launch.children import ending, sweep
from splitserve.orchestrator.launch.files import state_home, write_private
from splitserve.orchestrator.launch.quality_record import FILE_NAME
from splitserve.orchestrator.launch.ray.order import (
    CACHE,
    ROUTER,
    hosted,
    yaml_of,
)
from splitserve.orchestrator.launch.tether import tethered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.launch.ray.order import Order

EXIT_REFUSED = 2
"""Of every command: nothing was started, and the log says why."""
FINAL_EXITS = frozenset({EXIT_REFUSED, EXIT_ENGINE_FAILED})
"""After which starting it again cannot help."""
_NOT_INHERITED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT", SECRET_ENV)
"""What Ray sets for its own workers, and what is handed on in a file."""
_LOG_CHECK_S = 5.0
_OWN_NICENESS = 0
_OOM_FILE = Path("/proc/self/oom_score_adj")


def host_folder(cluster: str) -> Path:
    """Where the processes of a cluster leave their traces on a host of Ray, apart from those of an
    ``up`` on the same machine.
    """
    return state_home() / "_ray" / cluster


class HostProcess:
    """The process of one order. Its methods may be called from any thread."""

    def __init__(
        self,
        order: Order,
        address: str,
        gpus: tuple[int, ...] = (),
        *,
        on_death: Callable[[], None],
    ) -> None:
        """``address`` is this host's in the Ray cluster, ``gpus`` are those that Ray has given.
        ``on_death`` is called once the process is dead for a reason that another start may mend,
        ``supervision.restart_delay_s`` later.
        """
        self._order = order
        self._address = address
        self._gpus = gpus
        self._on_death = on_death
        self._marker = f"{CACHE}-{address}" if order.kind == CACHE else order.name
        self._lock = threading.Lock()
        self._config: ClusterConfig | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._state = "starting"
        self._exit_status: int | None = None
        self._why = ""
        self._notes: tuple[str, ...] = ()

    def start(self) -> None:
        """It is being started, on a thread of its own."""
        self._thread = threading.Thread(target=self._live, name="splitserve-keeper", daemon=True)
        self._thread.start()

    def start_again(self) -> bool:
        """Another one is being started in the place of one that has left or failed; False when
        there is nothing to do.
        """
        with self._lock:
            if self._state not in ("left", "failed") or self._stopping.is_set():
                return False
            self._state, self._exit_status, self._why = "starting", None, ""
        status_path(self._run_dir, self._order.name).unlink(missing_ok=True)
        self.start()
        return True

    def learn(self, order: Order) -> None:
        """What starts from now on starts from another order for the same process."""
        with self._lock:
            self._order = order

    def stop(self, limit_s: float) -> None:
        """It has ended, within ``limit_s`` by itself or else killed, and nothing of it is left."""
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        sweep(self._order.run, self._marker)
        if self._config is not None:
            for path in (self._yaml_path, self._secret_path):
                path.unlink(missing_ok=True)
        with self._lock:
            self._state = "stopped"

    def report(self) -> dict[str, Any]:
        """What is known of it, for whoever asks the actor."""
        with self._lock:
            found: dict[str, Any] = {
                "state": self._state,
                "exit_status": self._exit_status,
                "why": self._why,
                "notes": list(self._notes),
            }
        found |= {"host": socket.gethostname(), "address": self._address, "status": None}
        process = self._process
        if self._config is None:
            return found
        found["log"] = str(self._log_path)
        if found["state"] == "failed":
            found["tail"] = list(tail(self._log_path))
        if self._order.kind == CACHE:
            found["is_ready"] = found["state"] == "running" and self._cache_listens()
        if self._order.kind == "node":
            status = read_status(self._run_dir, self._order.name)
            if status is not None and process is not None and status.agent_pid == process.pid:
                found["status"] = msgspec.to_builtins(status)
        return found

    @property
    def _folder(self) -> Path:
        assert self._config is not None
        return host_folder(self._config.name)

    @property
    def _run_dir(self) -> Path:
        """Of the command, whose state folder is ``_folder``."""
        assert self._config is not None
        return self._folder / "splitserve" / self._config.name

    @property
    def _yaml_path(self) -> Path:
        return self._folder / f"{self._order.name}.yaml"

    @property
    def _secret_path(self) -> Path:
        return self._folder / f"{self._order.name}.secret"

    @property
    def _log_path(self) -> Path:
        assert self._config is not None
        logs = Path(self._config.observability.log_dir or self._run_dir / "logs").expanduser()
        return logs / f"{self._order.name}{'.agent' if self._order.kind == 'node' else ''}.log"

    def _live(self) -> None:
        """Start it and wait for its end."""
        try:
            sweep(self._order.run, self._marker)
            self._config = hosted(self._order, self._address, self._gpus)
            self._write_files()
            self._notes = tuple(_unlike_a_worker())
            process = self._spawn()
        except (ConfigError, OSError) as error:
            why = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
            self._end("failed", None, why)
            return
        with self._lock:
            self._process, self._state = process, "running"
        if self._stopping.is_set():
            process.terminate()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_LOG_CHECK_S)
                break
            with contextlib.suppress(OSError):  # A full disk is the engines' to tell
                bound_log(self._log_path)
        self._ended(status)

    def _ended(self, status: int) -> None:
        if self._stopping.is_set():
            return
        sweep(self._order.run, self._marker)
        if status == EXIT_STOPPED and self._order.kind == "node":
            self._end("left", status, "")
        elif status in FINAL_EXITS:
            self._end("failed", status, f"{ending(status)}; its log is {self._log_path}")
        else:
            self._end("dead", status, ending(status))
            assert self._config is not None
            if not self._stopping.wait(self._config.supervision.restart_delay_s):
                self._on_death()

    def _end(self, state: str, status: int | None, why: str) -> None:
        with self._lock:
            self._state, self._exit_status, self._why = state, status, why

    def _write_files(self) -> None:
        assert self._config is not None
        for folder in (self._folder, self._run_dir, self._log_path.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self._yaml_path, yaml_of(self._config).encode())
        if self._order.secret:
            write_private(self._secret_path, self._order.secret.encode())
        if self._order.quality:
            write_private(self._run_dir / FILE_NAME, self._order.quality.encode())
        last_run = self._folder / f"{self._order.name}.run"
        if not last_run.exists() or last_run.read_text() != self._order.run:
            for kind in ("status.json", "incarnation"):
                (self._run_dir / f"{self._order.name}.{kind}").unlink(missing_ok=True)
            write_private(last_run, self._order.run.encode())

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                tethered(self._command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ(os.environ),
                start_new_session=True,
            )

    def _command(self) -> list[str]:
        assert self._config is not None
        splitserve = [sys.executable, "-m", "splitserve.orchestrator.cli.main"]
        file = str(self._yaml_path)
        if self._order.kind == ROUTER:
            command = [*splitserve, "router", file, "--index", str(self._order.router_index)]
            wish = parse(self._order.config).router.host
            return [*command, "--host", wish] if wish in WILDCARDS else command
        if self._order.kind == CACHE:
            return [*splitserve, "cache-server", file]
        command = [*splitserve, "node", self._order.name, file]
        for url in router_urls(self._config):
            command += ["--router", url]
        pool = self._order.name.rpartition("-")[0]
        settings = self._config.pool(pool)
        if settings.gpus is None and settings.cpus is not None:
            command += ["--cpus", str(len(settings.cpus[0]))]
        return command

    def _environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        kept = {
            name: value
            for name, value in inherited.items()
            if name not in _NOT_INHERITED and not name.startswith("RAY_")
        }
        given = self._order.cache_environment if self._order.kind == CACHE else {}
        if self._order.kind == ROUTER:
            given = self._order.router_environment
        own = {
            "XDG_STATE_HOME": str(self._folder),
            RUN_MARKER_ENV: self._order.run,
            NODE_MARKER_ENV: self._marker,
        }
        if self._order.secret:
            own[SECRET_FILE_ENV] = str(self._secret_path)
        return {**kept, **given, **own}

    def _cache_listens(self) -> bool:
        assert self._config is not None
        assert self._config.cache is not None
        given = self._config.cache.socket_path
        return is_listening(given or str(self._run_dir / "cache.sock"))


def status_of(report: Mapping[str, Any]) -> NodeStatus | None:
    """What the node's agent said last, in what its actor reports; None before it has spoken."""
    plain = report.get("status")
    return msgspec.convert(plain, NodeStatus) if plain is not None else None


def _unlike_a_worker() -> list[str]:
    """What this thread starts runs with the priority of a service, not with that of Ray's workers,
    which step aside for everything else and are the first that a machine out of memory kills.
    Returns what cannot be had.
    """
    notes = []
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) > _OWN_NICENESS:
            os.setpriority(os.PRIO_PROCESS, 0, _OWN_NICENESS)
    except PermissionError:
        notes.append(
            f"it runs with niceness {os.getpriority(os.PRIO_PROCESS, 0)}, as Ray's workers do; "
            "start Ray with RAY_worker_niceness=0"
        )
    try:
        if int(_OOM_FILE.read_text()) > 0:
            _OOM_FILE.write_text("0")
    except PermissionError:
        notes.append(
            "the kernel ends it first when memory runs out, as Ray's workers; start Ray with "
            "RAY_worker_oom_score_adjustment=0"
        )
    return notes

"""Where running clusters leave their traces: ``$XDG_STATE_HOME/splitserve`` (by default
``~/.local/state/splitserve``), for the owner only.

``NAME.json`` says which ``up`` runs the cluster NAME and where it serves; the folder ``NAME/``
holds the resolved configuration, one status file per node, the operators' token, wishes for nodes
to be started again, and ``logs/``. The lock file is held by ``up`` for its life and released by the
kernel, so "is it running" has one answer, also after a SIGKILL.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from splitserve.orchestrator.config import TlsConfig


_OF_NODES = ("*.status.json", "*.incarnation", "*.start")
"""Files of each node of a run."""


class RunningClusterError(Exception):
    """A cluster of that name runs already."""


class TlsFiles(msgspec.Struct, kw_only=True, frozen=True):
    """Paths of ``security.tls``."""

    cert_file: str
    key_file: str
    ca_file: str
    client_ca_file: str | None = None


class ClusterRecord(msgspec.Struct, kw_only=True, frozen=True):
    """The content of ``NAME.json``."""

    name: str
    run: str
    """Marker in the environment of every process of this run."""
    pid: int
    """The ``up`` that runs it."""
    source: str
    """The YAML it was started from."""
    url: str
    """Of its first router."""
    nodes: tuple[str, ...]
    phase: str
    """``starting``, ``serving`` or ``stopping``."""
    started: float
    """Unix time."""
    log_dir: str
    launcher: str = "local"
    """``local``: an ``up`` that holds every process; ``ray``: actors on a Ray cluster, which need
    none; ``none``: the router alone, whose nodes are started by somebody else.
    """
    more_urls: tuple[str, ...] = ()
    """Of its other routers."""
    tls: TlsFiles | None = None
    """How its router is verified; None where it speaks plain HTTP."""

    @property
    def routers(self) -> list[ClusterRecord]:
        """The record as if the cluster had that router alone, of each: for what only the router
        knows that served a request.
        """
        urls = (self.url, *self.more_urls)
        return [msgspec.structs.replace(self, url=url, more_urls=()) for url in urls]


class ScaleOrder(msgspec.Struct, kw_only=True, frozen=True):
    """What `splitserve scale` asks of the `up` that runs the cluster."""

    ticket: str
    """Names the order in its answer."""
    pool: str
    replicas: int
    cpus: tuple[tuple[int, ...], ...] = ()
    gpus: tuple[tuple[int, ...], ...] = ()


class ScaleAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """How that went."""

    ticket: str
    problems: tuple[str, ...] = ()
    """Why nothing was changed; empty when it was done."""


class ScalingError(Exception):
    """Another `splitserve scale` of the cluster is at work."""


@dataclass(frozen=True)
class ClusterFiles:
    """The paths of one cluster."""

    name: str

    @property
    def record_path(self) -> Path:
        """``NAME.json``."""
        return state_home() / f"{self.name}.json"

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return state_home() / self.name

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.run_dir / "resolved.json"

    @property
    def token_path(self) -> Path:
        """The operators' token of the run."""
        return self.run_dir / "operator.token"

    @property
    def secret_path(self) -> Path:
        """The cluster secret of the run."""
        return self.run_dir / "cluster.secret"

    @property
    def profile_path(self) -> Path:
        """What its engines take for what, as it was last measured; outlives the runs."""
        return self.run_dir / "profile.json"

    @property
    def cache_settings_path(self) -> Path:
        """What the cache server is told."""
        return self.run_dir / "cache.json"

    @property
    def cache_socket_path(self) -> Path:
        """Where the cache server listens, by default."""
        return self.run_dir / "cache.sock"

    @property
    def cache_dir(self) -> Path:
        """Default folder of the cache's disk tier; outlives the runs."""
        return self.run_dir / "cache"

    @property
    def log_dir(self) -> Path:
        """Default folder of the logs."""
        return self.run_dir / "logs"

    def lock(self) -> IO[bytes]:
        """The lock, held until the file is closed or this process ends. Raises
        ``RunningClusterError`` when another ``up`` holds it.
        """
        self._make_folders()
        handle = (self.run_dir / "lock").open("ab")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise self._running_already() from None
        return handle

    def refuse_running(self) -> None:
        """Raises ``RunningClusterError`` while another ``up`` holds the lock."""
        if self.is_held():
            raise self._running_already()

    def is_running(self) -> bool:
        """Whether an ``up`` holds the lock, or has left the cluster running on a Ray cluster."""
        record = self.record()
        return self.is_held() or (record is not None and record.launcher == "ray")

    def is_held(self) -> bool:
        """Whether an ``up`` on this machine holds the lock."""
        try:
            with (self.run_dir / "lock").open("rb") as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def record(self) -> ClusterRecord | None:
        """What the last ``up`` wrote and has not removed."""
        try:
            return msgspec.json.decode(self.record_path.read_bytes(), type=ClusterRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write_record(self, record: ClusterRecord) -> None:
        """``NAME.json`` holds ``record``, readable by its owner only."""
        write_private(self.record_path, msgspec.json.encode(record))

    def remove_record(self) -> None:
        """The cluster has been stopped."""
        for path in (self.token_path, *self.run_dir.glob("*.secret")):
            path.unlink(missing_ok=True)
        self.record_path.unlink(missing_ok=True)

    def begin_run(self, resolved: str, operator_token: str) -> None:
        """The folder is ready for a new run: old statuses gone, the resolved configuration and the
        operators' token written.
        """
        self._make_folders()
        for pattern in (*_OF_NODES, "*.secret", "cache.json", "scale.order", "scale.answer"):
            for old in self.run_dir.glob(pattern):
                old.unlink(missing_ok=True)
        write_private(self.config_path, resolved.encode())
        write_private(self.token_path, operator_token.encode())

    def wish_for(self, node: str) -> None:
        """Ask the running ``up`` to start a node that has left or failed."""
        write_private(self._wish_path(node), b"")

    def is_wished(self, node: str) -> bool:
        """Whether ``up`` has not taken the wish yet."""
        return self._wish_path(node).exists()

    def take_wish(self, node: str) -> None:
        """The wish is being granted."""
        self._wish_path(node).unlink(missing_ok=True)

    def forget(self, node: str) -> None:
        """Nothing is left of a node that is no part of the cluster any more, but its logs."""
        for pattern in _OF_NODES:
            (self.run_dir / pattern.replace("*", node)).unlink(missing_ok=True)

    def write_resolved(self, resolved: str) -> None:
        """Processes that start from now on read this configuration."""
        write_private(self.config_path, resolved.encode())

    def scale_lock(self) -> IO[bytes]:
        """Held by one `splitserve scale` at a time, until the file is closed or its process ends.
        Raises ``ScalingError``.
        """
        handle = (self.run_dir / "scale.lock").open("ab")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise ScalingError(
                f"another `splitserve scale` of {self.name} is at work; wait until it has ended"
            ) from None
        return handle

    def order_scale(self, order: ScaleOrder) -> None:
        """Ask the running ``up`` for another size."""
        write_private(self.run_dir / "scale.order", msgspec.json.encode(order))

    def take_scale_order(self) -> ScaleOrder | None:
        """The order that nobody has taken yet; from now on it is taken. One that this version does
        not understand is taken, too, and gets no answer.
        """
        path = self.run_dir / "scale.order"
        try:
            data = path.read_bytes()
            path.unlink()
            return msgspec.json.decode(data, type=ScaleOrder)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def answer_scale(self, answer: ScaleAnswer) -> None:
        """Say how the order went."""
        write_private(self.run_dir / "scale.answer", msgspec.json.encode(answer))

    def scale_answer(self, ticket: str) -> ScaleAnswer | None:
        """The answer to that order; None while there is none."""
        try:
            data = (self.run_dir / "scale.answer").read_bytes()
        except FileNotFoundError:
            return None
        answer = msgspec.json.decode(data, type=ScaleAnswer)
        return answer if answer.ticket == ticket else None

    def _running_already(self) -> RunningClusterError:
        record = self.record()
        by = f" (pid {record.pid}, {record.url})" if record is not None else ""
        return RunningClusterError(
            f"a cluster named {self.name!r} is running already{by}; "
            f"stop it with `splitserve down {self.name}`, or give this one another `name`"
        )

    def _wish_path(self, node: str) -> Path:
        return self.run_dir / f"{node}.start"

    def _make_folders(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (state_home(), self.run_dir):
            with contextlib.suppress(PermissionError):
                folder.chmod(0o700)


def tls_files(tls: TlsConfig | None) -> TlsFiles | None:
    """What the record of a running cluster says of its certificates."""
    return TlsFiles(**tls.model_dump()) if tls is not None else None


def state_home() -> Path:
    """The folder of all clusters of this user."""
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "splitserve"


def known_clusters() -> list[ClusterFiles]:
    """Clusters that have a record: running, or ended without being able to remove it."""
    return [ClusterFiles(path.stem) for path in sorted(state_home().glob("*.json"))]


def write_private(path: Path, data: bytes) -> None:
    """``path`` holds ``data``, mode 0600, replaced at once."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(data)
    fresh.replace(path)

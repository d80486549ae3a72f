"""A Ray cluster of several hosts on this machine, each with a loopback address and a state folder
of its own, and all of its processes known by a mark.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from support.up_process import MARK, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

OBJECT_STORE_BYTES = 80 * 2**20
HOST_ENV = "SPLITSERVE_TEST_RAY_HOST"
_ADDRESSES = iter(range(2, 250))
_TOKEN = secrets.token_hex(32)
"""One for all: Ray reads it once in a process."""


class RayHosts:
    """The hosts. The first has Ray's head, and is the one that this machine's drivers are on."""

    def __init__(self, count: int, *, cpus: int = 8, env: dict[str, str] | None = None) -> None:
        self.mark = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="ss-ray-"))  # Short: sockets lie below it
        self._count = count
        self._cpus = cpus
        self._env = env or {}
        self._nodes: dict[str, Any] = {}
        self._cluster: Any = None
        self._environ: dict[str, str] = {}

    @property
    def address(self) -> str:
        """Of Ray's head."""
        return str(self._cluster.address)

    @property
    def first(self) -> str:
        """The address of the host with Ray's head."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """Of the hosts that live."""
        return list(self._nodes)

    def __enter__(self) -> RayHosts:
        self._environ = dict(os.environ)
        # Ray listens on every interface; with a token it answers to nobody else
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=_TOKEN)
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=str(self.folder))
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=False)
        try:
            for _ in range(self._count):
                self.add()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, **options: Any) -> str:
        """One more host; returns its address."""
        address = f"127.0.0.{next(_ADDRESSES)}"
        state = self.folder / address
        state.mkdir()
        variables = {"HOME": str(state), "XDG_STATE_HOME": str(state), HOST_ENV: address}
        variables |= {MARK: self.mark, **self._env}
        if not self._nodes:
            quick = {"health_check_period_ms": 1000, "health_check_failure_threshold": 4}
            options |= {"include_dashboard": False, "_system_config": quick}
        self._nodes[address] = self._cluster.add_node(
            **{
                "num_cpus": self._cpus,
                "node_ip_address": address,
                "object_store_memory": OBJECT_STORE_BYTES,
                "env_vars": variables,
                "labels": {"place": address},
                **options,
            }
        )
        return address

    def kill(self, address: str) -> None:
        """SIGKILL to everything on that host at once: Ray's processes and what they started."""
        node = self._nodes.pop(address)
        for process in self.processes(address):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        self._cluster.worker_nodes.discard(node)
        wait_for(lambda: not self.processes(address), 20, f"the end of {address}")

    def processes(self, address: str = "") -> list[psutil.Process]:
        """Everything that lives on that host, or on all of them."""
        found = []
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                if process.status() == psutil.STATUS_ZOMBIE or environ.get(MARK) != self.mark:
                    continue
            except psutil.Error:
                continue
            if HOST_ENV in environ and address in ("", environ[HOST_ENV]):
                found.append(process)
        return found

    def home(self, address: str) -> Path:
        """The home of its user, and where its processes leave their traces."""
        return self.folder / address

    def served(self, words: str = "splitserve.") -> list[psutil.Process]:
        """Processes of splitserve on the hosts whose command line contains ``words``, guards
        excepted.
        """
        found = []
        for process in self.processes():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if "splitserve." in line and words in line and ".guard" not in line:
                found.append(process)
        return found

    def actors(self, namespace: str) -> list[str]:
        """Names of the actors of a namespace."""
        return [actor["name"] for actor in self._listed() if actor["namespace"] == namespace]

    def groups(self) -> list[dict[str, Any]]:
        """Placement groups that hold, or wait for, room."""
        from ray.util import placement_group_table

        with self._connected():
            table = placement_group_table()
        return [group for group in table.values() if group["state"] != "REMOVED"]

    def _listed(self) -> list[dict[str, str]]:
        from ray.util import list_named_actors

        with self._connected():
            found: list[dict[str, str]] = list_named_actors(all_namespaces=True)
        return found

    @contextmanager
    def _connected(self) -> Iterator[None]:
        import ray

        ray.init(address=self.address, log_to_driver=False, configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()

    def logs(self) -> str:
        """The ends of all logs of splitserve on the hosts."""
        paths = sorted(self.folder.glob("127*/**/*.log"))
        return "\n".join(f"--- {p}\n{p.read_text(errors='replace')[-1500:]}" for p in paths)

    def close(self) -> None:
        """Nothing of it is left."""
        self._cluster.shutdown()
        for process in self.processes():
            process.kill()
        os.environ.clear()
        os.environ.update(self._environ)

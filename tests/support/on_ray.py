"""A cluster of splitserve on the hosts of a Ray cluster, as its operator and its clients see it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from support.up_process import UpProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.ray_hosts import RayHosts


@dataclass
class OnRay:
    """One cluster, and the machine from which it is handled."""

    hosts: RayHosts
    folder: Path
    text: str
    """Its YAML without ``name``, ``launcher`` and ``ray``."""
    nodes_named: tuple[str, ...]
    name: str = field(default_factory=lambda: f"c{secrets.token_hex(3)}")
    ups: list[UpProcess] = field(default_factory=list)

    @property
    def config(self) -> Path:
        """The YAML, as a file."""
        return self.yaml(self.text, self.hosts.address)

    def yaml(self, text: str, address: str, ray: str = "") -> Path:
        """Another one of the same name, for the Ray cluster at ``address``; ``ray`` are more keys
        of that section.
        """
        path = self.folder / f"{self.name}.yaml"
        section = f'{{address: "{address}", {ray}}}'
        head = f"name: {self.name}\nlauncher: ray\nray: {section}\n"
        path.write_text(head + text)
        return path

    def up(self, machine: str = "one", config: Path | None = None) -> UpProcess:
        """`splitserve up` in the foreground."""
        folder = self.folder / machine
        folder.mkdir(exist_ok=True)
        self.ups.append(UpProcess(config or self.config, folder))
        return self.ups[-1]

    def run(
        self, *arguments: str, machine: str = "one", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Another command there."""
        env = {**os.environ, **environ, "XDG_STATE_HOME": str(self.folder / machine / "state")}
        return subprocess.run(
            [*UpProcess.command(), *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def status(self, machine: str = "one") -> dict[str, Any]:
        """As `splitserve status --json` tells it."""
        found: list[dict[str, Any]] = json.loads(
            self.run("status", "--json", machine=machine).stdout
        )["clusters"]
        return found[0] if found else {}

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the router says of its nodes; none while it does not answer."""
        state = self.folder / "one" / "state" / "splitserve"
        record = json.loads((state / f"{self.name}.json").read_bytes())
        token = (state / self.name / "operator.token").read_text()
        request = urllib.request.Request(
            f"{record['url']}/internal/status", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found: dict[str, dict[str, Any]] = json.load(answer)["nodes"]
        except OSError:
            return {}
        return found

    def incarnations(self) -> dict[str, str]:
        """Of the nodes that the router uses."""
        nodes = self.nodes().items()
        return {name: node["incarnation"] for name, node in nodes if node["is_usable"]}

    def is_whole(self) -> bool:
        """Whether the router uses every node."""
        return set(self.incarnations()) == set(self.nodes_named)

    def is_renewed(self, before: dict[str, str], *names: str) -> bool:
        """Whether other incarnations of these nodes serve than before."""
        now = self.incarnations()
        return all(now.get(name, before[name]) != before[name] for name in names)

    def addresses(self) -> dict[str, str]:
        """Node to the address of its host."""
        nodes = self.nodes().items()
        return {name: str(urlsplit(node["engine_url"]).hostname) for name, node in nodes}

    def pid(self, words: str) -> int:
        """Of the one process on the hosts with these words in its command line."""
        (found,) = self.hosts.served(words)
        return found.pid

    async def until(self, question: Callable[[], bool], limit_s: float = 60) -> None:
        """It is true; clients go on asking meanwhile."""
        await asyncio.to_thread(wait_for, question, limit_s, "what the test waits for", self.story)

    def assert_nothing_is_left(self) -> None:
        """No process, no actor, no placement group; no secret on the disks of hosts that live."""
        assert self.hosts.served() == []
        assert self.hosts.actors(self.name) == []
        assert self.hosts.groups() == []
        for address in self.hosts.addresses:
            assert not list(self.hosts.home(address).glob("splitserve/**/*.secret"))
        assert self.status() == {}

    def story(self) -> str:
        """What `up` said, and all logs."""
        return "\n".join([*(up.output() for up in self.ups), self.hosts.logs()])

    def close(self) -> None:
        """After a test that failed, too."""
        for up in self.ups:
            up.close()
        self.run("down", str(self.config))

"""What rendered pods run, run here: each container's arguments and YAML as they are, on addresses
of its own, with Secrets as files; asked where its probes ask.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.kubernetes_clusters import MOCK
from support.manifests import cluster_yaml, pod_specs

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.kubernetes.options import Options
from splitserve.orchestrator.launch.kubernetes.render import render
from splitserve.orchestrator.launch.ports import free_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ADDRESSES = {
    "demo-router": "127.0.0.1",
    "demo-prefill": "127.0.0.21",
    "demo-decode": "127.0.0.22",
}
KEY = "sk-kubernetes"
READY_WITHIN_S = 40.0


class Pods:
    """Processes in place of the pods."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        text = MOCK.replace("replicas: 2, ", f"port_base: {free_run(['127.0.0.21'], 2)}, ")
        text += f"router: {{port: {free_port()}}}\n"
        manifests = [m for part in render(parse(text), Options()).values() for m in part]
        self.specs = dict(pod_specs(manifests))
        self._folder = folder
        self._files(cluster_yaml(manifests))
        self.processes = {name: self._start(name) for name in self.specs}

    def probe(self, name: str, kind: str) -> int:
        """The status of a probe's answer; 0 when there is none."""
        container = self.specs[name]["containers"][0]
        asked = container[kind]["httpGet"]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        port = ports.get(asked["port"], asked["port"])
        try:
            return httpx.get(f"http://{ADDRESSES[name]}:{port}{asked['path']}").status_code
        except httpx.HTTPError:
            return 0

    def wait_for_probe(self, name: str, kind: str, status: int = 200) -> None:
        """The probe is answered so, in time."""
        deadline = time.monotonic() + READY_WITHIN_S
        while self.probe(name, kind) != status:
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _files(self, text: str) -> None:
        """The volumes."""
        text = text.replace("/etc/splitserve", str(self._folder))
        text = text.replace("demo-router-agents.default.svc", ADDRESSES["demo-router"])
        for file, content in (
            ("cluster/cluster.yaml", text),
            ("secret/cluster-secret", "ab" * 32),
            ("api-keys/key", KEY),
        ):
            path = self._folder / file
            path.parent.mkdir()
            path.write_text(content)
            path.chmod(0o600)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        variables = {"POD_IP": ADDRESSES[name], "POD_INDEX": "0", "POD_NAME": f"{name}-0"}
        arguments = []
        for argument in self.specs[name]["containers"][0]["args"]:
            for variable, value in variables.items():
                argument = argument.replace(f"$({variable})", value)
            arguments.append(argument.replace("/etc/splitserve", str(self._folder)))
        state = self._folder / f"{name}-state"
        environ: dict[str, Any] = os.environ | {"XDG_STATE_HOME": str(state)}
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "splitserve.orchestrator.cli.main", *arguments],
                env=environ,
                stdout=log,
                stderr=log,
            )


@pytest.fixture
def pods(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Pods]:
    pods = Pods(tmp_path, free_port)
    yield pods
    pods.close()


def test_pods_come_up_serve_and_leave(pods: Pods) -> None:
    """Probes say when each is ready; the router is not before there is a decode node, and agents
    reach it all the same; a split request is answered; SIGTERM drains a node, which then is not
    ready any more and ends with status 0.
    """
    for name in pods.specs:
        pods.wait_for_probe(name, "startupProbe")
        pods.wait_for_probe(name, "readinessProbe")
        assert pods.probe(name, "livenessProbe") == 200
    port = pods.specs["demo-router"]["containers"][0]["ports"][0]["containerPort"]
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
    body = {"model": "mock", "prompt": list(range(1, 200)), "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=20)
    assert answer.status_code == 200, answer.text
    assert "splitserve_requests_total" in httpx.get(f"{url}/metrics").text
    decode = pods.processes["demo-decode"]
    decode.send_signal(signal.SIGTERM)
    pods.wait_for_probe("demo-router", "readinessProbe", 503)
    assert decode.wait(20) == 0, pods.log("demo-decode")
    assert pods.probe("demo-router", "livenessProbe") == 200

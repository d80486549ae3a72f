"""`splitserve quickstart` and `up --detach`: what a first user types."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from support.up_process import UpProcess, kill

if TYPE_CHECKING:
    from pathlib import Path

MOCK = """
name: quick
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 2048}
  transfer: {transport: tcp}
decode: *pool
"""

VLLM = """
name: tiny
model: {{path: {folder}, served_name: tiny}}
router: {{port: 0}}
allow_shared_devices: {shared}
prefill: &pool
  cpus: [[{first}]]
  kv_cache_bytes: 64 MiB
  engine_args: {{block_size: 32, max_model_len: 512, max_num_seqs: 4}}
  transfer: {{transport: nixl}}
decode: {{<<: *pool, cpus: [[{last}]]}}
"""


def splitserve(folder: Path, *arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run the command with a state folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "splitserve.orchestrator.cli.main", *arguments],
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def test_quickstart_answers_and_stops(tmp_path: Path) -> None:
    """It shows a streamed answer and where its time went, stops everything and ends with 0."""
    config = tmp_path / "quick.yaml"
    config.write_text(MOCK)
    result = splitserve(tmp_path, "quickstart", str(config), limit_s=100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "first text after" in result.stdout
    assert "where the time went (split)" in result.stdout
    assert "prefill-0 had computed the prompt" in result.stdout
    assert "everything has been stopped" in result.stdout
    assert splitserve(tmp_path, "status", limit_s=20).returncode == 3


def test_detach(tmp_path: Path) -> None:
    """`up --detach` returns when the cluster serves; `down` without a name stops the only one."""
    config = tmp_path / "quick.yaml"
    config.write_text(MOCK)
    try:
        result = splitserve(tmp_path, "up", str(config), "--detach", limit_s=100)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "quick serves on http://127.0.0.1:" in result.stdout
    finally:
        down = splitserve(tmp_path, "down", limit_s=60)
    assert down.returncode == 0
    assert "quick has been stopped" in down.stdout


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_vllm_stays_on_loopback_and_on_its_cpus(tmp_path: Path, tiny_model: Path) -> None:
    """With real engines every listening socket of the process tree is on loopback, every process of
    an engine may run on its node's CPU only, and after a SIGKILL of `up` nothing is left.
    """
    cpus = sorted(os.sched_getaffinity(0))
    config = tmp_path / "tiny.yaml"
    shared = str(len(cpus) == 1).lower()
    text = VLLM.format(folder=tiny_model, first=cpus[0], last=cpus[-1], shared=shared)
    config.write_text(text)
    up = UpProcess(config, tmp_path)
    try:
        up.wait_until_serving(400)
        tree = psutil.Process(up.process.pid).children(recursive=True)
        listening = {
            connection.laddr[0].removeprefix("::ffff:")
            for process in tree
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        for name, cpu in (("prefill-0", cpus[0]), ("decode-0", cpus[-1])):
            (agent,) = up.pids(f"orchestrator.agent --node {name}")
            engine = psutil.Process(agent).children(recursive=True)
            assert len(engine) >= 4
            assert {tuple(process.cpu_affinity() or ()) for process in engine} == {(cpu,)}
        kill([up.process.pid])
        left = psutil.wait_procs(tree, timeout=30)[1]
        assert left == []
        up.wait_until_nothing_is_left(1)
    finally:
        up.close()

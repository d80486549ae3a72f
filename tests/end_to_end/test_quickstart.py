"""`splitserve quickstart` and `up --detach`: what a first user types."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

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
    assert "until prefill-0 began; decode-0 reserved pages meanwhile" in result.stdout
    assert "= time to the first token" in result.stdout
    assert "MB of KV travelled" in result.stdout
    assert "everything has been stopped" in result.stdout
    assert splitserve(tmp_path, "status", limit_s=60).returncode == 3


def test_detach(tmp_path: Path) -> None:
    """`up --detach` shows how the nodes load and returns when the cluster serves; `down` without a
    name stops the only one.
    """
    config = tmp_path / "quick.yaml"
    config.write_text(MOCK)
    try:
        result = splitserve(tmp_path, "up", str(config), "--detach", limit_s=100)
        assert result.returncode == 0, result.stdout + result.stderr
        *progress, last = result.stdout.splitlines()
        assert last.startswith("quick serves on http://127.0.0.1:")
        assert [line for line in progress if line.startswith("decode-0: loading")], progress
        assert [line for line in progress if line.startswith("logs: ")], progress
        assert "Ctrl-C" not in result.stdout
    finally:
        down = splitserve(tmp_path, "down", limit_s=60)
    assert down.returncode == 0
    assert "quick has been stopped" in down.stdout

"""Prometheus's own judge of rules and expressions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

OBSERVABILITY = Path(__file__).parents[2] / "configs" / "observability"
_NAME = re.compile(r"\b(?:splitserve_|vllm:|process_)[a-z0-9_:]+")


def promtool(*arguments: str | Path) -> str:
    """What ``promtool`` prints; fails with that when it finds fault."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("promtool", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    assert program is not None, "promtool is missing: `make install` fetches it"
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def metrics_in(expression: str) -> set[str]:
    """The names of metrics in an expression of PromQL."""
    return set(_NAME.findall(expression))


def samples_of(name: str, kind: str) -> set[str]:
    """The names that samples of a family may have."""
    if kind == "histogram":
        return {f"{name}_{suffix}" for suffix in ("bucket", "sum", "count")}
    return {f"{name}_total"} if kind == "counter" else {name}

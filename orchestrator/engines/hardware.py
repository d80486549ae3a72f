"""What an engine without a GPU computes on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def of_processor() -> str:
    """The processor's name and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    return f"{processor_name()}, {cores} core{'s' if cores > 1 else ''}"


def processor_name() -> str:
    """As the kernel says it; the machine's architecture when it does not."""
    try:
        lines = CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()

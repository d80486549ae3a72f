"""The GPU kernels give the bytes of the plain reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).parents[2] / "support" / "triton_program.py"


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Any]:
    """What the program answers in a mode; it compiles anew."""

    def start(mode: str) -> Any:
        ended = subprocess.run(
            [sys.executable, "-W", "error", str(PROGRAM), mode],
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return start


def test_gathered_and_scattered_pages_equal_the_reference(run: Callable[[str], Any]) -> None:
    """Odd shapes, all orders, memory with tokens outside heads: to the bit, and no byte more."""
    answer = run("interpret")
    assert answer["cases"] == 27
    assert answer["wrong"] == []


def test_gpus_read_and_write_16_bytes_at_once(run: Callable[[str], Any]) -> None:
    """Compiled for a GPU, both sides of a copy are contiguous accesses, transposed or not; only the
    block id is a narrow load.
    """
    answer = run("compile")
    assert len(answer) == 6
    for name, found in answer.items():
        assert found == {"ld": ["b32", "v4.b32"], "st": ["v4.b32"]}, name


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bytes_at_the_speed_of_its_memory(run: Callable[[str], Any]) -> None:
    """On CUDA all cases are right, and random pages move at least at half the speed of a plain
    copy; at a quarter where keys are transposed.
    """
    answer = run("cuda")
    assert answer["cases"] == 270
    assert answer["wrong"] == []
    for kind, least in (("equal", 0.5), ("transposed", 0.25)):
        took = answer["seconds"][kind]
        assert took["copy"] / took["gather"] > least, answer["seconds"]
        assert took["copy"] / took["scatter"] > least, answer["seconds"]

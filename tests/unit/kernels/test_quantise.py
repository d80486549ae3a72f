"""Small integers and back: the compiled kernel gives the reference's bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.kv_numbers import like_kv

from splitserve.kernels import compiled_quantise
from splitserve.kernels.compiled_quantise import dequantise_quickly, warm_up
from splitserve.kernels.quantise import (
    NUMBERS,
    QuantisedRows,
    dequantise_rows,
    quantise_rows,
    read_numbers,
    scales_of,
    widened,
    write_numbers,
)

PROGRAM = Path(__file__).parents[2] / "support" / "triton_quantise_program.py"
SHAPES = [(3, 256, 64, 64), (1, 1, 1, 1), (2, 37, 5, 3), (4, 16, 96, 0)]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_the_compiled_kernel_equals_the_reference(
    number: str, is_centred: bool, sizes: Any
) -> None:
    """To the bit, into memory with gaps between heads, and for heads in the middle."""
    heads, tokens, key_items, value_items = sizes
    rows = like_kv(heads, tokens, key_items + value_items)
    quantised = quantise_rows(rows, key_items, 127, centred=is_centred)
    size = (key_items + value_items) * NUMBERS[number]
    expected = np.zeros((heads, tokens, size), np.uint8)
    wide = np.zeros((heads, tokens + 4, size), np.uint8)
    dequantise_rows(quantised, number, expected)
    dequantise_quickly(quantised, number, wide[:, 4:])
    assert np.array_equal(wide[:, 4:], expected)
    assert not wide[:, :4].any()
    middle = QuantisedRows(*(part if part is None else part[heads // 2 :] for part in quantised))
    own = np.zeros_like(expected[heads // 2 :])
    dequantise_quickly(middle, number, own)
    assert np.array_equal(own, expected[heads // 2 :])


def test_it_is_compiled_here_and_missed_where_numba_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process without numba gets the same numbers from the reference."""
    warm_up("bfloat16")
    assert compiled_quantise._compiled("bfloat16") is not None
    assert compiled_quantise._compiled("float16") is None
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled_quantise._compiled.__wrapped__("bfloat16") is None


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_come_back_from_their_bytes(number: str) -> None:
    """Reading is exact, and writing takes the nearest number, ties to even."""
    values = np.array([[0.0, -1.5, 3.0, 1e-3, 250.0]], np.float32)
    out = np.zeros((1, 5 * NUMBERS[number]), np.uint8)
    write_numbers(values.copy(), number, out)
    found = read_numbers(out, number)
    assert np.allclose(found, values, rtol=2.0**-8)
    again = np.zeros_like(out)
    write_numbers(np.array(found), number, again)
    assert np.array_equal(again, out)


def test_halves_are_rounded_to_even() -> None:
    """Just between two bfloat16 numbers."""
    between = np.array([0x3F80_8000, 0x3F81_8000, 0x3F80_8001], np.uint32).view(np.float32)
    out = np.zeros(6, np.uint8)
    write_numbers(between[None].copy(), "bfloat16", out[None])
    assert [hex(bits) for bits in out.view(np.uint16)] == ["0x3f80", "0x3f82", "0x3f81"]


def test_scales_are_rounded_up() -> None:
    """So that the largest number of a group is not cut off."""
    values = like_kv(2, 50, 8)
    scales = scales_of(values, 1, 127)
    assert (widened(scales) * 127 >= np.abs(values).max(axis=1, keepdims=True)).all()


def test_zeros_have_the_scale_zero() -> None:
    """Of either sign, alone or mixed; they stay zeros."""
    zeros = np.array([[[0.0, 0.0], [-0.0, -0.0], [0.0, -0.0], [-0.0, 0.0]]], np.float32)
    assert not scales_of(zeros, 2, 127).any()
    assert not scales_of(zeros, 1, 127).any()


@pytest.mark.parametrize("mode", ["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_gpu_kernels_fill_and_read_pages_as_the_reference(mode: str, tmp_path: Path) -> None:
    """All orders, odd shapes, every kind of number: to the bit, and no byte more. What cannot be
    quantised is refused.
    """
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), mode],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["cases"] == 21
    assert answer["wrong"] == []


@pytest.mark.long
@pytest.mark.timeout(320)
def test_gpus_round_each_product_and_quotient(tmp_path: Path) -> None:
    """As the reference does: compiled for a GPU nothing is fused, approximate or flushed to zero,
    and the sums that round to integers are left in.
    """
    ended = subprocess.run(
        [sys.executable, str(PROGRAM.with_name("triton_quantise_compiled.py"))],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert len(answer) == 6
    for name, found in answer.items():
        assert found["add.rn.f32"], name
        assert bool(found["div.rn.f32"]) == (not name.startswith("dequantise")), name
        assert not any(found[other] for other in ("div.full", "div.approx", "rcp", "fma", "ftz"))

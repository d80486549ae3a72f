"""Reading GGUF: metadata and tensors come back as written, and damage is an error with a reason."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_writer import RawTensor, gguf_bytes, tiny_llama_gguf

from splitserve.orchestrator.models.errors import GgufError
from splitserve.orchestrator.models.gguf import GgufFile

if TYPE_CHECKING:
    from pathlib import Path

HALVES = st.floats(-100, 100, width=16)


def dequantised(tmp_path: Path, tensor: RawTensor) -> list[float]:
    """The tensor's values, read back from a file that holds only it."""
    path = tmp_path / "one.gguf"
    path.write_bytes(gguf_bytes({}, {"x": tensor}))
    with GgufFile(path) as file:
        return [float(value) for value in file.dequantise(file.tensors[0]).ravel()]


def test_metadata_of_every_kind_comes_back(tmp_path: Path) -> None:
    """Integers, floats, flags, text and lists are read as Python values."""
    metadata = {"i": 7, "f": 0.5, "t": True, "s": "größe", "l": ["a", "日"], "n": [1, 2, 3]}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(metadata, {}))
    with GgufFile(path) as file:
        assert file.metadata == metadata
        assert file.tensors == ()


def test_shapes_have_the_slowest_axis_first(tmp_path: Path) -> None:
    """A [2, 3] tensor is two rows of three, in the order of the bytes."""
    path = tmp_path / "t.gguf"
    data = struct.pack("<6f", *range(6))
    path.write_bytes(gguf_bytes({"k": "v"}, {"x": RawTensor((2, 3), 0, data)}))
    with GgufFile(path) as file:
        values = file.dequantise(file.tensors[0])
    assert values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert values.dtype == np.float32


@given(scale=HALVES, quants=st.lists(st.integers(-128, 127), min_size=32, max_size=32))
def test_q8_0_is_scale_times_quant(
    tmp_path_factory: pytest.TempPathFactory, scale: float, quants: list[int]
) -> None:
    """Every value of a Q8_0 block is its signed byte times the block's scale."""
    block = struct.pack("<e32b", scale, *quants)
    got = dequantised(tmp_path_factory.mktemp("q8"), RawTensor((32,), 8, block))
    assert got == pytest.approx([scale * quant for quant in quants], rel=1e-6, abs=1e-6)


@given(
    scale=HALVES,
    minimum=HALVES,
    quants=st.lists(st.integers(0, 15), min_size=32, max_size=32),
)
def test_q4_1_is_scale_times_quant_plus_minimum(
    tmp_path_factory: pytest.TempPathFactory, scale: float, minimum: float, quants: list[int]
) -> None:
    """Low halves of a Q4_1 block's bytes are its first 16 values, high halves the last 16."""
    packed = bytes(low | high << 4 for low, high in zip(quants[:16], quants[16:], strict=True))
    block = struct.pack("<ee", scale, minimum) + packed
    got = dequantised(tmp_path_factory.mktemp("q4"), RawTensor((32,), 3, block))
    expected = [scale * quant + minimum for quant in quants]
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-3)


def test_f16_values_are_exact(tmp_path: Path) -> None:
    """Half precision widens to float32 without loss."""
    values = [0.5, -1.25, 65504.0, 0.0]
    assert dequantised(tmp_path, RawTensor((4,), 1, struct.pack("<4e", *values))) == values


def test_an_unknown_tensor_type_is_refused(tmp_path: Path) -> None:
    """A type that is not converted is named together with those that are."""
    with pytest.raises(GgufError, match=r"x is of GGML type 14; only F32, F16, Q4_1, Q8_0"):
        dequantised(tmp_path, RawTensor((256,), 14, bytes(210)))


def test_a_part_of_a_block_is_refused(tmp_path: Path) -> None:
    """31 values are no Q8_0 block."""
    with pytest.raises(GgufError, match="31 values"):
        dequantised(tmp_path, RawTensor((31,), 8, bytes(34)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "ends after the"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0), "damaged or cut off"),
    ],
)
def test_a_damaged_header_is_an_error_with_its_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    """What is no whole GGUF file is refused and says why."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=reason):
        GgufFile(path)


def test_a_file_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    """No prefix of a file is taken for a whole one: header or tensor is reported as cut off."""
    whole = tiny_llama_gguf()
    path = tmp_path / "cut.gguf"
    for length in range(4, len(whole) - 64, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(GgufError):
            read_all(path)


def read_all(path: Path) -> None:
    with GgufFile(path) as file:
        for tensor in file.tensors:
            file.dequantise(tensor)

"""Writing safetensors: other programs read back what was meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from splitserve.orchestrator.models.safetensors_file import bfloat16_bytes, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.models.safetensors_file import StoredType


@pytest.mark.parametrize("stored_as", ["float32", "bfloat16"])
def test_the_reference_library_reads_it(tmp_path: Path, stored_as: StoredType) -> None:
    """Names, shapes, type and values are those that were written."""
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([0.5, -2.0], dtype=np.float32),
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "m.safetensors", shapes, tensors.__getitem__, stored_as)
    loaded = load_file(tmp_path / "m.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in loaded.items():
        assert tensor.dtype == getattr(torch, stored_as)
        assert tensor.float().numpy().tolist() == tensors[name].tolist()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    """To nearest, ties to even, infinities kept: bit for bit what torch makes of them."""
    array = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(array.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    assert bfloat16_bytes(array) == expected.tobytes()


def test_a_tensor_of_another_shape_than_announced_is_refused(tmp_path: Path) -> None:
    """The header is written first, so a wrong shape would shift every tensor after it."""
    with pytest.raises(ValueError, match="announced"):
        write_safetensors(
            tmp_path / "m.safetensors", {"a": (3,)}, lambda _: np.zeros(2, np.float32), "float32"
        )

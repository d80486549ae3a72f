"""Writes a safetensors file without torch: a length, a JSON header, then the tensors' bytes back
to back.

Format: https://huggingface.co/docs/safetensors. numpy has no bfloat16, so the rounding to it is
here: to nearest, ties to even, as torch does. Tensors are asked for one at a time, in the order of
their names, so the whole model is never in memory.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from splitserve.orchestrator.models.gguf import Float32Array

StoredType = Literal["bfloat16", "float32"]
_NAMES = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    values: Callable[[str], Float32Array],
    stored_as: StoredType,
) -> None:
    """Write one tensor per name of ``shapes`` to ``path``, taking its float32 values from
    ``values(name)``.
    """
    type_name, width = _NAMES[stored_as]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(shapes):
        length = int(np.prod(shapes[name], dtype=np.int64)) * width
        header[name] = {
            "dtype": type_name,
            "shape": list(shapes[name]),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in sorted(shapes):
            tensor = values(name)
            if tensor.shape != shapes[name]:
                raise ValueError(f"{name}: shape {tensor.shape}, announced {shapes[name]}")
            file.write(bfloat16_bytes(tensor) if stored_as == "bfloat16" else tensor.tobytes())


def bfloat16_bytes(tensor: Float32Array) -> bytes:
    """The values rounded to bfloat16 (to nearest, ties to even), little endian. No NaN may be
    among them.
    """
    bits = np.ascontiguousarray(tensor, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype("<u2").tobytes()

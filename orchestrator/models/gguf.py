"""Reads GGUF, llama.cpp's file format: named metadata, then tensors, some of them quantised.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is mapped, not read: a
tensor's bytes are touched when it is dequantised, one at a time, so converting takes little more
memory than the largest tensor.

Only the tensor types that the catalogue's models use are dequantised: F32, F16, Q8_0 and Q4_1. Both
quantised types hold blocks of 32 values: ``value = scale * q`` (Q8_0, q signed) and ``value = scale
* q + minimum`` (Q4_1, q in 0..15; the first 16 values of a block are the low halves of its 16
bytes, the last 16 the high halves).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from splitserve.orchestrator.models.errors import GgufError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Float32Array = npt.NDArray[np.float32]

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_DIMENSIONS_LIMIT = 4
_BLOCK_VALUES = 32


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it looks like once dequantised."""

    name: str
    shape: tuple[int, ...]
    """Slowest axis first, as numpy and torch count."""
    kind: int
    offset: int
    """Bytes from the start of the file."""


class GgufFile:
    """A mapped GGUF file: ``metadata`` and ``tensors`` are read at once, values on demand. Close
    it after use.
    """

    def __init__(self, path: Path) -> None:
        """Map ``path`` and read its header; raises ``GgufError`` when that is not a whole GGUF
        file.
        """
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise GgufError(f"{path} is empty") from None
        try:
            self.metadata, self.tensors = _read_header(self._map)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            self.close()
            raise GgufError(f"the header of {path} is damaged or cut off: {error}") from error
        except GgufError as error:
            self.close()
            raise GgufError(f"{path}: {error}") from None

    def close(self) -> None:
        """Unmap the file; arrays that ``dequantise`` returned stay valid."""
        self._map.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def dequantise(self, tensor: TensorInfo) -> Float32Array:
        """The tensor's values as float32 in its shape, in fresh memory."""
        if tensor.kind not in _KINDS:
            known = ", ".join(kind.name for kind in _KINDS.values())
            raise GgufError(
                f"{tensor.name} is of GGML type {tensor.kind}; only {known} are converted"
            )
        kind = _KINDS[tensor.kind]
        values = int(np.prod(tensor.shape, dtype=np.int64))
        if values % kind.values:
            raise GgufError(
                f"{tensor.name} has {values} values, which do not fill {kind.name} blocks"
            )
        length = values // kind.values * kind.nbytes
        if tensor.offset + length > len(self._map):
            raise GgufError(f"{self.path} is cut off: {tensor.name} ends after the file does")
        raw = np.frombuffer(self._map[tensor.offset : tensor.offset + length], dtype=np.uint8)
        return kind.decode(raw.reshape(-1, kind.nbytes)).reshape(tensor.shape)


@dataclass(frozen=True)
class _Kind:
    name: str
    values: int
    """Values in one block."""
    nbytes: int
    """Bytes of one block."""
    decode: Callable[[npt.NDArray[np.uint8]], Float32Array]
    """[blocks, bytes] -> float32, any shape with the right count."""


def _half(blocks: npt.NDArray[np.uint8], at: int) -> Float32Array:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)  # [blocks, 1]


def _decode_f32(blocks: npt.NDArray[np.uint8]) -> Float32Array:
    return blocks.copy().view(np.float32)


def _decode_f16(blocks: npt.NDArray[np.uint8]) -> Float32Array:
    return blocks.copy().view(np.float16).astype(np.float32)


def _decode_q8_0(blocks: npt.NDArray[np.uint8]) -> Float32Array:
    values: Float32Array = _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)
    return values


def _decode_q4_1(blocks: npt.NDArray[np.uint8]) -> Float32Array:
    packed = blocks[:, 4:]
    quants = np.concatenate([packed & 0x0F, packed >> 4], axis=1)  # [blocks, 32]
    values: Float32Array = _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)
    return values


_KINDS = {
    0: _Kind("F32", 1, 4, _decode_f32),
    1: _Kind("F16", 1, 2, _decode_f16),
    3: _Kind("Q4_1", _BLOCK_VALUES, 20, _decode_q4_1),
    8: _Kind("Q8_0", _BLOCK_VALUES, 34, _decode_q8_0),
}


class _Cursor:
    """Reads one value after the other from the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self.position)
        self.position += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        end = self.position + length
        if end > len(self._data):
            raise GgufError(
                f"a string of {length} bytes at byte {self.position} ends after the file does"
            )
        text = self._data[self.position : end].decode("utf-8")
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("<I"), self.scalar("<Q")
            if count > len(self._data):
                raise GgufError(
                    f"an array of {count} items at byte {self.position} ends after the file does"
                )
            return [self.value(item_kind) for _ in range(count)]
        raise GgufError(f"metadata of unknown type {kind} at byte {self.position}")


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], tuple[TensorInfo, ...]]:
    if data[:4] != b"GGUF":
        raise GgufError("not a GGUF file (its first four bytes are not 'GGUF')")
    cursor = _Cursor(data)
    cursor.position = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version} is not read, only 2 and 3")
    tensor_count, metadata_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(metadata_count)}
    infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.position // alignment) * alignment
    return metadata, tuple(
        TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in infos
    )


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.string(), cursor.scalar("<I")
    if dimensions > _DIMENSIONS_LIMIT:
        raise GgufError(f"tensor {name} has {dimensions} dimensions")
    fastest_first = [cursor.scalar("<Q") for _ in range(dimensions)]
    return name, tuple(reversed(fastest_first)), cursor.scalar("<I"), cursor.scalar("<Q")

"""``quantise.dequantise_rows`` in one pass over memory, compiled by numba where it is there.

An engine has numba, for vLLM needs it; a process without it takes the plain reference, which gives
the same bytes. The first call compiles, which takes about a second: ``warm_up`` does that before
anybody waits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.kernels.quantise import QuantisedRows, dequantise_rows, widened

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Fill = Callable[..., None]

_COMPILED = {"bfloat16": np.uint16, "float32": np.float32}
"""Kinds of numbers that are compiled, and what their bytes are taken for."""


def dequantise_quickly(quantised: QuantisedRows, number: str, out: npt.NDArray[np.uint8]) -> None:
    """As ``quantise.dequantise_rows``, to the bit."""
    fill = _compiled(number)
    if fill is None:
        dequantise_rows(quantised, number, out)
        return
    keys, key_scales, means, values, value_scales = quantised
    wide = widened(key_scales)
    offsets = np.zeros_like(wide) if means is None else widened(means)
    fill(
        keys, wide, offsets, means is not None, values, widened(value_scales),
        out.view(_COMPILED[number]),
    )  # fmt: skip


def warm_up(number: str) -> None:
    """Numbers of that kind are decoded without waiting for a compiler from now on."""
    shape = (1, 1, 1)
    small, scales = np.zeros(shape, np.int8), np.zeros(shape, np.uint16)
    rows = QuantisedRows(small, scales, scales, small, scales)
    if number in _COMPILED:
        size = 2 * np.dtype(_COMPILED[number]).itemsize
        dequantise_quickly(rows, number, np.zeros((1, 1, size), np.uint8))


@lru_cache(maxsize=8)
def _compiled(number: str) -> Fill | None:
    """Compiled for that kind; None where it is not, or there is no numba."""
    if number not in _COMPILED:
        return None
    try:
        import numba
    except ImportError:
        return None
    compiled: Any = numba.njit(nogil=True, cache=False)
    finish = compiled(_half if number == "bfloat16" else _whole)

    def fill(  # type: ignore[no-untyped-def]
        keys, key_scales, offsets, is_centred, values, value_scales, out
    ):
        heads, tokens, key_items = keys.shape
        value_items = values.shape[2]
        for head in range(heads):
            for token in range(tokens):
                for item in range(key_items):
                    number = np.float32(keys[head, token, item]) * key_scales[head, 0, item]
                    if is_centred:
                        number = number + offsets[head, 0, item]
                    out[head, token, item] = finish(number)
                scale = value_scales[head, token, 0]
                for item in range(value_items):
                    number = np.float32(values[head, token, item]) * scale
                    out[head, token, key_items + item] = finish(number)

    made: Fill = compiled(fill)
    return made


def _half(number: Any) -> Any:
    """The upper half nearest to a float32, ties to even."""
    bits = np.float32(number).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
                     >> np.uint32(16))  # fmt: skip


def _whole(number: Any) -> Any:
    return number

"""The kernels of ``triton_quantise.py`` and ``triton_dequantise.py`` compiled for a GPU that need
not be there, in a process of its own (``triton_program.py`` says why). Prints one JSON line: for
each kernel and kind of number how often each way of rounding stands in its PTX.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from splitserve.kernels.page_formats import PageFormat
from splitserve.kernels.quantise import SMALLEST_SCALE_BITS
from splitserve.kernels.triton_dequantise import dequantise_tiles, page_constants
from splitserve.kernels.triton_quantise import measure_channels, quantise_tiles

KINDS = {"rows": (torch.bfloat16, "*i16"), "vec": (torch.float16, "*fp16")}
ROUNDINGS = ("div.rn.f32", "div.full", "div.approx", "rcp", "fma", "ftz", "add.rn.f32")


def roundings(kernel: Any, number: str, constants: dict[str, Any]) -> dict[str, int]:
    """How often each one stands there."""
    kinds = {"keys": "*i8", "values": "*i8", "key_scales": "*fp32", "key_means": "*fp32"}
    kinds |= {"value_scales": "*fp32", "memory": number, "sinks": number, "block_ids": "*i32"}
    kinds["can_be_quantised"] = "*i32"
    names = kernel.arg_names
    used = {name: value for name, value in constants.items() if name in names}
    signature = {n: "constexpr" if n in used else kinds.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, constexprs=used)
    options = {"enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {rounding: made.asm["ptx"].count(rounding) for rounding in ROUNDINGS}


def main() -> dict[str, dict[str, int]]:
    """What is printed."""
    found = {}
    for order, (dtype, number) in KINDS.items():
        page_format = PageFormat(16, 128, 128, dtype.itemsize, order)
        constants = page_constants(torch.zeros((1, 1, 16, 256), dtype=dtype), page_format) | {
            "TOKENS": 256, "SINKS": 4, "LIMIT": 6e4, "LEVELS": 15, "CENTRED": True,
            "SMALLEST_SCALE_BITS": SMALLEST_SCALE_BITS,
        }  # fmt: skip
        for kernel in (measure_channels, quantise_tiles, dequantise_tiles):
            found[f"{kernel.__name__}, {order}"] = roundings(kernel, number, constants)
    return found


print(json.dumps(main()))

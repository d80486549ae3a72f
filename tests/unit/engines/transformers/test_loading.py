"""What the engine says of its pages is what vLLM says of the same model's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from splitserve.orchestrator.engines.transformers.fingerprint import engine_fingerprint
from splitserve.orchestrator.engines.transformers.loading import page_isa, read_shape

if TYPE_CHECKING:
    from pathlib import Path


def shape(dtype: torch.dtype, head_items: int) -> Any:
    return SimpleNamespace(dtype=dtype, head_items=head_items)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_tokens", [16, 32, 48, 128])
@pytest.mark.parametrize("head_items", [64, 80, 128])
def test_pages_are_in_vllms_order(dtype: torch.dtype, block_tokens: int, head_items: int) -> None:
    """For every type and size, on this machine's processor."""
    expected = _get_attn_isa(dtype, block_tokens, head_items)
    assert page_isa(shape(dtype, head_items), block_tokens, torch.device("cpu")) == expected


def test_a_gpu_has_plain_rows() -> None:
    """Tokens one after the other, key then value."""
    assert page_isa(shape(torch.bfloat16, 64), 16, torch.device("cuda", 0)) == "rows"


def test_other_weights_and_types_are_another_fingerprint(tiny_model: Path) -> None:
    """And so are other sizes of blocks; the same model is the same wherever it lies."""

    def told(dtype: str = "bfloat16", block_tokens: int = 32) -> dict[str, str]:
        found = read_shape(tiny_model, dtype)
        device = torch.device("cpu")
        return engine_fingerprint(
            tiny_model, found, block_tokens=block_tokens, isa="vec", device=device
        )

    assert told() == told()
    assert told()["dtype"] != told("float32")["dtype"]
    assert told()["block_size"] != told(block_tokens=64)["block_size"]
    assert told("auto")["dtype"] == "float32"

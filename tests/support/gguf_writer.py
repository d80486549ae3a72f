"""Writes small GGUF files for tests, from the format's description and not from the reader under
test.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALIGNMENT = 32


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it lies in the file; ``shape`` has the slowest axis first."""

    shape: tuple[int, ...]
    kind: int
    data: bytes


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> bytes:
    """A whole GGUF version 3 file. Python's int becomes u32, float f32, list an array of its first
    item's type.
    """
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, encoded = _value(value)
        head += _string(key) + struct.pack("<I", kind) + encoded
    body = b""
    for name, tensor in tensors.items():
        dimensions = tuple(reversed(tensor.shape))
        head += _string(name) + struct.pack("<I", len(dimensions))
        head += struct.pack(f"<{len(dimensions)}Q", *dimensions)
        head += struct.pack("<IQ", tensor.kind, len(body))
        body += _padded(tensor.data)
    return _padded(head) + body


def tiny_llama_gguf(changes: Mapping[str, Any] | None = None, without: str | None = None) -> bytes:
    """A Llama with one layer of two heads over four dimensions, and six tokens, all tensors F32.

    Row r of a matrix starts with r times the row's length. ``changes`` replace metadata,
    ``without`` leaves a key out.
    """
    shapes = {
        "token_embd.weight": (6, 8),
        "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8),
        "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.ffn_gate.weight": (12, 8),
        "blk.0.ffn_up.weight": (12, 8),
        "blk.0.ffn_down.weight": (8, 12),
    }
    tensors = {}
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = RawTensor(shape, 0, struct.pack(f"<{count}f", *range(count)))
    metadata = {**_TINY_LLAMA_METADATA, **(changes or {})}
    metadata.pop(without or "", None)
    return gguf_bytes(metadata, tensors)


_TINY_LLAMA_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "a", "b", "ab", "c", "<tool>"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    kind, _ = _value(value[0])
    return 9, struct.pack("<IQ", kind, len(value)) + b"".join(_value(item)[1] for item in value)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)

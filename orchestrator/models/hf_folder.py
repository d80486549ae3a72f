"""Makes a Hugging Face folder out of a Llama GGUF file with a byte-level BPE tokenizer.

Two things differ between the formats beside the names. llama.cpp rotates neighbouring pairs of a
head's dimensions where Hugging Face rotates the two halves of a head, so its converter permutes the
rows of the query and key projections; here that is undone (a model loads and runs without it too,
and speaks nonsense). And GGUF names the tokenizer's split rule instead of holding it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.models.errors import GgufError
from splitserve.orchestrator.models.safetensors_file import write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.models.gguf import Float32Array, GgufFile, TensorInfo

TensorsDone = Callable[[int, int], None]
"""Called with (tensors written, tensors in all)."""

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN, _USER_TOKEN = 3, 4
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_SPLIT_RULES: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {  # each digit by itself, then GPT-2's rule
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}


def write_hf_folder(source: GgufFile, folder: Path, tensors_done: TensorsDone) -> None:
    """Fill the existing empty ``folder`` with weights (bfloat16), config, tokenizer and chat
    template.

    Raises ``GgufError`` for another architecture, tokenizer or tensor than is converted here.
    """
    architecture, tokenizer = (
        source.metadata.get("general.architecture"),
        source.metadata.get("tokenizer.ggml.model"),
    )
    if architecture != "llama" or tokenizer != "gpt2":
        raise GgufError(
            f"{source.path}: only Llama with byte-level BPE is converted, "
            f"not {architecture}/{tokenizer}"
        )
    try:
        vocab_size, tied = _write_weights(source, folder, tensors_done)
        _write_config(source.metadata, folder, vocab_size, tied)
        _write_tokenizer(source.metadata, folder)
    except (KeyError, IndexError) as error:
        raise GgufError(f"{source.path} lacks {error}") from error


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor: ``blk.3.attn_q.weight`` ->
    ``model.layers.3.self_attn.q_proj.weight``.
    """
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _LAYER_NAMES:
        raise GgufError(f"tensor {gguf_name} has no place in a Llama model")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def halves_from_pairs(rows: Float32Array, heads: int) -> Float32Array:
    """Reorder a projection's rows, head by head, from rotated neighbours (0 1 | 2 3 ...) to
    rotated halves (0 2 ... | 1 3 ...).
    """
    head_dim = rows.shape[0] // heads
    by_pair = rows.reshape(heads, head_dim // 2, 2, rows.shape[1])  # [heads, pairs, 2, hidden]
    return by_pair.swapaxes(1, 2).reshape(rows.shape)


def _write_weights(source: GgufFile, folder: Path, tensors_done: TensorsDone) -> tuple[int, bool]:
    """Write model.safetensors; return the vocabulary's size and whether the output shares the
    embedding's weights.
    """
    heads = {
        "attn_q": int(source.metadata["llama.attention.head_count"]),
        "attn_k": int(source.metadata["llama.attention.head_count_kv"]),
    }
    by_name: dict[str, TensorInfo] = {hf_name(tensor.name): tensor for tensor in source.tensors}
    done = 0

    def values(name: str) -> Float32Array:
        nonlocal done
        tensor = by_name[name]
        rows = source.dequantise(tensor)
        part = tensor.name.split(".")[-2]
        if part in heads:
            rows = halves_from_pairs(rows, heads[part])
        done += 1
        tensors_done(done, len(by_name))
        return rows

    shapes = {name: tensor.shape for name, tensor in by_name.items()}
    write_safetensors(folder / "model.safetensors", shapes, values, "bfloat16")
    return shapes["model.embed_tokens.weight"][0], "lm_head.weight" not in shapes


def _token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    eos = int(metadata["tokenizer.ggml.eos_token_id"])
    return {
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": eos,
        "pad_token_id": int(metadata.get("tokenizer.ggml.padding_token_id", eos)),
    }


def _write_config(metadata: dict[str, Any], folder: Path, vocab_size: int, tied: bool) -> None:
    heads = int(metadata["llama.attention.head_count"])
    hidden = int(metadata["llama.embedding_length"])
    token_ids = _token_ids(metadata)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **token_ids,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "max_position_embeddings": int(metadata["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "pretraining_tp": 1,
        # stored as float32: six digits give back the number that was meant
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    rule = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if rule not in _SPLIT_RULES:
        raise GgufError(
            f"the tokenizer's split rule {rule!r} is not known; known: {', '.join(_SPLIT_RULES)}"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    added = [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": kind == _USER_TOKEN,
            "special": kind == _CONTROL_TOKEN,
        }
        for token_id, kind in enumerate(kinds)
        if kind in (_CONTROL_TOKEN, _USER_TOKEN)
    ]
    merges = [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]]
    write_json(folder / "tokenizer.json", bpe_tokenizer(tokens, merges, added, _SPLIT_RULES[rule]))

    ids = _token_ids(metadata)
    names = {key.removesuffix("_id"): tokens[token_id] for key, token_id in ids.items()}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is not None:
        names["unk_token"] = tokens[int(unknown)]
    write_json(folder / "special_tokens_map.json", names)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(metadata["llama.context_length"]),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        **names,
    }
    template = metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)


def bpe_tokenizer(
    tokens: list[str],
    merges: list[list[str]],
    added: list[dict[str, Any]],
    split_rule: dict[str, Any],
) -> dict[str, Any]:
    """The contents of a ``tokenizer.json`` for byte-level BPE: a token's id is its index in
    ``tokens``.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": split_rule,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def write_json(path: Path, content: object) -> None:
    """Write ``content`` as indented UTF-8 JSON with a final newline."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

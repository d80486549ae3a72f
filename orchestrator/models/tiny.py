"""A tiny random Llama whose tokens are bytes: made in a blink, fast on one core, useless for what
it says.

It exists so that tests can move real KV through real engines in seconds. Its weights are drawn so
that the text says something about the transfer: attention is sharp and weighs as much as the
residual, so one wrong page changes the answer; and the rows of the output layer that are not
printable ASCII are zero, so an answer is readable text, one character a token, that ends by its
length.

Ids 0 to 255 are the bytes; then ``<|im_start|>`` (also the beginning of a sequence), ``<|im_end|>``
(also the end of one), ``<|pad|>``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splitserve.orchestrator.models.hf_folder import bpe_tokenizer, write_json
from splitserve.orchestrator.models.safetensors_file import write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from splitserve.orchestrator.models.gguf import Float32Array

IM_START, IM_END, PAD = 256, 257, 258
_SPECIAL = {IM_START: "<|im_start|>", IM_END: "<|im_end|>", PAD: "<|pad|>"}
_VOCAB_SIZE = 259
_PRINTABLE = range(0x20, 0x7F)
_SHARPNESS = 1.7
"""Gain on queries and keys: attention scores get a spread of about its square, so that a few
tokens win.
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """The shape of a tiny model. Heads divide over two ranks, so tensor parallelism works with 1
    and 2.
    """

    layers: int = 8
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 128
    max_position: int = 8192
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Write the model into ``folder`` (made if missing) and return it; equal shapes and seeds
        give equal bytes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        shapes = self._shapes()
        draw = np.random.default_rng(self.seed)
        tensors = {name: self._tensor(name, shape, draw) for name, shape in shapes.items()}
        write_safetensors(folder / "model.safetensors", shapes, tensors.__getitem__, "float32")
        self._write_config(folder)
        write_byte_tokenizer(folder, self.max_position)
        return folder

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (_VOCAB_SIZE, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (_VOCAB_SIZE, self.hidden),
        }
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes |= {
                f"{at}.input_layernorm.weight": (self.hidden,),
                f"{at}.self_attn.q_proj.weight": (query, self.hidden),
                f"{at}.self_attn.k_proj.weight": (key_value, self.hidden),
                f"{at}.self_attn.v_proj.weight": (key_value, self.hidden),
                f"{at}.self_attn.o_proj.weight": (self.hidden, query),
                f"{at}.post_attention_layernorm.weight": (self.hidden,),
                f"{at}.mlp.gate_proj.weight": (self.mlp, self.hidden),
                f"{at}.mlp.up_proj.weight": (self.mlp, self.hidden),
                f"{at}.mlp.down_proj.weight": (self.hidden, self.mlp),
            }
        return shapes

    def _tensor(self, name: str, shape: tuple[int, ...], draw: np.random.Generator) -> Float32Array:
        if "norm" in name:
            return np.ones(shape, dtype=np.float32)
        if "embed_tokens" in name:
            return draw.standard_normal(shape, dtype=np.float32)
        values = draw.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[1]))
        if "q_proj" in name or "k_proj" in name:
            values *= np.float32(_SHARPNESS)
        if name == "lm_head.weight":
            printable = np.zeros((_VOCAB_SIZE, 1), dtype=np.float32)
            printable[_PRINTABLE.start : _PRINTABLE.stop] = 3.0  # logits spread over about +-3
            values *= printable
        return values

    def _write_config(self, folder: Path) -> None:
        ids = {"bos_token_id": IM_START, "eos_token_id": IM_END, "pad_token_id": PAD}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            **ids,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.mlp,
            "max_position_embeddings": self.max_position,
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": _VOCAB_SIZE,
        }
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE uses for each of the 256 bytes: itself when printable,
    else one from U+0100 on.

    It is GPT-2's alphabet: https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def write_byte_tokenizer(folder: Path, max_position: int) -> None:
    """A Hugging Face tokenizer and chat template in ``folder``: a token for each byte."""
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    added = [
        {"id": token_id, "content": content, **flags} for token_id, content in _SPECIAL.items()
    ]
    split_rule = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokens = [*byte_alphabet(), *_SPECIAL.values()]
    write_json(folder / "tokenizer.json", bpe_tokenizer(tokens, [], added, split_rule))
    names = {
        "bos_token": _SPECIAL[IM_START],
        "eos_token": _SPECIAL[IM_END],
        "pad_token": _SPECIAL[PAD],
    }
    write_json(folder / "special_tokens_map.json", names)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_position,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            **names,
            "chat_template": CHAT_TEMPLATE,
        },
    )

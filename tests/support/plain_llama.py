"""A reference forward pass over a Llama folder, whose keys and values a test can change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

PAGE_TOKENS = 128


class PlainLlama:
    """Float32, one sequence, greedy; holds the KV of the last call in ``cache``, [tokens, heads,
    dim].
    """

    def __init__(self, folder: Path) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.layers: list[dict[str, torch.Tensor]] = [
            {
                name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
                for name, tensor in self.weights.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            for layer in range(self.config["num_hidden_layers"])
        ]
        self.cache: list[list[torch.Tensor]] = []

    def greedy(
        self, prompt: list[int], count: int, lost: tuple[int, int] | None = None
    ) -> list[int]:
        """The next ``count`` tokens; ``lost`` = (layer, page): as if that page came as zeros."""
        self.cache = [[] for _ in self.layers]
        self._forward(prompt[:-1], 0)
        if lost:
            layer, page = lost
            for part in self.cache[layer]:
                part[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = 0
        tokens = [prompt[-1]]
        for position in range(len(prompt) - 1, len(prompt) - 1 + count):
            tokens.append(self._forward(tokens[-1:], position))
        return tokens[1:]

    def _forward(self, tokens: list[int], start: int) -> int:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        x = self.weights["model.embed_tokens.weight"][tokens]  # [tokens, hidden]
        positions = torch.arange(start, start + len(tokens))
        for layer, weight in enumerate(self.layers):
            h = normed(x)
            query = rotated(
                (h @ weight["self_attn.q_proj"].T).unflatten(-1, (heads, -1)), positions
            )
            key = rotated(
                (h @ weight["self_attn.k_proj"].T).unflatten(-1, (kv_heads, -1)), positions
            )
            value = (h @ weight["self_attn.v_proj"].T).unflatten(-1, (kv_heads, -1))
            if self.cache[layer]:
                key = torch.cat([self.cache[layer][0], key])
                value = torch.cat([self.cache[layer][1], value])
            self.cache[layer] = [key, value]
            attended = torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                attn_mask=torch.arange(len(key)) <= positions[:, None],
                enable_gqa=True,
            )  # [heads, tokens, dim]
            x = x + attended.transpose(0, 1).flatten(1) @ weight["self_attn.o_proj"].T
            h = normed(x)
            gate = torch.nn.functional.silu(h @ weight["mlp.gate_proj"].T)
            x = x + (gate * (h @ weight["mlp.up_proj"].T)) @ weight["mlp.down_proj"].T
        return int((normed(x[-1]) @ self.weights["lm_head.weight"].T).argmax())


def normed(x: torch.Tensor) -> torch.Tensor:
    """Root-mean-square norm with weights of one, which is what the tiny model has."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding over the two halves of each head; ``x`` is [tokens, heads, dim]."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = positions[:, None, None] * frequency  # [tokens, 1, half]
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

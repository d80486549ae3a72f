"""LoRA adapters of the tiny model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

RANK = 8
MODULES = ("q_proj", "v_proj")


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """An adapter that changes the KV, and the answers, of the model in ``model``; another seed
    gives another one. Returns its folder.
    """
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(tuple(f"{module}.weight" for module in MODULES)):
            out, into = weight.shape
            base = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(RANK, into, generator=draw) / into**0.5
            tensors[f"{base}.lora_B.weight"] = torch.randn(out, RANK, generator=draw) / RANK**0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

"""Converting a Llama GGUF file to a Hugging Face folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import load_file
from support.gguf_writer import tiny_llama_gguf
from tokenizers import Tokenizer

from splitserve.orchestrator.models.errors import GgufError
from splitserve.orchestrator.models.gguf import GgufFile
from splitserve.orchestrator.models.hf_folder import halves_from_pairs, hf_name, write_hf_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder made from the tiny Llama GGUF file."""
    return convert(tiny_llama_gguf(), tmp_path_factory.mktemp("convert"))


def convert(
    content: bytes, base: Path, tensors_done: Callable[[int, int], None] = lambda done, total: None
) -> Path:
    """The folder under ``base`` made from a GGUF file with that content."""
    (base / "m.gguf").write_bytes(content)
    folder = base / "out"
    folder.mkdir()
    with GgufFile(base / "m.gguf") as source:
        write_hf_folder(source, folder, tensors_done)
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_names_are_translated() -> None:
    """Each GGUF name has its Hugging Face name; one without a place is refused."""
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    with pytest.raises(GgufError, match=r"blk\.0\.attn_sinks"):
        hf_name("blk.0.attn_sinks.weight")


def test_rotated_neighbours_become_rotated_halves() -> None:
    """Within each head the even rows come first, then the odd ones."""
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert halves_from_pairs(rows, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_config_describes_the_model(folder: Path) -> None:
    """Sizes and ids are the file's own; the epsilon is the decimal number that was meant."""
    config = read(folder, "config.json")
    expected = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 12,
        "vocab_size": 6,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    assert {key: config[key] for key in expected} == expected


def test_the_tokenizer_merges_splits_digits_and_keeps_special_tokens(folder: Path) -> None:
    """Merges apply, control and user-defined tokens stay whole, and ids are the file's."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abc<|end|>").ids == [3, 4, 0]
    assert tokenizer.encode("a<tool>b").ids == [1, 5, 2]
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    """Every tensor is reported once."""
    heard: list[tuple[int, int]] = []
    convert(tiny_llama_gguf(), tmp_path, lambda *progress: heard.append(progress))
    assert heard == [(done, 11) for done in range(1, 12)]


def test_query_rows_are_reordered_and_value_rows_are_not(folder: Path) -> None:
    """Only the projections that are rotated change their order of rows."""
    weights = load_file(folder / "model.safetensors")
    first_column = {
        part: weights[f"model.layers.0.self_attn.{part}_proj.weight"][:, 0].int().tolist()
        for part in ("q", "k", "v")
    }
    assert first_column == {
        "q": [0, 16, 8, 24, 32, 48, 40, 56],
        "k": [0, 16, 8, 24],
        "v": [0, 8, 16, 24],
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "qwen3"}, "not qwen3/gpt2"),
        ({"tokenizer.ggml.model": "llama"}, "not llama/llama"),
        ({"tokenizer.ggml.pre": "other"}, "split rule 'other'"),
    ],
)
def test_another_kind_of_model_is_refused(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    """What the converter does not know it names instead of guessing."""
    with pytest.raises(GgufError, match=reason):
        convert(tiny_llama_gguf(change), tmp_path)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    """A file that lacks what the conversion needs is an error that names the key."""
    with pytest.raises(GgufError, match=r"lacks 'llama\.block_count'"):
        convert(tiny_llama_gguf(without="llama.block_count"), tmp_path)

"""What is seen of a model's folder before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from splitserve.orchestrator.models.errors import ModelError
from splitserve.orchestrator.models.folder_facts import (
    DEFAULTS_JSON,
    TOKENIZER_JSON,
    broken_json,
    has_chat_template,
    has_tokenizer,
    mismatches,
    read_facts,
    weight_bytes,
    weight_problems,
)

if TYPE_CHECKING:
    from pathlib import Path

ALL_JSON = (*TOKENIZER_JSON, *DEFAULTS_JSON)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def change(folder: Path, **values: Any) -> None:
    """Other values in `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_whole_model(folder: Path) -> None:
    """Its shape, and nothing to complain of."""
    facts = read_facts(folder)
    assert facts.kv_bytes_per_token(4) == 2 * 8 * 2 * 32 * 4
    assert (facts.max_position, facts.dtype) == (8192, "float32")
    assert list(weight_problems(folder)) == []
    assert has_tokenizer(folder)
    assert has_chat_template(folder)
    assert list(mismatches(folder, facts)) == []
    assert list(broken_json(folder, ALL_JSON)) == []
    assert weight_bytes(folder) == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_weights_that_are_cut_off(folder: Path, length: int) -> None:
    """Wherever the end is: in the length, in the header, in a tensor."""
    path = folder / "model.safetensors"
    os.truncate(path, length if length >= 0 else path.stat().st_size + length)
    (problem,) = weight_problems(folder)
    assert problem.startswith(str(path))


@pytest.mark.parametrize("begin", [b"\xff" * 16, b"\x02" + bytes(7) + b"[]", b"not weights at all"])
def test_weights_that_are_something_else(folder: Path, begin: bytes) -> None:
    """A download that was an error page, say."""
    (folder / "model.safetensors").write_bytes(begin)
    (problem,) = weight_problems(folder)
    assert "is damaged" in problem


def test_a_shard_that_is_missing(folder: Path) -> None:
    """It is named; the index says that it should be there."""
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = weight_problems(folder)
    assert "model-2.safetensors is missing" in problem


def test_no_weights(folder: Path) -> None:
    """The kinds that are looked for are named."""
    (folder / "model.safetensors").unlink()
    (problem,) = weight_problems(folder)
    assert "*.safetensors" in problem


@pytest.mark.parametrize(
    "values",
    [
        {"kv_lora_rank": 512},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"num_kv_shared_layers": 2},
    ],
)
def test_kv_of_another_form(folder: Path, values: dict[str, Any]) -> None:
    """Its size is not guessed."""
    change(folder, **values)
    assert read_facts(folder).kv_bytes_per_token(4) is None


def test_scaled_positions(folder: Path) -> None:
    """Then nobody knows the longest prompt from the number alone."""
    change(folder, rope_scaling={"type": "yarn", "factor": 4.0})
    assert read_facts(folder).max_position is None


def test_a_config_that_is_none(folder: Path) -> None:
    """The file is named."""
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_facts(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 10}, "the weights have 8 layers, config.json says 10"),
        ({"head_dim": 20}, "has 64 rows, config.json says 2 KV heads of 20"),
    ],
)
def test_weights_of_another_config(folder: Path, values: dict[str, Any], words: str) -> None:
    """Both numbers are told."""
    change(folder, **values)
    (problem,) = mismatches(folder, read_facts(folder))
    assert words in problem


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_file_that_is_cut_off(folder: Path, name: str) -> None:
    """It is named."""
    (folder / name).write_text((folder / name).read_text()[:40])
    (problem,) = broken_json(folder, ALL_JSON)
    assert name in problem

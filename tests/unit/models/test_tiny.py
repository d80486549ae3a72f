"""The tiny model: its files, its tokenizer, and that its answers depend on their whole context."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from safetensors.torch import load_file
from support.plain_llama import PAGE_TOKENS, PlainLlama
from tokenizers import Tokenizer

from splitserve.orchestrator.models.tiny import IM_END, IM_START, TinyModel, byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama(tiny_model: Path) -> Iterator[PlainLlama]:
    """The tiny model on one thread: more wait longer for each other than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield PlainLlama(tiny_model)
    torch.set_num_threads(threads)


def test_equal_seeds_give_equal_bytes(tiny_model: Path, tmp_path: Path) -> None:
    """The same shape and seed make the same files, another seed other weights."""
    again, other = TinyModel().write(tmp_path / "a"), TinyModel(seed=1).write(tmp_path / "b")
    for file in tiny_model.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (again / weights).read_bytes()


def test_the_config_fits_the_weights(tiny_model: Path) -> None:
    """Heads divide over two ranks, and every tensor has the shape that the config implies."""
    config = json.loads((tiny_model / "config.json").read_text())
    weights = load_file(tiny_model / "model.safetensors")
    assert config["num_attention_heads"] % 2 == config["num_key_value_heads"] % 2 == 0
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    key = weights[f"model.layers.{config['num_hidden_layers'] - 1}.self_attn.k_proj.weight"]
    assert key.shape == (config["num_key_value_heads"] * config["head_dim"], config["hidden_size"])


@given(st.text())
def test_every_text_is_its_utf8_bytes(tokenizer: Tokenizer, text: str) -> None:
    """Token ids are the bytes of the text, and decoding gives the text back."""
    text = text.replace("<|", "")
    encoded = tokenizer.encode(text)
    assert encoded.ids == list(text.encode())
    assert tokenizer.decode(encoded.ids) == text


def test_the_byte_alphabet_has_256_different_characters() -> None:
    """No two bytes share a character, and printable ASCII stands for itself."""
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("a")] == "a"


def test_the_chat_template_marks_each_turn(tiny_model: Path, tokenizer: Tokenizer) -> None:
    """A conversation becomes turns between start and end tokens, then the assistant's opening."""
    template = Template((tiny_model / "chat_template.jinja").read_text())
    text = template.render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text).ids == [
        IM_START,
        *b"user\nhi",
        IM_END,
        *b"\n",
        IM_START,
        *b"assistant\n",
    ]


def test_answers_are_printable_and_do_not_end_by_themselves(llama: PlainLlama) -> None:
    """Each token is one printable ASCII character, so an answer's length is the asked one."""
    answer = llama.greedy([IM_START, *b"user\nhello", IM_END], 64)
    assert all(0x20 <= token < 0x7F for token in answer)
    assert len(set(answer)) > 8


def test_one_lost_page_changes_nearly_every_answer(llama: PlainLlama) -> None:
    """A zeroed page of any layer shows in 32 tokens: what makes the tiny model a witness."""
    draw = random.Random(5)
    changed = 0
    for _ in range(3):
        prompt = [draw.randrange(0x20, 0x7F) for _ in range(3 * PAGE_TOKENS + 40)]
        expected = llama.greedy(prompt, 32)
        for layer in (0, 4, 7):
            for page in (0, 3):
                changed += llama.greedy(prompt, 32, lost=(layer, page)) != expected
    assert changed >= 16  # of 18

"""What tells prompts with the same tokens apart, beside the model."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.cache.keys import Media
from splitserve.orchestrator.engines.vllm.cache_half import prompt_identity

if TYPE_CHECKING:
    from pathlib import Path


def request(**fields: Any) -> Any:
    """A request of vLLM, as far as its identity goes."""
    plain = {"cache_salt": None, "lora_request": None, "mm_features": None, "prompt_embeds": None}
    return SimpleNamespace(**{**plain, **fields})


def with_adapter(name: str, path: Path) -> Any:
    """A request under an adapter."""
    return request(lora_request=SimpleNamespace(lora_name=name, lora_path=str(path)))


def adapter(folder: Path, content: bytes) -> Path:
    """An adapter's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def test_a_plain_prompt_has_no_identity_of_its_own() -> None:
    """Without salt, adapter and media there is nothing but the tokens."""
    found = prompt_identity(request())
    assert (found.salt, found.adapter, found.media, found.is_known) == ("", "", (), True)


def test_the_salt_and_the_media_count() -> None:
    """The salt as it was sent; each picture with its content's hash and place."""
    position = SimpleNamespace(offset=3, length=16)
    feature = SimpleNamespace(identifier="hash of a picture", mm_position=position)
    found = prompt_identity(request(cache_salt="mine", mm_features=[feature]))
    assert found.salt == "mine"
    assert found.media == (Media("hash of a picture", 3, 16),)


def test_prompts_given_as_embeddings_are_not_cached() -> None:
    """Their tokens do not say what they are."""
    assert not prompt_identity(request(prompt_embeds=object())).is_known


def test_adapters_differ_by_name_and_by_content(tmp_path: Path) -> None:
    """The same adapter is the same in every folder; another name or another content is not."""
    one, copy = adapter(tmp_path / "one", b"a" * 99), adapter(tmp_path / "copy", b"a" * 99)
    other = adapter(tmp_path / "other", b"b" * 99)
    first = prompt_identity(with_adapter("x", one)).adapter
    assert first
    assert prompt_identity(with_adapter("x", copy)).adapter == first
    assert prompt_identity(with_adapter("y", one)).adapter != first
    assert prompt_identity(with_adapter("x", other)).adapter != first


def test_another_adapter_in_an_old_folder_is_another_one(tmp_path: Path) -> None:
    """New content in the same file is noticed, also when its time of writing is an old one."""
    folder = adapter(tmp_path / "adapter", b"a" * 99)
    weights = folder / "adapter_model.safetensors"
    found = set()
    for content in (b"a", b"b", b"c"):
        weights.write_bytes(content * 99)
        os.utime(weights, ns=(1, 1))
        found.add(prompt_identity(with_adapter("x", folder)).adapter)
    assert len(found) == 3

"""What a vLLM engine does about its cache before the first request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.cache import keys
from splitserve.orchestrator.engines.vllm import cache_half

if TYPE_CHECKING:
    import pytest


def test_keys_are_compiled_before_the_first_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each prompt's keys would take several times as long."""
    monkeypatch.setattr(keys, "_compiled", None)
    for name in ("chunk_geometry", "LookupClient", "EngineCache"):
        monkeypatch.setattr(cache_half, name, lambda *_, **__: None)
    config: Any = SimpleNamespace(
        chunk_tokens=256, key_codec="raw", socket_path="", lookup_timeout_s=1.0
    )
    of_vllm: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
    cache_half.engine_cache(
        config, of_vllm, of_vllm, incarnation="e", fingerprint={}, pool=lambda: None
    )
    assert keys._compiled is not None

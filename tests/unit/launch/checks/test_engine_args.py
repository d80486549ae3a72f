"""Flags that the installed engine has, and pools that would not pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.config import load_with_contradictions
from splitserve.orchestrator.engines.vllm.known_flags import (
    known_architectures,
    known_flags,
    known_kv_cache_types,
)
from splitserve.orchestrator.launch.checks.engine_args import engine_args
from splitserve.orchestrator.launch.checks.fingerprints import fingerprints
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.finding import Severity

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = """
model: {path: m}
allow_shared_devices: true
prefill: {cpus: [[0]], PREFILL}
decode: {cpus: [[0]], DECODE}
"""

MakeSubject = Callable[..., Subject]


@pytest.fixture
def subject(tmp_path: Path) -> MakeSubject:
    """A vLLM cluster with these keys in its pools."""

    def make(prefill: str = "", decode: str = "") -> Subject:
        path = tmp_path / "cluster.yaml"
        path.write_text(CLUSTER.replace("PREFILL", prefill).replace("DECODE", decode))
        config, contradictions = load_with_contradictions(path)
        return Subject(config, {}, tuple(contradictions))

    return make


def test_the_engines_source_is_read() -> None:
    """Flags that splitserve itself sets, types of KV cache and classes of models are found."""
    expected = {"block_size", "kv_transfer_config", "max_num_seqs", "chat_template", "enable_lora"}
    assert expected <= known_flags()
    assert "disable_access_log_for_endpoints" in known_flags()
    assert {"auto", "bfloat16", "fp8"} <= known_kv_cache_types()
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= known_architectures()


@pytest.mark.parametrize(
    "flags",
    [
        "enable_lora: true, max_lora_rank: 8",
        "no_enable_prefix_caching: true",
        "enable-prefix-caching: false",
        "chat-template: x.jinja",
        "compilation-config.mode: 0",
        "seed: 3",
    ],
)
def test_flags_of_every_form(subject: MakeSubject, flags: str) -> None:
    """Underscores and dashes, negated, with a dot."""
    assert engine_args(subject(f"engine_args: {{{flags}}}")).problems == ()


def test_each_pool_is_looked_at_as_its_engine(subject: MakeSubject) -> None:
    """The transformers engine has flags of its own and lacks most of vLLM's."""
    assert (
        engine_args(subject(decode="engine: transformers, engine_args: {threads: 1}")).problems
        == ()
    )
    (problem,) = engine_args(
        subject(decode="engine: transformers, engine_args: {enable_lora: true}")
    ).problems
    assert problem.keys == ("decode.engine_args.enable_lora",)
    assert "the transformers engine has no flag --enable-lora" in problem.what
    (problem,) = engine_args(subject("engine_args: {threads: 1}")).problems
    assert "the installed vLLM has no flag --threads" in problem.what


def test_a_flag_that_does_not_exist(subject: MakeSubject) -> None:
    """Its key, and the one that is probably meant."""
    (problem,) = engine_args(subject(decode="engine_args: {swap_spaces: 3}")).problems
    assert problem.keys == ("decode.engine_args.swap_spaces",)
    assert "has no flag --swap-spaces" in problem.what
    (problem,) = engine_args(subject("engine_args: {enable_prefix_cashing: true}")).problems
    assert problem.fix == "did you mean 'enable_prefix_caching'?"


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ("max_num_batched_tokens: 16, max_num_seqs: 32", "max_num_seqs"),
        (
            "max_num_batched_tokens: 64, max_model_len: 128, enable_chunked_prefill: false",
            "max_model_len",
        ),
        ("kv_cache_dtype: fp9", "kv_cache_dtype"),
        ("chat_template: /nowhere/t.jinja", "chat_template"),
        ("lora_modules: [a=/nowhere/a]", "lora_modules"),
    ],
)
def test_values_that_cannot_work(subject: MakeSubject, args: str, key: str) -> None:
    """Every key that is part of it is named."""
    (problem,) = engine_args(subject(f"engine_args: {{{args}}}")).problems
    assert f"prefill.engine_args.{key}" in problem.keys


@pytest.mark.parametrize(
    ("prefill", "decode", "key", "severity"),
    [
        ("env: {VLLM_KV_CACHE_LAYOUT: HND}", "", "env.VLLM_KV_CACHE_LAYOUT", Severity.FAIL),
        ("engine_args: {load_format: dummy}", "", "engine_args.load_format", Severity.FAIL),
        ("", "engine_args: {quantization: awq}", "engine_args.quantization", Severity.WARN),
        ("engine_args: {tokenizer: t}", "", "engine_args.tokenizer", Severity.FAIL),
        ("", "engine_args: {max_model_len: 256}", "engine_args.max_model_len", Severity.WARN),
        ("", "engine_args: {enable-lora: true}", "engine_args.enable_lora", Severity.WARN),
    ],
)
def test_pools_that_differ(
    subject: MakeSubject, prefill: str, decode: str, key: str, severity: Severity
) -> None:
    """Both keys and both values; it fails only where the engines refuse each other for sure."""
    (problem,) = fingerprints(subject(prefill, decode)).problems
    assert problem.keys == (f"prefill.{key}", f"decode.{key}")
    assert problem.severity is severity
    assert "prefill" in problem.what
    assert "decode" in problem.what


def test_equal_pools(subject: MakeSubject) -> None:
    """What only names the engines' own defaults is no difference."""
    assert fingerprints(subject("engine_args: {load_format: safetensors}")).problems == ()

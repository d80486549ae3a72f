"""What ``launcher: ray`` and the rest of the YAML must agree on."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.config import ConfigError, parse

MOCK = "engine: mock\nmodel: {path: mock}\n"
VLLM = "model: {path: some/model}\nlauncher: ray\n"
TCP = "transfer: {transport: tcp}"


def problems_of(text: str) -> list[str]:
    """What is wrong with ``text``."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("ray: {pair_by: host}", "ray: only used with `launcher: ray`"),
        ("decode: {placement: {num_cpus: 2}}", "decode.placement: only used with"),
        ("launcher: ray\nprefill: {cpus: [[0]]}", "prefill.cpus: Ray decides"),
        ("launcher: ray\nprefill: {hosts: [h]}", "prefill.hosts: Ray decides"),
        ("launcher: ray\nrouter: {host: '127.0.0.9'}", "router.host: 127.0.0.9, but with"),
        ("launcher: ray\ndecode: {host: 10.0.0.9}", "decode.host: 10.0.0.9, but with"),
        (
            "launcher: ray\nprefill: &p {transfer: {transport: local}}\ndecode: *p",
            "prefill.transfer.transport: local copies within one host",
        ),
        (
            "launcher: ray\nprefill: {placement: {num_gpus: 1}}",
            "prefill.placement.num_gpus: CUDA nodes have not been shown",
        ),
        (
            "launcher: ray\nprefill: {placement: {resources: {GPU: 1}}}",
            "prefill.placement.resources.GPU: Ray has an option of its own",
        ),
        (
            "launcher: ray\nray: {pair_by: rack}\nprefill: {placement: {strategy: PACK}}",
            "prefill.placement.strategy: ray.pair_by places nodes in pairs",
        ),
        (
            "launcher: ray\nprefill: {engine_args: {tensor_parallel_size: 2}, placement: "
            "{num_cpus: 3}}",
            "prefill.placement.num_cpus: 3 do not split over tensor_parallel_size 2",
        ),
    ],
)
def test_contradictions_are_named(text: str, begins: str) -> None:
    """Each with the key and what to do instead."""
    problems = problems_of(MOCK + text)
    assert [problem for problem in problems if problem.startswith(begins)], problems


def test_vllm_needs_no_list_of_cpus_there() -> None:
    """How many a node has is in ``placement``, one by default."""
    config = parse(VLLM)
    assert config.prefill.cpus is None


def test_keys_are_strict() -> None:
    """A strategy that Ray does not have, and an amount of nothing, are refused."""
    wrong = "launcher: ray\nprefill: {placement: {strategy: spread, resources: {a: 0}}}"
    problems = problems_of(MOCK + wrong)
    assert [p.partition(" ")[0] for p in problems] == [
        "prefill.placement.strategy",
        "prefill.placement.resources.a",
    ]

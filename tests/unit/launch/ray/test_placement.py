"""From the YAML to placement groups, and whether hosts could hold them."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.config import ClusterConfig, parse
from splitserve.orchestrator.launch.ray.placement import (
    HOST_LABEL,
    RayHost,
    groups_of,
    matches,
    obstacles,
)


def config_of(text: str) -> ClusterConfig:
    """A cluster of mock engines on Ray."""
    return parse(f"engine: mock\nlauncher: ray\nmodel: {{path: mock}}\n{text}")


def host(name: str, labels: dict[str, str] | None = None, **resources: float) -> RayHost:
    """A host of that name."""
    return RayHost(name, name, name, dict(resources), labels or {})


def test_each_pool_is_a_placement_group() -> None:
    """With its strategy, and for each node what that takes."""
    config = config_of(
        "prefill: {replicas: 2, placement: {strategy: PACK, num_cpus: 4, resources: {nic: 1}, "
        "label_selector: {kind: big}}}"
    )
    prefill, decode = groups_of(config)
    assert (prefill.name, prefill.nodes, prefill.strategy) == (
        "prefill",
        ("prefill-0", "prefill-1"),
        "PACK",
    )
    assert prefill.bundles == ({"CPU": 4.0, "nic": 1.0},) * 2
    assert prefill.selectors == ({"kind": "big"},) * 2
    assert (decode.nodes, decode.strategy, decode.bundles) == (
        ("decode-0",),
        "SPREAD",
        ({"CPU": 1.0},),
    )


@pytest.mark.parametrize(("pair_by", "label"), [("host", HOST_LABEL), ("rack", "rack")])
def test_pairs_share_a_host_or_a_label(pair_by: str, label: str) -> None:
    """As many groups as the smaller pool has nodes; the others are dealt out."""
    config = config_of(
        f"ray: {{pair_by: {pair_by}}}\nprefill: {{replicas: 2}}\ndecode: {{replicas: 3}}"
    )
    groups = groups_of(config)
    assert [group.nodes for group in groups] == [
        ("prefill-0", "decode-0", "decode-2"),
        ("prefill-1", "decode-1"),
    ]
    assert {group.same_label for group in groups} == {label}


@pytest.mark.parametrize(
    ("condition", "value", "is_match"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", None, True),
        ("in(a, b)", "b", True),
        ("in(a, b)", "c", False),
        ("!in(a, b)", "b", False),
        ("!in(a, b)", "c", True),
    ],
)
def test_conditions_are_those_of_ray(condition: str, value: str | None, is_match: bool) -> None:
    """Equal, not equal, one of, none of."""
    labels = {} if value is None else {"key": value}
    assert matches({"key": condition}, labels) == is_match


@pytest.mark.parametrize(
    ("text", "hosts", "words"),
    [
        (
            "experimental_cuda: true\nprefill: {placement: {num_gpus: 2}}",
            [host("a", CPU=8, GPU=1), host("b", CPU=8)],
            ["prefill.placement: a node takes 2 GPU", "(a 1, b 0)"],
        ),
        (
            "prefill: {replicas: 3}",
            [host("a", CPU=2), host("b", CPU=1)],
            ["take 4 CPU (prefill 3 and decode 1)", "2 hosts of the Ray cluster have 3"],
        ),
        (
            "decode: {placement: {label_selector: {kind: big}}}",
            [host("a", {"kind": "small"}, CPU=8)],
            ["decode.placement.label_selector: none of the 1 hosts", "kind=big"],
        ),
        (
            "decode: {replicas: 2, placement: {strategy: STRICT_SPREAD}}",
            [host("a", CPU=8)],
            ["decode.placement.strategy: STRICT_SPREAD needs 2 hosts, and 1 fit"],
        ),
    ],
)
def test_what_cannot_fit_is_said_before_anything_is_placed(
    text: str, hosts: list[RayHost], words: list[str]
) -> None:
    """One sentence with what is asked for, what there is, and where."""
    (problem,) = obstacles(config_of(text), hosts)
    assert all(word in problem for word in words), problem


def test_what_fits_has_no_obstacle() -> None:
    """Whoever uses it at the moment."""
    assert obstacles(config_of("prefill: {replicas: 2}"), [host("a", CPU=3)]) == []

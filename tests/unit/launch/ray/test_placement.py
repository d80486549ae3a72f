"""From the YAML to placement groups, and whether hosts could hold them."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.config import ClusterConfig, parse
from splitserve.orchestrator.launch.ray.placement import (
    HOST_LABEL,
    RayHost,
    groups_of,
    growth_obstacles,
    matches,
    obstacles,
    targets,
)


def config_of(text: str) -> ClusterConfig:
    """A cluster of mock engines on Ray."""
    return parse(f"engine: mock\nlauncher: ray\nmodel: {{path: mock}}\n{text}")


def host(name: str, labels: dict[str, str] | None = None, **resources: float) -> RayHost:
    """A host of that name."""
    return RayHost(name, name, name, dict(resources), labels or {})


def test_a_pool_that_must_lie_apart_is_a_placement_group() -> None:
    """With its strategy, and for each node what that takes."""
    config = config_of(
        "prefill: {replicas: 2, placement: {strategy: STRICT_SPREAD, num_cpus: 4, "
        "resources: {nic: 1}, label_selector: {kind: big}}}"
    )
    prefill, decode = groups_of(config)
    assert (prefill.name, prefill.nodes, prefill.strategy) == (
        "prefill",
        ("prefill-0", "prefill-1"),
        "STRICT_SPREAD",
    )
    assert prefill.bundles == ({"CPU": 4.0, "nic": 1.0},) * 2
    assert prefill.selectors == ({"kind": "big"},) * 2
    assert (decode.name, decode.nodes, decode.strategy, decode.bundles) == (
        "decode-0",
        ("decode-0",),
        "SPREAD",
        ({"CPU": 1.0},),
    )
    assert not prefill.is_single
    assert decode.is_single


def test_groups_follow_the_size_of_the_cluster() -> None:
    """A node that may lie anywhere brings and takes its own; a shared one stays, with the bundles
    of those that are gone, and cannot hold more.
    """
    config = config_of(
        "prefill: {replicas: 2, placement: {strategy: STRICT_PACK}}\ndecode: {replicas: 2}"
    )
    sizes = {"prefill": 1, "decode": 3}
    found = {group.name: group.nodes for group in groups_of(config, sizes)}
    assert found == {
        "prefill": ("prefill-0", "prefill-1"),
        **{name: (name,) for name in ("decode-0", "decode-1", "decode-2")},
    }
    assert growth_obstacles(config, sizes) == []
    (problem,) = growth_obstacles(config, {"prefill": 3, "decode": 2})
    assert "prefill.placement.strategy STRICT_PACK" in problem
    assert "may have 2 nodes at most" in problem
    paired = config_of("ray: {pair_by: rack}\nprefill: {replicas: 2}\ndecode: {replicas: 2}")
    assert [g.name for g in groups_of(paired, {"prefill": 1, "decode": 1})] == ["pair-0"]
    (problem,) = growth_obstacles(paired, {"prefill": 3, "decode": 2})
    assert problem.startswith("ray.pair_by: ")


@pytest.mark.parametrize(("strategy", "expected"), [("SPREAD", "bca"), ("PACK", "aab")])
def test_a_new_node_is_wished_where_its_pool_has_few_or_many(strategy: str, expected: str) -> None:
    """Where there is room, as far as the cluster's own nodes take it: ``a`` holds three, and has
    one already; ``c`` has a prefill node, which counts less than nodes of the pool.
    """
    config = config_of(f"decode: {{replicas: 4, placement: {{strategy: {strategy}}}}}")
    groups = [g for g in groups_of(config) if g.name.startswith("decode")]
    hosts = [host("a", CPU=3), host("b", CPU=3), host("c", CPU=3), host("d")]
    placed = {"decode-0": "a", "prefill-0": "c"}
    takes = {name: {"CPU": 1.0} for name in ("prefill-0", *(g.name for g in groups))}
    found = targets(groups, placed, takes, hosts)
    assert found == dict(zip(("decode-1", "decode-2", "decode-3"), expected, strict=True))
    assert targets(groups, placed, takes, [host("d")]) == {}


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

"""Nodes that are told how many CPUs they have."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.config import ConfigError, NodeConfig, nodes, parse
from splitserve.orchestrator.engines.command import engine_command
from splitserve.orchestrator.launch.given_cpus import with_given_cpus

TEXT = """
model: {path: m}
router: {port: 8000}
prefill: {cpus: [[0, 1]], engine_args: {tensor_parallel_size: 2}}
decode: {cpus: [[2]]}
"""


@pytest.fixture
def node() -> NodeConfig:
    return nodes(parse(TEXT))[0]


def test_a_container_of_its_own_cpus_is_pinned_to_them(node: NodeConfig) -> None:
    """As many as were asked for are usable: they are the node's, whatever the YAML says."""
    assert with_given_cpus(node, 2, {7, 5}).cpus == (5, 7)


def test_where_there_are_more_the_kernel_chooses(node: NodeConfig) -> None:
    """Not pinned, and each rank computes with its share of threads."""
    given = with_given_cpus(node, 4, set(range(64)))
    assert given.cpus is None
    env = engine_command(parse(TEXT), given, "m", "life").env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("count", "usable"), [(3, 8), (4, 2)])
def test_what_cannot_be_is_refused(node: NodeConfig, count: int, usable: int) -> None:
    """CPUs that do not divide, and more than there are."""
    with pytest.raises(ConfigError, match="--cpus"):
        with_given_cpus(node, count, set(range(usable)))

"""Ports left open in the YAML are filled with free ones."""

from __future__ import annotations

import random
import socket

import pytest

from splitserve.orchestrator.config import nodes, parse
from splitserve.orchestrator.config.checks import fixed_ports, problems_between_keys
from splitserve.orchestrator.config.scaling import scaled
from splitserve.orchestrator.launch.ports import (
    FREE_RANGE,
    ROOM_NODES,
    free_run,
    is_free,
    taken_ports,
    with_ports,
)

OPEN = """
engine: mock
model: {path: m}
router: {port: 0}
prefill: {replicas: 2, engine_args: {tensor_parallel_size: 2}}
"""


def test_every_open_port_is_filled_once() -> None:
    """Each process gets ports of its own from the range, the same for all who read the result."""
    config = with_ports(parse(OPEN))
    ports = [port for port, _, _ in fixed_ports(config)]
    assert len(ports) == 1 + 3 * 2 + 2 * 2 + 1
    assert len(set(ports)) == len(ports)
    assert set(ports) <= set(FREE_RANGE)
    assert problems_between_keys(config) == []
    assert nodes(config) == nodes(config.model_validate_json(config.model_dump_json()))


def test_fixed_ports_stay() -> None:
    """A port that was given is not changed."""
    config = with_ports(parse("engine: mock\nmodel: {path: m}\nprefill: {port_base: 9000}\n"))
    assert config.router.port == 8000
    assert nodes(config)[0].http_port == 9000
    assert nodes(config)[0].endpoint_port == 9001


def test_a_port_in_use_is_passed_over() -> None:
    """With the same random numbers, a run that has become busy is not chosen again."""
    first = with_ports(parse(OPEN), random.Random(5)).router.port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert not is_free(first, "127.0.0.1")
        assert with_ports(parse(OPEN), random.Random(5)).router.port != first


def test_a_foreign_address_is_an_error() -> None:
    """An address that this machine does not have is not merely a busy port."""
    with pytest.raises(OSError, match="assign"):
        is_free(1024, "203.0.113.1")


def test_routers_get_ports_in_a_row() -> None:
    """As many as there are, none of them in use."""
    config = with_ports(parse(OPEN.replace("port: 0", "port: 0, replicas: 3")))
    ports = [config.router.port + index for index in range(config.router.replicas)]
    assert len(ports) == 3
    assert all(is_free(port, "127.0.0.1") for port in ports)


@pytest.mark.parametrize("seed", range(20))
def test_pools_find_room_behind_their_ports(seed: int) -> None:
    """A cluster whose ports were chosen can grow: no two nodes would get the same port."""
    config = with_ports(parse(OPEN), random.Random(seed))
    assert scaled(config, "prefill", 2 + ROOM_NODES).gone == []
    assert len(scaled(config, "decode", 1 + ROOM_NODES).new) == ROOM_NODES


def test_a_new_nodes_taken_port_is_named() -> None:
    """With who would get it; ports of nodes that run are theirs."""
    first = free_run(["127.0.0.1"], 4)
    port = first + 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        text = f"engine: mock\nmodel: {{path: m}}\nprefill: {{replicas: 2, port_base: {first}}}\n"
        config = parse(text)
        assert taken_ports(config, ["prefill-0"]) == []
        (problem,) = taken_ports(config, ["prefill-1"])
    assert problem.startswith(
        f"port {port} on 127.0.0.1 is in use by another program, and prefill-1"
    )

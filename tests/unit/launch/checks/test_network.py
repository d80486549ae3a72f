"""Addresses that lead back, and proxies that would not let them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.checks import network
from splitserve.orchestrator.launch.checks.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable

CLUSTER = """
engine: mock
model: {path: m}
router: {port: 8000}
prefill: &pool {transfer: {transport: tcp}}
decode: *pool
"""


@pytest.mark.parametrize("advertised", ["127.0.0.1", "localhost"])
def test_an_address_that_leads_back(advertised: str) -> None:
    """A listener on loopback is found there, and on every address by the wildcard."""
    assert network.reach_obstacle(advertised, "127.0.0.1", 0) == ""
    assert network.reach_obstacle(advertised, "0.0.0.0", 0) == ""


def test_the_port_is_left_as_it_was(free_port: Callable[[], int]) -> None:
    """An engine can listen there at once, whatever was there before."""
    port = free_port()
    assert network.reach_obstacle("127.0.0.1", "127.0.0.1", port) == ""
    with socket.socket() as engine:
        engine.bind(("127.0.0.1", port))
        engine.listen()


def test_an_address_that_leads_nowhere() -> None:
    """Why, with the address."""
    assert "127.0.0.2" in network.reach_obstacle("127.0.0.2", "127.0.0.1", 0)


def test_somebody_else_at_that_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that does not know the number that was asked for is not ours."""
    monkeypatch.setattr(network, "REACH_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        said = network.reach_obstacle("127.0.0.2", "127.0.0.1", port)
    assert said == "no answer from 127.0.0.2 in 0.1 s"


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a resolver that never answers is given up."""

    def fails(*words: object, **options: object) -> list[object]:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(network.socket, "getaddrinfo", fails)
    assert network.reach_obstacle("nowhere", "127.0.0.1", 0) == "the name has no address"


@pytest.mark.parametrize(
    ("environ", "keys"),
    [
        ({}, ()),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "127.0.0.1"}, ()),
        ({"HTTP_PROXY": "http://p:1", "no_proxy": "*"}, ()),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "x.org, 127.0.0.0/8"}, ()),
        ({"https_proxy": "http://p:1"}, ()),
        ({"HTTP_PROXY": "http://p:1"}, ("HTTP_PROXY", "NO_PROXY")),
        ({"all_proxy": "socks5://p:1", "NO_PROXY": "other"}, ("all_proxy", "NO_PROXY")),
    ],
)
def test_proxies(environ: dict[str, str], keys: tuple[str, ...]) -> None:
    """One that catches the router's address is told, unless it is told to leave that alone."""
    problems = network.proxies(Subject(parse(CLUSTER), environ)).problems
    assert tuple(key for problem in problems for key in problem.keys) == keys


def test_a_proxys_password_is_not_shown() -> None:
    """Its user and password stay out of the report."""
    environ = {"HTTP_PROXY": "http://user:word@p:1"}
    (problem,) = network.proxies(Subject(parse(CLUSTER), environ)).problems
    assert "word" not in str(problem)
    assert "p:1" in problem.what


def test_a_port_for_outgoing_connections() -> None:
    """It may be taken at any start, so it is warned of."""
    first, _ = network._outgoing_ports()
    text = CLUSTER.replace("&pool {", f"&pool {{port_base: {first + 1}, ")
    config = parse(text.replace("*pool", "{transfer: {transport: tcp}}"))
    # Somebody may have it just now, which is told too
    problems = network.ports(Subject(config, {})).problems
    warnings = [problem.keys for problem in problems if "outgoing" in problem.what]
    assert warnings == [("prefill.port_base",)] * 2

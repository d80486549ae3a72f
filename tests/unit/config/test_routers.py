"""Where each of several routers is, for itself and for others."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.config import for_router, parse, router_url, router_urls

CLUSTER = "engine: mock\nmodel: {path: m}\nrouter: {replicas: 3, port: 8000%s}\n"


@pytest.mark.parametrize(
    ("more", "urls"),
    [
        ("", ["127.0.0.1:8000", "127.0.0.1:8001", "127.0.0.1:8002"]),
        (", advertise_host: a.example", [f"a.example:{port}" for port in (8000, 8001, 8002)]),
        (", hosts: ['::1', localhost, '::1']", ["[::1]:8000", "localhost:8000", "[::1]:8001"]),
    ],
)
def test_a_router_sees_itself_where_others_find_it(more: str, urls: list[str]) -> None:
    """Those on one address have consecutive ports; each takes itself for the only one."""
    config = parse(CLUSTER % more)
    assert list(router_urls(config)) == [f"http://{url}" for url in urls]
    for index, url in enumerate(urls):
        seen = for_router(config, index)
        assert router_urls(seen) == (f"http://{url}",)
        assert seen.router.queue_limit_requests == config.router.queue_limit_requests


def test_where_a_router_listens_may_be_told() -> None:
    """In a container; it is found where it was."""
    config = parse(CLUSTER % ", hosts: [localhost, '::1', '::1']")
    seen = for_router(config, 0, "127.0.0.9")
    assert seen.router.host == "127.0.0.9"
    assert router_url(seen) == "http://localhost:8000"


def test_a_router_that_there_is_not() -> None:
    """Is told how many there are."""
    with pytest.raises(KeyError, match=r"no router 3; router.replicas is 3"):
        for_router(parse(CLUSTER % ""), 3)

"""What hosts of a Ray cluster read, and what an adopting ``up`` compares."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from splitserve.orchestrator.config import nodes, parse, router_urls
from splitserve.orchestrator.launch.ray.order import (
    Order,
    differences,
    hosted,
    newest,
    order_of,
    source_text,
    variables_of,
    yaml_of,
)

TEXT = """
launcher: ray
model: {path: some/model}
experimental_cuda: true
router: {port: 0}
prefill: {replicas: 2, placement: {num_cpus: 4}}
decode: {placement: {num_gpus: 2}}
security: {api_keys: [{tenant: a, key_env: KEY_OF_A}]}
"""


def order(text: str = TEXT, **more: Any) -> Order:
    """For prefill-0."""
    config = source_text(parse(text))
    hosts = ("10.0.0.1",)
    return Order(
        name="prefill-0", run="r", config=config, router_hosts=hosts, router_port=8123, **more
    )


def test_a_host_sees_its_own_address_and_devices() -> None:
    """Nodes listen on it; the router's address is that of its host; what is only Ray's is gone."""
    config = hosted(order(), "10.0.0.7", (3, 5))
    assert parse(yaml_of(config)) == config
    assert (config.launcher, config.ray, config.prefill.placement) == ("local", None, None)
    assert {(n.host, n.transfer_host, n.advertise_host) for n in nodes(config)} == {
        ("10.0.0.7", "10.0.0.7", "")
    }
    assert config.prefill.cpus == [[0, 1, 2, 3]] * 2
    assert config.decode.gpus == [[3, 5]]
    assert (config.router.host, config.router.port) == ("10.0.0.1", 8123)
    assert router_urls(config) == ("http://10.0.0.1:8123",)


def test_a_wildcard_stays_one() -> None:
    """The node listens everywhere, and is found at its host's address."""
    text = TEXT.replace("prefill: {", "prefill: {host: 0.0.0.0, ")
    node = nodes(hosted(order(text), "10.0.0.7"))[0]
    assert (node.host, node.transfer_host, node.advertise_host) == (
        "0.0.0.0",
        "0.0.0.0",
        "10.0.0.7",
    )


def test_a_host_looks_for_the_record_where_its_order_puts_it() -> None:
    """Not where the machine of `up` has it; the limit stays."""
    quality = "{text: t.txt, max_kl: 0.004, record: /home/me/q.json}"
    tiers = "[{type: cpu, capacity_bytes: 8 MiB}]"
    text = TEXT.replace("num_gpus: 2", "num_cpus: 4")
    config = hosted(order(f"{text}cache: {{quality: {quality}, tiers: {tiers}}}\n"), "10.0.0.7")
    assert config.cache is not None
    assert config.cache.quality is not None
    assert (config.cache.quality.record, config.cache.quality.max_kl) == (None, 0.004)


def test_an_order_crosses_as_a_dictionary_and_shows_no_secret() -> None:
    """Of texts and numbers only."""
    told = order(secret="a5" * 32)
    plain = msgspec.to_builtins(told)
    assert order_of(plain) == told
    assert "a5a5" not in repr(told)


def test_differences_name_each_key_with_both_values() -> None:
    """Also those that only one of both has."""
    running = order()
    assert differences(running, parse(TEXT)) == []
    wanted = TEXT.replace("replicas: 2", "replicas: 3").replace("router: {port: 0}\n", "")
    assert differences(running, parse(wanted)) == [
        "prefill.replicas: 2 runs, 3 is in the YAML; `splitserve scale prefill 3` changes it",
        "router.port: 0 runs, nothing is in the YAML",
    ]


def test_several_routers_have_the_addresses_of_their_hosts() -> None:
    """Two on one host have ports side by side; nodes know all of them."""
    text = TEXT.replace("router: {port: 0}", "router: {replicas: 3, port: 8123, host: 0.0.0.0}")
    places = ("10.0.0.1", "10.0.0.2", "10.0.0.1")
    told = msgspec.structs.replace(order(text), router_hosts=places, name="router-2")
    assert (told.kind, told.router_index) == ("router", 2)
    config = hosted(told, "10.0.0.1")
    assert parse(yaml_of(config)) == config
    assert router_urls(config) == (
        "http://10.0.0.1:8123",
        "http://10.0.0.2:8123",
        "http://10.0.0.1:8124",
    )


@pytest.mark.parametrize(("replicas", "is_equal"), [(2, True), (3, True), (4, False)])
def test_a_scaled_cluster_is_that_of_its_old_yaml_and_of_the_new_one(
    replicas: int, is_equal: bool
) -> None:
    """The number that it was started with, or that which it has now."""
    running = msgspec.structs.replace(order(), sizes={"prefill": 3, "decode": 1}, edition=1)
    wanted = parse(TEXT.replace("replicas: 2", f"replicas: {replicas}"))
    assert (differences(running, wanted) == []) == is_equal


def test_a_pool_that_says_nothing_but_its_size_differs_in_nothing() -> None:
    """An empty section is none, and one replica is the default."""
    text = "launcher: ray\nengine: mock\nmodel: {path: m}\nprefill: {}\n"
    wanted = parse(text.replace("prefill: {}", "decode: {replicas: 1}"))
    assert differences(order(text), wanted) == []


def test_a_host_sees_the_size_that_the_cluster_has_now() -> None:
    """With devices for each node; of several orders the newest counts."""
    scaled = msgspec.structs.replace(order(), sizes={"prefill": 3, "decode": 1}, edition=1)
    assert newest([order(), scaled]) == scaled
    config = hosted(scaled, "10.0.0.7")
    assert parse(yaml_of(config)) == config
    names = [node.name for node in nodes(config)]
    assert names == ["prefill-0", "prefill-1", "prefill-2", "decode-0"]
    assert config.prefill.cpus == [[0, 1, 2, 3]] * 3


def test_only_variables_that_are_named_go_elsewhere() -> None:
    """Keys of clients to the router, credentials of tiers to cache servers."""
    config = parse(
        "launcher: ray\nengine: mock\nmodel: {path: m}\n"
        "cache: {tiers: [{type: cpu, capacity_bytes: 1 MiB}, {type: s3, url: 's3://b', "
        "options: {secret_access_key: '${KEY_OF_S3}'}}]}\n"
        "security: {secret_file: s, api_keys: [{tenant: a, key_env: KEY_OF_A}]}"
    )
    environ = {"KEY_OF_A": "1", "KEY_OF_S3": "2", "OTHER_KEY": "3"}
    assert variables_of(config, environ) == {
        "router_environment": {"KEY_OF_A": "1"},
        "cache_environment": {"KEY_OF_S3": "2"},
    }

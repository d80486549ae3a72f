"""One process of a cluster on several machines: what it is started with, and what is refused."""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

import pytest
from support.certificates import Authority

from splitserve.orchestrator.config import ConfigError, nodes, parse
from splitserve.orchestrator.config.checks import problems_between_keys
from splitserve.orchestrator.config.loading import load_with_contradictions
from splitserve.orchestrator.engines.command import engine_command
from splitserve.orchestrator.launch.checks.certificates import certificates
from splitserve.orchestrator.launch.checks.network import members_here
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.finding import Severity
from splitserve.orchestrator.launch.single import (
    single_cache,
    single_node,
    single_router,
)

if TYPE_CHECKING:
    from pathlib import Path

SECRET = {"SPLITSERVE_SECRET": secrets.token_hex(32)}
FAR = "192.0.2.7"
"""An address of no machine (RFC 5737)."""
CLUSTER = """
name: single
engine: mock
model: {path: m}
router: {port: 21999}
prefill: {transfer: {transport: tcp}, kv_cache_bytes: 1 MiB}
decode: {transfer: {transport: tcp}, kv_cache_bytes: 1 MiB}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The YAML of a cluster; state has a folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def with_hosts(*prefill: str) -> str:
    """The cluster with those hosts of prefill nodes."""
    hosts = ", ".join(f'"{host}"' for host in prefill)
    return CLUSTER.replace("prefill: {", f"prefill: {{hosts: [{hosts}], replicas: {len(prefill)}, ")


def test_a_node_listens_and_is_found_where_it_is_told(source: Path) -> None:
    """Free ports of its own; the router's address is the YAML's unless it is given."""
    found = single_node(str(source), SECRET, "prefill-0")
    assert found.router_urls == ("http://127.0.0.1:21999",)
    assert found.node.endpoint_port == found.node.http_port + 1
    assert found.node.control_port_base
    other = single_node(
        str(source),
        SECRET,
        "decode-0",
        host="::1",
        advertise_host="d.example",
        routers=["http://r:1/", "http://r:1"],
    )
    assert other.router_urls == ("http://r:1",)
    assert other.node.engine_url == f"http://[::1]:{other.node.http_port}"
    assert other.node.advertised_url == f"http://d.example:{other.node.http_port}"
    assert other.node.control_addresses[0].startswith("tcp://d.example:")
    argv = engine_command(other.config, other.node, "m", "life").argv
    assert argv[argv.index("--host") + 1] == "::1"


def test_each_node_has_its_own_host() -> None:
    """It listens there and is found there, with brackets where a URL wants them."""
    config = parse(with_hosts("fd00::2", "p.example"))
    first, second, _ = nodes(config)
    assert (first.host, first.transfer_host) == ("fd00::2", "fd00::2")
    assert first.advertised_url.startswith("http://[fd00::2]:")
    assert second.control_addresses == ("tcp://p.example:0",)


def test_nodes_of_different_hosts_may_have_the_same_cpus() -> None:
    """CPU 0 of one machine is not that of another one."""
    pools = "prefill: {{hosts: [{0}], cpus: [[0]]}}\ndecode: {{hosts: [{1}], cpus: [[0]]}}\n"
    text = "engine: mock\nmodel: {path: m}\n"
    parse(text + pools.format("a.example", "b.example"))
    with pytest.raises(ConfigError, match="CPU 0 is given to prefill-0 and decode-0"):
        parse(text + pools.format("a.example", "a.example"))


def test_hosts_and_host_exclude_each_other(tmp_path: Path) -> None:
    """And there is one for each replica."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "engine: mock\nmodel: {path: m}\n"
        "prefill: {replicas: 2, hosts: [a.example], host: 10.0.0.1, transfer: {host: '::1'}}\n"
    )
    config, problems = load_with_contradictions(path)
    assert problems == problems_between_keys(config)
    assert [problem.partition(":")[0] for problem in problems] == [
        "prefill.hosts",
        "prefill.host",
        "prefill.transfer.host",
    ]


@pytest.mark.parametrize(
    ("text", "environ", "options", "expected"),
    [
        (CLUSTER, SECRET, {"name": "prefill-7"}, "no node 'prefill-7'; the YAML has prefill-0"),
        (CLUSTER, {}, {}, "security.secret_file: not set, nor the variables SPLITSERVE_SECRET"),
        (CLUSTER, {"SPLITSERVE_SECRET": "xyz"}, {}, "SPLITSERVE_SECRET: .*hexadecimal"),
        (CLUSTER, {"SPLITSERVE_SECRET_FILE": "/no/such"}, {}, "SECRET_FILE: .*does not exist"),
        (CLUSTER.replace("21999", "0"), SECRET, {}, "router.port: 0 takes a free port"),
        (CLUSTER, SECRET, {"host": "0.0.0.0"}, "listens on 0.0.0.0, where nobody finds it"),
        (CLUSTER, SECRET, {"host": FAR}, f"cannot listen on {FAR}"),
        (with_hosts(FAR), SECRET, {}, r"prefill.hosts\[0\]: this machine cannot listen on .*start"),
        (CLUSTER.replace("engine: mock", "engine: vllm\nallow_shared_devices: true")
            .replace("path: m", "path: /no/model").replace("tcp}", "tcp}, cpus: [[0]]"),
            SECRET, {}, "model.path: .*/no/model"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_machines_name(
    source: Path, text: str, environ: dict[str, str], options: dict[str, str], expected: str
) -> None:
    """Before anything is started."""
    source.write_text(text)
    options = {"name": "prefill-0"} | options
    with pytest.raises(ConfigError, match=expected) as caught:
        single_node(str(source), environ, options.pop("name"), **options)
    assert caught.value.source == f"{source} (on {socket.gethostname()})"


def test_only_the_routers_machine_needs_the_clients_keys(source: Path) -> None:
    """A node's machine does not have them."""
    keys = "security: {api_keys: [{tenant: a, key_env: NO_SUCH_KEY}]}\n"
    source.write_text(CLUSTER + keys)
    single_node(str(source), SECRET, "decode-0")
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        single_router(str(source), SECRET)
    found = single_router(str(source), SECRET | {"NO_SUCH_KEY": "k"})
    assert found.tenant_by_key == {"k": "a"}


def test_a_cluster_without_a_cache_has_no_cache_server(source: Path) -> None:
    """The message names the section."""
    with pytest.raises(ConfigError, match="cache: the cluster has none"):
        single_cache(str(source), SECRET)


def test_doctor_looks_at_what_the_hosts_place_here() -> None:
    """Not at nodes of other machines; a cluster without hosts is here as a whole."""
    assert members_here(parse(with_hosts(FAR, "localhost"))) == {"router", "prefill-1", "decode-0"}
    assert members_here(parse(CLUSTER)) is None


def test_certificates_are_tried_under_the_names_that_are_used_here(tmp_path: Path) -> None:
    """The node on another machine has its own; one that ends soon is warned of."""
    files = Authority(tmp_path).issue("local", ["127.0.0.1"], days=(-1, 3))
    config = parse(with_hosts(FAR, "127.0.0.1") + f"security: {{tls: {files.yaml}}}\n")
    here = Subject(config, {}, here=members_here(config))
    (soon,) = certificates(here).problems
    assert soon.severity is Severity.WARN
    assert "ends in 3.0 days" in soon.what
    (refused,) = certificates(Subject(config, {})).failures
    assert f"would not be trusted as {FAR}'s (prefill-0)" in refused


def test_traffic_in_the_clear_is_warned_of() -> None:
    """Only where it leaves the machine."""
    (problem,) = certificates(Subject(parse(with_hosts(FAR)), {})).problems
    assert problem.keys == ("prefill.hosts",)
    assert not certificates(Subject(parse(CLUSTER), {})).problems


def test_one_of_several_routers(source: Path) -> None:
    """Takes its own port, knows of the others only where they are, and is one of those that there
    are; nodes reach for all of them.
    """
    source.write_text(CLUSTER.replace("21999", "21999, replicas: 2"))
    urls = ("http://127.0.0.1:21999", "http://127.0.0.1:22000")
    found = single_router(str(source), SECRET, 1)
    assert (found.index, found.urls, found.config.router.port) == (1, urls, 22000)
    assert single_node(str(source), SECRET, "prefill-0").router_urls == urls
    with pytest.raises(ConfigError, match=r"--index 2: router.replicas is 2, so the last is 1"):
        single_router(str(source), SECRET, 2)

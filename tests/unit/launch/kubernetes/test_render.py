"""What is refused, and what manifests say of rights, memory and changes."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner
from support.kubernetes_clusters import CACHED, GOLDEN, GPU, KEYS, LOCAL, MOCK
from support.manifests import cluster_yaml, pod_specs, problems, read_all

from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.config import ConfigError, parse
from splitserve.orchestrator.engines.transformers.findings import CodecQuality
from splitserve.orchestrator.launch.kubernetes.options import Options
from splitserve.orchestrator.launch.kubernetes.render import render
from splitserve.orchestrator.launch.quality_record import keep_record

if TYPE_CHECKING:
    from pathlib import Path

VLLM = f"""
model: {{path: owner/model}}
{KEYS}
prefill: {{cpus: [[0]], transfer: {{transport: tcp}}}}
decode: {{cpus: [[8]], transfer: {{transport: tcp}}}}
"""
WEIGHTS = Options(model_memory_bytes=10**9)


def _manifests(text: str, options: Options = WEIGHTS) -> list[dict[str, Any]]:
    return [m for part in render(parse(text), options).values() for m in part]


def _spec(manifests: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(spec for found, spec in pod_specs(manifests) if found == name)


def _digest(manifests: list[dict[str, Any]], name: str) -> str:
    found = next(m for m in manifests if m["metadata"]["name"] == name and "template" in m["spec"])
    digest: str = found["spec"]["template"]["metadata"]["annotations"]["splitserve/configuration"]
    return digest


@pytest.mark.parametrize(
    ("text", "options", "key"),
    [
        (MOCK.replace(KEYS, ""), WEIGHTS, "security.api_keys"),
        (MOCK.replace("name: demo", "name: a.b"), WEIGHTS, "name: 'a.b'"),
        (MOCK.replace("name: demo", "name: 9a"), WEIGHTS, "name: '9a'"),
        (MOCK.replace("name: demo", f"name: {'a' * 41}"), WEIGHTS, "name: "),
        (MOCK, Options(namespace="No"), "--namespace"),
        (MOCK + "router: {port: 0}\n", WEIGHTS, "router.port"),
        (MOCK, Options(rdma=("rdma/hca", 1)), "--rdma: the transport tcp"),
        (MOCK, Options(model_claim="m"), "--model-claim: the mock engine"),
        (VLLM, Options(), "--model-memory"),
        (VLLM, replace(WEIGHTS, model_claim="m"), "no absolute folder"),
        (VLLM.replace("owner/model", "/models/m"), WEIGHTS, "--model-claim NAME"),
        (VLLM.replace("owner/model", "smollm2-135m"), WEIGHTS, "this machine only"),
        (VLLM.replace("owner/model", "~/m"), WEIGHTS, "this machine only"),
        (
            VLLM.replace("owner/model", "/m"),
            replace(WEIGHTS, model_claim="m", model_host_path="/m"),
            "give one of them",
        ),
        (
            VLLM.replace("cpus: [[0]]", "replicas: 2, cpus: [[0], [1, 2]]"),
            WEIGHTS,
            "prefill.cpus: pods of one StatefulSet are alike",
        ),
        (VLLM.replace("cpus: [[0]]", "cpus: [[0]], hosts: [h]"), WEIGHTS, "prefill.hosts"),
        (CACHED, WEIGHTS, "--node-selector KEY=VALUE"),
        (
            CACHED.replace("type: disk,", "type: disk, path: relative,"),
            replace(WEIGHTS, node_selector=(("a", "b"),)),
            "cache.tiers[1].path",
        ),
        (
            MOCK.replace(
                "key_file: /home/me/key}", "key_file: /a/key}, {tenant: b, key_file: /b/key}"
            ),
            WEIGHTS,
            "two files are called key",
        ),
        (
            VLLM.replace("[[0]]", "[[0], [1]], replicas: 2")
            + "policy: {autotune: {mode: 'on', ttft_ms: 500}}\n",
            WEIGHTS,
            "policy.autotune.profile",
        ),
        (MOCK.replace("/home/me/key", "/home/me/my key"), WEIGHTS, "'my key'"),
        (
            MOCK + 'observability: {tracing: {otlp_endpoint: "http://localhost:4318"}}\n',
            WEIGHTS,
            "observability.tracing.otlp_endpoint: localhost is the pod",
        ),
        (
            CACHED.replace("region:", 'endpoint: "http://127.0.0.1:9000", region:'),
            WEIGHTS,
            "cache.tiers[2].options.endpoint",
        ),
        (MOCK.replace("kv_cache_bytes", "port_base: 8000, kv_cache_bytes"), WEIGHTS, "port 8000"),
    ],
)
def test_what_pods_cannot_do_is_refused(text: str, options: Options, key: str) -> None:
    """Before anything is written, with the key."""
    with pytest.raises(ConfigError) as refused:
        _manifests(text, options)
    assert key in "\n".join(refused.value.problems)


def test_every_problem_is_told_at_once() -> None:
    """Name and keys."""
    with pytest.raises(ConfigError) as refused:
        _manifests(MOCK.replace(KEYS, "").replace("name: demo", "name: a_b"))
    assert len(refused.value.problems) == 2


def test_pods_read_a_valid_cluster() -> None:
    """Each YAML of the ConfigMap can be parsed; the tiers below memory, and what they are sealed
    with, only the cache server is told.
    """
    text, options = GOLDEN["cached"]
    manifests = _manifests(text, options)
    seen, server = (
        parse(cluster_yaml(manifests, file)) for file in ("cluster.yaml", "cache-server.yaml")
    )
    assert seen.cache is not None
    assert server.cache is not None
    assert [tier.type for tier in seen.cache.tiers] == ["cpu"]
    assert not seen.cache.encrypt
    assert [tier.type for tier in server.cache.tiers] == ["cpu", "disk", "s3"]
    assert server.cache.secret_file == "/etc/splitserve/secret/cache-secret"
    assert seen.cache.socket_path == server.cache.socket_path
    for name, spec in pod_specs(manifests):
        (secret,) = (v["secret"] for v in spec["volumes"] if v["name"] == "secret")
        keys = [item["key"] for item in secret["items"]]
        assert ("cache-secret" in keys) == (name == "cached-cache")


def test_scaling_restarts_no_pod() -> None:
    """Another number of nodes leaves every template as it is; any other change does not."""
    text = VLLM.replace("cpus: [[0]]", "cpus: [[0]], replicas: 1")
    before = _manifests(text)
    more = _manifests(VLLM.replace("cpus: [[0]]", "cpus: [[0], [1], [2]], replicas: 3"))
    slower = _manifests(text + "supervision: {drain_timeout_s: 99}\n")
    for name in ("default-prefill", "default-decode", "default-router"):
        assert _digest(before, name) == _digest(more, name)
        assert _digest(before, name) != _digest(slower, name)
    assert _spec(slower, "default-prefill")["terminationGracePeriodSeconds"] == 99 + 10 + 15


def test_rights_follow_the_transport() -> None:
    """`local` traces in one pod with one process namespace; RDMA pins memory; others need nothing
    and run without root.
    """
    local = _spec(_manifests(LOCAL), "pair-nodes")
    assert local["shareProcessNamespace"] is True
    assert [c["name"] for c in local["containers"]] == ["prefill-0", "prefill-1", "decode-0"]
    assert all(
        c["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE"] for c in local["containers"]
    )
    text, options = GOLDEN["gpu"]
    pinned = _spec(_manifests(text, options), "big-prefill")
    assert pinned["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    plain = _spec(_manifests(text, replace(options, rdma=None)), "big-prefill")
    assert "add" not in plain["containers"][0]["securityContext"]["capabilities"]
    assert plain["securityContext"]["runAsNonRoot"] is True


def test_memory_holds_what_an_engine_takes() -> None:
    """KV of every rank, weights, processes, shared memory and the cache's arena; a GPU's KV lies
    elsewhere.
    """
    text = VLLM.replace(
        "cpus: [[0]]",
        "cpus: [[0, 1]], kv_cache_bytes: 4 GiB, engine_args: {tensor_parallel_size: 2}",
    )
    resources = _spec(_manifests(text), "default-prefill")["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["cpu"] == "2"
    assert 15_000 < int(resources["limits"]["memory"].removesuffix("Mi")) < 16_000
    text, options = GOLDEN["gpu"]
    gpu = _spec(_manifests(text, options), "big-prefill")["containers"][0]["resources"]["limits"]
    assert gpu["nvidia.com/gpu"] == "2"
    assert 21_000 < int(gpu["memory"].removesuffix("Mi")) < 22_000


def test_tls_names_pods_by_services() -> None:
    """Certificates cannot name addresses that pods get late: nodes are found by DNS names, and the
    kubelet and Prometheus speak TLS.
    """
    text, options = GOLDEN["gpu"]
    manifests = _manifests(text, options)
    arguments = _spec(manifests, "big-decode")["containers"][0]["args"]
    host = arguments[arguments.index("--advertise-host") + 1]
    assert host == "$(POD_NAME).big-decode.serving.svc"
    router = _spec(manifests, "big-router")["containers"][0]
    assert router["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    mutual = _manifests(text.replace("ca_file: /ca", "ca_file: /ca, client_ca_file: /x"), options)
    router = _spec(mutual, "big-router")["containers"][0]
    assert router["readinessProbe"]["tcpSocket"] == {"port": "http"}
    assert problems(mutual) == []


def test_alert_rules_are_those_that_come_with_splitserve() -> None:
    """Word for word; without the Prometheus Operator none of its objects is there."""
    rules = resources.files("splitserve.configs") / "observability" / "alerts.yaml"
    found = [m for m in _manifests(MOCK) if m["kind"] == "PrometheusRule"]
    assert [m["spec"] for m in found] == [yaml.safe_load(rules.read_text())]
    without = _manifests(MOCK, replace(WEIGHTS, has_monitoring=False))
    assert not {m["kind"] for m in without} & {"PrometheusRule", "PodMonitor"}
    assert "monitoring" not in str(without)


def test_the_command_writes_files_and_names_secrets(tmp_path: Path) -> None:
    """One file per part in the order of applying; the Secrets that are missing, with their keys."""
    path = tmp_path / "cluster.yaml"
    path.write_text(GPU)
    command = ["render", "kubernetes", str(path), "--model-claim", "m", "--model-memory", "16GB"]
    out = tmp_path / "out"
    result = CliRunner().invoke(main, [*command, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert [file.name for file in sorted(out.iterdir())][:2] == [
        "00-config.yaml",
        "10-policies.yaml",
    ]
    assert "default/big-api-keys with KEY_OF_A, b" in result.stderr
    assert "default/big-prefill-env with HF_TOKEN" in result.stderr
    assert "default/big-secret with cluster-secret" in result.stderr
    assert "default/big-tls with ca.crt, tls.crt, tls.key" in result.stderr
    assert "tracing" not in result.stderr
    printed = CliRunner().invoke(main, command)
    assert read_all(printed.stdout) == [
        manifest for file in sorted(out.iterdir()) for manifest in read_all(file.read_text())
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--node-selector", "novalue"), "KEY=VALUE"),
        (("--rdma", "rdma/hca"), "RESOURCE=COUNT"),
        (("--rdma", "a/b=1", "--rdma", "c/d=1"), "one kind of device"),
        (("--model-memory", "much"), "is no size"),
    ],
)
def test_wrong_options_are_told(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    """Status 2, nothing printed."""
    path = tmp_path / "cluster.yaml"
    path.write_text(MOCK)
    result = CliRunner().invoke(main, ["render", "kubernetes", str(path), *arguments])
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""


def test_a_lossy_codec_is_in_the_keys_of_all_pods() -> None:
    """Nodes and routers do not know the tiers below memory, but make the keys of their chunks."""
    options = replace(WEIGHTS, node_selector=(("a", "b"),))
    text = CACHED.replace("capacity_bytes: 8 GiB", "capacity_bytes: 8 GiB, codec: int5z")
    data = render(parse(text), options)["config"][0]["data"]
    seen = [parse(data[name]).cache for name in ("cluster.yaml", "cache-server.yaml")]
    assert [cache.key_codec for cache in seen if cache] == ["int5z", "int5z"]
    exact = render(parse(CACHED), options)["config"][0]["data"]
    assert "lossy_codec" not in exact["cluster.yaml"]


def test_a_limit_on_lossy_codecs_needs_a_record(tmp_path: Path) -> None:
    """Which then lies in the ConfigMap, where pods look for it."""
    prose, record = tmp_path / "prose.txt", tmp_path / "quality.json"
    prose.write_text("words")
    options = replace(WEIGHTS, node_selector=(("a", "b"),))
    text = CACHED.replace("capacity_bytes: 8 GiB", "capacity_bytes: 8 GiB, codec: int8").replace(
        "cache:\n", f"cache:\n  quality: {{text: {prose}, record: {record}, max_kl: 0.005}}\n"
    )
    config = parse(text)
    with pytest.raises(ConfigError, match="does not say what int8 costs; run `splitserve cache"):
        render(config, options)
    keep_record(config, [CodecQuality("int8", 0.001, 0.1, 0.99, 2.0, 100)])
    manifests = render(config, options)
    assert problems([m for part in manifests.values() for m in part]) == []
    data = manifests["config"][0]["data"]
    assert data["quality.json"] == record.read_text()
    for name in ("cluster.yaml", "cache-server.yaml"):
        cache = parse(data[name]).cache
        assert cache is not None
        assert cache.quality is not None
        assert cache.quality.record == "/etc/splitserve/cluster/quality.json"
    keep_record(config, [CodecQuality("int8", 0.006, 0.1, 0.99, 2.0, 100)])
    with pytest.raises(ConfigError, match=r"int8 costs 0\.006"):
        render(config, options)

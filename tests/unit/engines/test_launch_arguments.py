"""From a node's configuration to its engine's command line and environment."""

from __future__ import annotations

import json

import pytest

from splitserve.orchestrator.config import ClusterConfig, node, parse
from splitserve.orchestrator.engines.command import EngineCommand, engine_command
from splitserve.orchestrator.engines.vllm.launch_arguments import omp_binding

TEXT = """
engine: {engine}
model: {{path: /models/m, served_name: name}}
prefill:
  replicas: 2
  cpus: [[0, 1], [2, 3]]
  port_base: 9000
  advertise_host: 10.1.2.3
  kv_cache_bytes: 1 GB
  engine_args: {{tensor_parallel_size: 2, max_model_len: 4096{more}}}
  env: {{EXTRA: "1"}}
  transfer: {{transport: tcp, port_base: 9100, data_port_base: 9300, lease_s: 7, deadline_s: 60}}
decode:
  cpus: [[4]]
  transfer: {{transport: tcp, port_base: 9200}}
"""


def command_of(name: str, engine: str = "vllm", more: str = "") -> EngineCommand:
    """The command of the node ``name``."""
    config: ClusterConfig = parse(TEXT.format(engine=engine, more=more))
    return engine_command(config, node(config, name), "/models/m", f"{name}-abc")


def value(command: EngineCommand, flag: str) -> str:
    """What follows ``flag``."""
    return command.argv[command.argv.index(flag) + 1]


def test_the_transformers_engine_is_told_what_it_computes_with() -> None:
    """The type, the KV's type, the connector's settings; a folder is not looked for in the Hub."""
    text = """
engine: transformers
model: {path: /models/m, served_name: name}
decode: {engine_args: {dtype: bfloat16, threads: 2}, env: {EXTRA: "1"}}
prefill: {engine_args: {dtype: bfloat16}}
"""
    config = parse(text)
    command = engine_command(config, node(config, "decode-0"), "/models/m", "decode-0-abc")
    assert command.argv[2] == "splitserve.orchestrator.engines.transformers.server"
    assert value(command, "--dtype") == "bfloat16"
    assert value(command, "--threads") == "2"
    settings = json.loads(value(command, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert settings["incarnation"] == "decode-0-abc"
    assert (command.env["HF_HUB_OFFLINE"], command.env["EXTRA"]) == ("1", "1")
    assert "--device" not in command.argv
    assert command.warm_up is None


@pytest.mark.parametrize("engine", ["vllm", "mock"])
def test_flags_that_every_engine_gets(engine: str) -> None:
    """Model, address, sizes and the connector's settings of the second replica."""
    command = command_of("prefill-1", engine)
    assert value(command, "--model") == "/models/m"
    assert value(command, "--served-model-name") == "name"
    assert value(command, "--host") == "127.0.0.1"
    assert value(command, "--port") == "9002"
    assert value(command, "--block-size") == "128"
    assert value(command, "--kv-cache-memory-bytes") == "1000000000"
    assert value(command, "--tensor-parallel-size") == "2"
    assert value(command, "--max-model-len") == "4096"
    assert "--max-num-seqs" not in command.argv
    settings = json.loads(value(command, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert settings == {
        "transport": "tcp",
        "control_host": "127.0.0.1",
        "control_port_base": 9102,
        "advertise_host": "10.1.2.3",
        "data_port_base": 9302,
        "endpoint_port": 9003,
        "incarnation": "prefill-1-abc",
        "lease_s": 7,
        "transfer_deadline_s": 60,
        "retarget_wait_s": 2.0,
        "fence_timeout_s": 30.0,
        "quarantine_limit_bytes": 2**28,
        "stream_min_bytes": 2**20,
        "node": "prefill-1",
        "role": "prefill",
        "warm_addresses": [],
        "experimental_cuda": False,
    }


def test_vllm_gets_the_connector() -> None:
    """Loaded by module path, for both roles; a failed load is recomputed."""
    command = command_of("prefill-0")
    config = json.loads(value(command, "--kv-transfer-config"))
    del config["kv_connector_extra_config"]
    assert config == {
        "kv_connector": "SplitserveConnector",
        "kv_connector_module_path": "splitserve.orchestrator.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": "prefill-0-abc",
    }
    assert command.argv[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    assert value(command, "--dtype") == "float32"
    assert "--enforce-eager" in command.argv


def test_the_environment_pins_and_stays_at_home() -> None:
    """CPUs per rank, no network, loopback everywhere, and the YAML's own variables."""
    env = command_of("prefill-0").env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert env["SPLITSERVE_SLEEPING_WAITS"] == "1"
    assert env["SPLITSERVE_SEEDED_CHUNKS"] == "1"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_HOST_IP"] == "127.0.0.1"
    assert env["GLOO_SOCKET_IFNAME"] == env["UCX_NET_DEVICES"] == "lo"
    assert env["EXTRA"] == "1"


def test_decode_nodes_know_the_prefill_nodes() -> None:
    """Every rank of every prefill node, to introduce themselves before the first request."""
    command = command_of("decode-0")
    settings = json.loads(value(command, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert settings["warm_addresses"] == [f"tcp://10.1.2.3:{port}" for port in range(9100, 9104)]


def test_unknown_engine_args_become_flags() -> None:
    """Text, numbers, booleans, lists and mappings, each as vLLM's command line writes it."""
    more = ", some_number: 3, yes_flag: true, no_flag: false, items: [a, b], tree: {x: 1}"
    argv = command_of("prefill-0", more=more).argv
    tail = argv[argv.index("--some-number") :]
    assert tail == (
        "--some-number",
        "3",
        "--yes-flag",
        "--no-no-flag",
        "--items",
        "a",
        "b",
        "--tree",
        '{"x": 1}',
    )


def test_cpus_are_split_over_ranks() -> None:
    """In order, evenly."""
    assert omp_binding((3,), 1) == "3"
    assert omp_binding((0, 1, 4, 5), 2) == "0,1|4,5"


def test_engines_take_part_in_traces() -> None:
    """vLLM gets the collector, the protocol and its name; it begins no trace by itself, unless the
    pool's own variables say so; without the section it gets nothing of this.
    """
    command = command_of("prefill-0")
    assert "--otlp-traces-endpoint" not in command.argv
    assert not [name for name in command.env if name.startswith("OTEL")]
    text = TEXT.replace('EXTRA: "1"', "OTEL_TRACES_SAMPLER: always_on").format(
        engine="vllm", more=""
    )
    text += "observability: {tracing: {otlp_endpoint: 'http://c:4318/', service_name: mine}}\n"
    config = parse(text)
    commands = [
        engine_command(config, node(config, n), "m", "x") for n in ("prefill-0", "decode-0")
    ]
    for found in commands:
        assert value(found, "--otlp-traces-endpoint") == "http://c:4318/v1/traces"
        assert found.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
        assert found.env["OTEL_SERVICE_NAME"] == "mine-engine"
    assert commands[1].env["OTEL_RESOURCE_ATTRIBUTES"] == "service.instance.id=decode-0"
    samplers = [found.env["OTEL_TRACES_SAMPLER"] for found in commands]
    assert samplers == ["always_on", "parentbased_always_off"]


@pytest.mark.parametrize(
    ("written", "flags", "names"),
    [
        ("lora_modules: [a=/x, b=/y]", ["a=/x", "b=/y"], {"a", "b"}),
        (
            "lora-modules: [{name: a, path: /x}]",
            ['{"name": "a", "path": "/x"}'],
            {"a"},
        ),
        ("lora_modules: a=/x", ["a=/x"], {"a"}),
    ],
)
def test_adapters(written: str, flags: list[str], names: set[str]) -> None:
    """Each is one value of vLLM's flag, and the router knows its name."""
    config: ClusterConfig = parse(TEXT.format(engine="vllm", more=f", {written}"))
    command = command_of("prefill-0", more=f", {written}")
    at = command.argv.index("--lora-modules") + 1
    assert list(command.argv[at : at + len(flags)]) == flags
    assert config.prefill.engine_args.adapters == names
    assert config.decode.engine_args.adapters == set()

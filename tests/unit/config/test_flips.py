"""Which clusters' nodes may change their roles."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from splitserve.orchestrator.config import builtin_names, load, parse
from splitserve.orchestrator.config.flips import flip_obstacle

ALIKE = """
engine: mock
model: {path: m}
prefill: &pool
  replicas: 2
  cpus: [[0], [1]]
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_num_seqs: 8, enable_faults: true}
  env: {OMP_WAIT_POLICY: passive}
  transfer: {transport: tcp, lease_s: 20}
decode:
  <<: *pool
  cpus: [[2], [3]]
"""


def obstacle(**decode: Any) -> str:
    """Of a cluster whose decode pool has other values."""
    tree = yaml.safe_load(ALIKE)
    for key, value in decode.items():
        own = tree["decode"].get(key)
        tree["decode"][key] = own | value if isinstance(own, dict) else value
    return flip_obstacle(parse(yaml.safe_dump(tree)))


def test_pools_that_are_started_alike_have_no_obstacle() -> None:
    """The number of nodes, and where they listen and run, does not matter."""
    assert flip_obstacle(parse(ALIKE)) == ""
    assert obstacle(replicas=1, cpus=[[7]]) == ""
    own = {"host": "127.0.0.2", "port_base": 9000, "data_port_base": 9100}
    assert obstacle(host="127.0.0.2", port_base=8100, transfer=own, startup_timeout_s=9.0) == ""


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (
            {"kv_cache_bytes": 2**20},
            "kv_cache_bytes is 4194304 but decode.kv_cache_bytes is 1048576",
        ),
        (
            {"engine_args": {"max_num_seqs": 64}},
            "prefill.engine_args.max_num_seqs is 8 but decode.engine_args.max_num_seqs is 64",
        ),
        (
            {"engine_args": {"max_model_len": 64}},
            "prefill.engine_args.max_model_len is not set but decode.engine_args.max_model_len is",
        ),
        (
            {"engine_args": {"seed_tokens": 3}},
            "prefill.engine_args.seed_tokens is not set but decode.engine_args.seed_tokens is 3",
        ),
        ({"transfer": {"lease_s": 5.0}}, "prefill.transfer.lease_s is 20.0 but decode.transfer"),
        (
            {"cpus": [[2, 3], [4, 5]]},
            "prefill.cpus gives each node 1 CPUs but decode.cpus gives each node 2 CPUs",
        ),
        ({"cpus": None}, "prefill.cpus gives each node 1 CPUs but decode.cpus is not set"),
    ],
)
def test_the_difference_is_named(decode: dict[str, Any], words: str) -> None:
    """The key, and both values."""
    found = obstacle(**decode)
    assert words in found
    assert found.endswith("nodes change roles only where both pools' engines are started alike")


@pytest.mark.parametrize("env", [{"API_TOKEN": "s3cret"}, {"OMP_WAIT_POLICY": "s3cret"}])
def test_no_value_of_a_variable_is_shown(env: dict[str, str]) -> None:
    """It may be a secret."""
    found = obstacle(env=env)
    (name,) = env
    assert f"prefill.env.{name} and decode.env.{name} are not the same" in found
    assert "s3cret" not in found


def test_engines_of_two_kinds_do_not_change_roles() -> None:
    """A node keeps its engine, and with it what it can answer."""
    text = "model: {path: m}\nengine: transformers\nprefill: {cpus: [[0]], engine: vllm}\n"
    assert "prefill.engine is vllm but decode.engine is transformers" in flip_obstacle(parse(text))


def test_every_built_in_cluster_has_an_answer() -> None:
    """Yes, or a sentence."""
    for name in builtin_names():
        found = flip_obstacle(load(name))
        assert not found or "started alike" in found

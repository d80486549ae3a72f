"""What two keys must agree on: refused with both named."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.config import ConfigError, nodes, parse
from splitserve.orchestrator.config.checks import fixed_ports, is_loopback

MODEL = "model: {path: some/model}\n"


def problems_of(text: str) -> list[str]:
    """What is wrong with ``text``."""
    with pytest.raises(ConfigError) as caught:
        parse(MODEL + text)
    return caught.value.problems


@pytest.mark.parametrize(
    ("key", "ours", "theirs"),
    [("block_size", 64, 128), ("dtype", "float32", "bfloat16"), ("kv_cache_dtype", "auto", "fp8")],
)
def test_pools_that_do_not_fit_are_refused(key: str, ours: object, theirs: object) -> None:
    """A different block size or type on P and D names both values and says what to do."""
    text = (
        f"engine: mock\nprefill: {{engine_args: {{{key}: {ours}}}}}\n"
        f"decode: {{engine_args: {{{key}: {theirs}}}}}\n"
    )
    (problem,) = problems_of(text)
    assert problem.startswith(
        f"prefill.engine_args.{key} is {ours} but decode.engine_args.{key} is"
    )
    assert str(theirs) in problem
    assert "same value" in problem


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("chat_template: a.jinja", "chat_template: b.jinja"),
        ("chat-template: a.jinja", ""),
        ("", "tokenizer_revision: b"),
        ("default_chat_template_kwargs: {a: 1}", "default_chat_template_kwargs: {a: 2}"),
    ],
)
def test_pools_that_would_make_different_prompts_are_refused(ours: str, theirs: str) -> None:
    """Both values are named; equal ones are taken, however they are spelled."""
    text = "engine: mock\nprefill: {{engine_args: {{{}}}}}\ndecode: {{engine_args: {{{}}}}}\n"
    (problem,) = problems_of(text.format(ours, theirs))
    assert "different prompts" in problem
    assert "None" in problem or "{'a': 1}" in problem or "a.jinja" in problem
    parse(MODEL + text.format("chat-template: a.jinja", "chat_template: a.jinja"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine: mock\ndecode: {engine: transformers}", "cannot take KV of the cluster's engine"),
        (
            "engine: transformers\nprefill: {engine_args: {tensor_parallel_size: 2}}",
            "prefill.engine_args.tensor_parallel_size: the transformers engine has one rank",
        ),
        (
            "engine: transformers\nprefill: &p {engine_args: {kv_cache_dtype: fp8}}\ndecode: *p",
            "fp8 needs engine: vllm",
        ),
        (
            "engine: transformers\nprefill: {engine: vllm}",
            "prefill.cpus: required",
        ),
    ],
)
def test_engines_that_cannot_be_started_so_are_refused(text: str, words: str) -> None:
    """Each pool by its own engine; the key is named."""
    assert any(words in problem for problem in problems_of(text + "\n"))


def test_a_pool_may_have_an_engine_of_its_own() -> None:
    """Its nodes have it, those of the other pool have the cluster's."""
    config = parse(MODEL + "engine: transformers\ndecode: {engine: vllm, cpus: [[0]]}\n")
    assert [node.engine for node in nodes(config)] == ["transformers", "vllm"]


@pytest.mark.parametrize("threshold", ["-1", "many", "1.5", "true"])
def test_a_threshold_that_is_none_is_refused(threshold: str) -> None:
    """With the key's name."""
    text = f"engine: mock\npolicy: {{conditional: {{min_uncached_tokens: {threshold}}}}}\n"
    assert "policy.conditional.min_uncached_tokens" in problems_of(text)[0]


def test_pools_with_different_transports_are_refused() -> None:
    """Both ends must speak the same."""
    text = "engine: mock\nprefill: {transfer: {transport: tcp}}\n"
    assert "decode.transfer.transport is nixl" in problems_of(text)[0]


def test_a_cpu_of_two_nodes_is_refused() -> None:
    """The sentence names the CPU and both nodes; it can be allowed."""
    text = "prefill: {cpus: [[0]]}\ndecode: {cpus: [[0, 1]]}\n"
    (problem,) = problems_of(text)
    assert problem.startswith("CPU 0 is given to prefill-0 and decode-0")
    parse(MODEL + text + "allow_shared_devices: true\n")


def test_vllm_on_cpu_needs_cpus() -> None:
    """Without them every engine would bind the same core."""
    assert [problem.split(":")[0] for problem in problems_of("")] == ["prefill.cpus", "decode.cpus"]


def test_one_list_of_cpus_per_replica() -> None:
    """Two replicas with one list are refused."""
    text = "prefill: {replicas: 2, cpus: [[0]]}\ndecode: {cpus: [[1]]}\n"
    assert "1 list for 2 replicas" in problems_of(text)[0]


def test_cpus_must_split_over_the_ranks() -> None:
    """Three CPUs do not split over two ranks; four do."""
    text = (
        "engine: mock\nprefill: {{cpus: [{}], engine_args: {{tensor_parallel_size: 2}}}}\n"
        "decode: {{engine_args: {{tensor_parallel_size: 1}}}}\n"
    )
    assert "give a multiple of 2" in problems_of(text.format([0, 1, 2]))[0]
    parse(MODEL + text.format([0, 1, 2, 3]))


def test_cuda_must_be_asked_for() -> None:
    """`gpus` alone is refused with the flag that accepts the risk; with it, it is accepted."""
    text = "prefill: {gpus: [[0]]}\ndecode: {gpus: [[1]]}\n"
    assert all("experimental_cuda: true" in problem for problem in problems_of(text))
    parse(MODEL + text + "experimental_cuda: true\n")


@pytest.mark.parametrize(
    "key", ["port", "kv-transfer-config", "api_key", "served_model_name", "model"]
)
def test_flags_that_splitserve_sets_are_refused(key: str) -> None:
    """With the key to use instead, in snake_case and kebab-case."""
    text = f"engine: mock\nprefill: {{engine_args: {{{key}: x}}}}\n"
    (problem,) = problems_of(text)
    assert problem.startswith(f"prefill.engine_args.{key}: set by splitserve; ")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("block-size", "block_size"),
        ("tensor-parallel-size", "tensor_parallel_size"),
        ("max_modl_len", "max_model_len"),
        ("no-enforce-eager", "enforce_eager"),
    ],
)
def test_misspelt_engine_args_do_not_pass_the_checks_by(key: str, meant: str) -> None:
    """What would go to the engine beside a key that is checked is refused, naming that key."""
    problem = problems_of(f"prefill: {{cpus: [[0]], engine_args: {{{key}: 1}}}}\n")[0]
    assert problem == f"prefill.engine_args.{key}: did you mean {meant!r}?"


def test_ports_that_overlap_are_refused() -> None:
    """Two uses of one port are named; ports left open are not compared."""
    text = "engine: mock\nprefill: {port_base: 8000}\n"
    (problem,) = problems_of(text)
    assert problem.startswith("port 8000 is used by router.port and prefill-0 HTTP")


def test_every_fixed_port_is_listed() -> None:
    """Router, HTTP, endpoint, and one control port per rank and node."""
    text = (
        "engine: mock\nprefill: {replicas: 2, port_base: 9000, "
        "transfer: {port_base: 9100, data_port_base: 9200}, "
        "engine_args: {tensor_parallel_size: 2}}\n"
    )
    ports = [port for port, _, _ in fixed_ports(parse(MODEL + text))]
    assert ports == [8000, 9000, 9001, 9100, 9200, 9101, 9201, 9002, 9003, 9102, 9202, 9103, 9203]


def test_an_open_router_needs_keys() -> None:
    """Listening beyond loopback without API keys is refused."""
    text = "engine: mock\nrouter: {host: 0.0.0.0}\n"
    assert problems_of(text)[0].startswith(
        "router.host: 0.0.0.0 serves the network without any key"
    )
    parse(MODEL + text + "security: {api_keys: [{tenant: a, key_env: K}]}\n")


def test_a_tenant_has_one_weight() -> None:
    """Its keys must agree; different tenants may differ."""
    key = "{{tenant: {}, key_env: {}, weight: {}}}"
    text = "engine: mock\nsecurity: {{api_keys: [{}, {}]}}\n"
    problems = problems_of(text.format(key.format("a", "K", 1.0), key.format("a", "L", 2.0)))
    assert problems == [
        "security.api_keys[1].weight is 2, but an earlier key of tenant 'a' has 1: give all keys of"
        " a tenant the same weight"
    ]
    config = parse(MODEL + text.format(key.format("a", "K", 1.0), key.format("b", "L", 2.0)))
    assert [key.weight for key in config.security.api_keys] == [1.0, 2.0]


def test_the_longest_delay_of_a_breaker_is_not_the_shortest() -> None:
    """Both keys are named."""
    text = "engine: mock\npolicy: {breaker: {open_s: 5.0, open_limit_s: 2.0}}\n"
    assert problems_of(text)[0].startswith(
        "policy.breaker.open_limit_s is 2 but policy.breaker.open_s is 5"
    )


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("host", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    """Only addresses that this machine alone can reach count."""
    assert is_loopback(host) is expected


ROUTERS = "engine: mock\nrouter: {replicas: 2, port: 8000%s}\n"


def test_routers_that_share_an_address_take_consecutive_ports() -> None:
    """Those on machines of their own have the same one."""
    text = "engine: mock\nprefill: {port_base: 8001}\n" + (ROUTERS % "").partition("\n")[2]
    assert problems_of(text)[0].startswith("port 8001 is used by router.port and prefill-0 HTTP")
    hosts = ROUTERS % ", hosts: [127.0.0.1, 127.0.0.2]"
    assert [port for port, _, _ in fixed_ports(parse(MODEL + hosts))] == [8000]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (", hosts: ['::1']", "router.hosts: 1 host for 2 replicas"),
        (", hosts: ['::1', 127.0.0.1], host: '::1'", "router.host: router.hosts says"),
        (", hosts: ['::1', 127.0.0.1], advertise_host: a", "router.advertise_host: router.hosts"),
        (", hosts: ['::1', 10.0.0.1]", "router.hosts: 10.0.0.1 serves the network without any key"),
    ],
)
def test_routers_and_their_hosts_have_to_fit(more: str, problem: str) -> None:
    """Each contradiction is told with its key."""
    (found,) = problems_of(ROUTERS % more)
    assert found.startswith(problem)

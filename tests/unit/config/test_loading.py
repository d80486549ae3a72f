"""Reading a cluster YAML: what is accepted, and what the errors say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from splitserve.orchestrator.config import (
    ClusterConfig,
    ConfigError,
    builtin_names,
    dump_resolved,
    load,
    load_resolved,
    nodes,
    parse,
)
from splitserve.orchestrator.config.fields import parse_bytes

if TYPE_CHECKING:
    from pathlib import Path

MINIMAL = "model: {path: some/model}\nengine: mock\n"


def problems_of(text: str) -> list[str]:
    """What ``parse`` finds wrong; fails when it finds nothing."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.yaml")
    assert caught.value.source == "x.yaml"
    return caught.value.problems


@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_configuration_loads(name: str, tmp_path: Path) -> None:
    """Each file of configs/ passes every check and survives the way to the processes and back."""
    config = load(name)
    assert {node.pool for node in nodes(config)} == {"prefill", "decode"}
    path = tmp_path / "resolved.json"
    path.write_text(dump_resolved(config))
    assert load_resolved(path) == config


def test_the_example_of_a_cache_shows_what_it_saves() -> None:
    """Engines say how many tokens of a prompt were cached, in both pools alike."""
    config = load("quickstart-cache")
    for pool in (config.prefill, config.decode):
        assert pool.engine_args.passed_on["enable_prompt_tokens_details"] is True


def test_only_the_model_is_required() -> None:
    """A file with a model (and, for vLLM on CPU, the CPUs) is complete."""
    config = parse(MINIMAL)
    assert config.model.name == "model"
    assert config.router.host == "127.0.0.1"
    assert [node.name for node in nodes(config)] == ["prefill-0", "decode-0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefil: {}", "prefil (line 3): unknown key; did you mean 'prefill'?"),
        (
            "prefill:\n  transfer: {lease: 3}",
            "prefill.transfer.lease (line 4): unknown key; did you mean 'lease_s'?",
        ),
        (
            "router: {port: '8000'}",
            "router.port (line 3): a whole number, without quotes or unit (got '8000')",
        ),
        (
            "router: {port: 70000}",
            "router.port (line 3): input should be less than or equal to 65535 (got 70000)",
        ),
        (
            "prefill: {cpus: [[a]]}",
            "prefill.cpus[0][0] (line 3): a whole number, without quotes or unit (got 'a')",
        ),
        (
            "prefill: {cpus: [1]}",
            "prefill.cpus[0] (line 3): a list (of lists where each replica has its own: "
            "`[[0], [1]]`) (got 1)",
        ),
        (
            "router: {queue_timeout_s: .inf}",
            "router.queue_timeout_s (line 3): input should be a finite number (got inf)",
        ),
        (
            "prefill: {host: ''}",
            "prefill.host (line 3): string should have at least 1 character (got '')",
        ),
        ("prefill:", "prefill (line 3): is empty; give keys below it, or remove the line"),
        (
            "decode: fast",
            "decode (line 3): a section with keys; write `decode: {replicas: fast}`? (got 'fast')",
        ),
        (
            "prefill: {env: {OMP_NUM_THREADS: 1}}",
            'prefill.env.OMP_NUM_THREADS (line 3): text; put it in quotes: `OMP_NUM_THREADS: "..."`'
            " (got 1)",
        ),
        (
            "decode: {transfer: {lease_s: 1m}}",
            "decode.transfer.lease_s (line 3): a number, in the unit that the key's end names "
            "(`60`, not `1m`) (got '1m')",
        ),
        (
            "observability: {timeline_requests: 1000000000}",
            "observability.timeline_requests (line 3): input should be less than or equal to "
            "100000 (got 1000000000)",
        ),
        (
            "security: {api_keys: [{tenant: a}]}",
            "security.api_keys[0] (line 3): give exactly one of key_file and key_env",
        ),
    ],
)
def test_errors_name_the_key_the_line_and_the_remedy(text: str, expected: str) -> None:
    """Each problem begins with the key's path and its line in the file."""
    assert problems_of(MINIMAL + text) == [expected]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("security: {api_keys: [sk-0123456789]}", "security.api_keys[0]"),
        ("security: {api_keys: sk-0123456789}", "security.api_keys"),
        ("security: sk-0123456789", "security"),
        (
            "security: {api_keys: [{tenant: a, weight: sk-0123456789}]}",
            "security.api_keys[0].weight",
        ),
        ("prefill: {env: sk-0123456789}", "prefill.env"),
        ("prefill: {env: {HF_TOKEN: [sk-0123456789]}}", "prefill.env.HF_TOKEN"),
    ],
)
def test_what_may_be_a_secret_is_not_repeated(text: str, key: str) -> None:
    """A key or a token that was written where none belongs is not in the message."""
    (problem,) = problems_of(MINIMAL + text)
    assert problem.startswith(f"{key} (line 3): ")
    assert "0123456789" not in problem


@pytest.mark.parametrize("tenant", ["a\\nb", "a\\e[31mb", "", "a" * 201])
def test_a_tenants_name_is_one_line_of_text(tenant: str) -> None:
    """It is shown in tables and logs: no control characters, and of a bounded length."""
    text = f'security: {{api_keys: [{{tenant: "{tenant}", key_env: X}}]}}'
    (problem,) = problems_of(MINIMAL + text)
    assert problem.startswith("security.api_keys[0].tenant (line 3): ")
    parse(MINIMAL + 'security: {api_keys: [{tenant: "Ä team 1", key_env: X}]}')


def test_all_problems_are_told_at_once() -> None:
    """Three mistakes in three sections are three sentences."""
    text = "router: {port: -1}\nprefill: {replicas: 0}\ndecode: {nodes: 1}\n"
    assert len(problems_of(MINIMAL + text)) == 3


def test_a_key_given_twice_is_refused() -> None:
    """YAML would let the last one win silently."""
    (problem,) = problems_of("engine: mock\nmodel: {path: a}\nengine: vllm\n")
    assert problem == "line 3: key 'engine' is given twice"


@pytest.mark.parametrize("text", ["", "- a\n- b", "just text", "model: ["])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    """Nothing, a list, text and broken YAML are refused with a sentence."""
    assert len(problems_of(text)) == 1


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A misspelt built-in name: the known ones and the nearest."""
    with pytest.raises(ConfigError, match="did you mean 'quickstart'") as caught:
        load("quikstart")
    assert "mock-2p2d" in str(caught.value)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (5, 5),
        ("5", 5),
        ("1 GB", 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2k", 2000),
    ],
)
def test_sizes_may_have_units(written: object, expected: int) -> None:
    """Decimal and binary units, with and without a blank."""
    assert parse_bytes(written) == expected


@pytest.mark.parametrize("written", ["1 XB", "GB", "-1 GB", "1 GiGB", ""])
def test_a_size_that_is_none_is_refused(written: str) -> None:
    """The error shows how sizes are written."""
    with pytest.raises(ValueError, match=r"size|unit"):
        parse_bytes(written)


def test_the_configuration_is_frozen() -> None:
    """Nobody changes a configuration that others read."""
    config: ClusterConfig = parse(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.router.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a, b]\n: c", "line 3: a key must be one word"),
        ("name: &x [*x]", "name (line 3)"),
        ("router: {queue_limit_requests: 1" + "0" * 4400 + "}", "not readable as YAML"),
        ("prefill: {kv_cache_bytes: '" + "9" * 400 + " GB'}", "larger than any memory"),
        ("prefill: {env: {A=B: c}}", "prefill.env.A=B"),
        ('prefill: {env: {A: "\\0"}}', "prefill.env.A"),
        ('prefill: {engine_args: {odd: "\\0"}}', "cannot hold a NUL character"),
        ("prefill: {engine_args: {odd: !!binary aGVsbG/f}}", "cannot be handed on"),
        ("prefill: {engine_args: {hf_token: hf_x}}", "everybody on this machine sees"),
    ],
)
def test_what_could_not_reach_the_processes_is_refused(text: str, words: str) -> None:
    """Odd YAML ends in a sentence, never in a traceback, an endless loop, or a later failure."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(MINIMAL + text)


FOREIGN = "this is no cluster YAML, a mapping with at least `model:`; see docs/configuration.md"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("root:*:20228:0:::\ndaemon:*:20228:0:::\n", FOREIGN),
        ("hunter2: {a: 1, a: 2}\n", FOREIGN),
        ("just words\n", FOREIGN),
        ("- hunter2\n", FOREIGN),
        ("", FOREIGN),
        (
            "model: {path: *hunter2}\n",
            "not readable as YAML: line 1, column 15: found undefined alias",
        ),
        (
            "a: [hunter2\nb: c\n",
            "not readable as YAML: line 2, column 2: expected ',' or ']', but got ':'",
        ),
        (
            "model: {path: !!hunter2 x}\n",
            "not readable as YAML: line 1, column 15: "
            "could not determine a constructor for the tag",
        ),
        (
            "hunter2: \x00\n",
            "not readable as YAML: special characters are not allowed (character 10)",
        ),
    ],
)
def test_a_file_of_another_kind_is_not_shown(text: str, expected: str) -> None:
    """One sentence with nothing of what is in it: it may hold secrets."""
    assert problems_of(text) == [expected]


def test_a_folder_is_told_as_one(tmp_path: Path) -> None:
    """Not as a file that is missing; a name of a built-in one still means that one."""
    with pytest.raises(ConfigError, match="this is a folder; give the path of a cluster YAML"):
        load(tmp_path)


def test_an_ipv6_host_becomes_a_url() -> None:
    """With brackets."""
    config = parse(MINIMAL + "decode: {host: '::1', transfer: {host: '::1'}}")
    node = nodes(config)[1]
    assert node.engine_url == "http://[::1]:0"
    assert node.control_addresses == ("tcp://[::1]:0",)


@pytest.mark.parametrize(("text", "value"), [("5e-4", 5e-4), ("1E1", 10.0), ("2.5e+1", 25.0)])
def test_numbers_may_have_exponents(text: str, value: float) -> None:
    """Without a point, too."""
    config = parse(f"engine: mock\nmodel: {{path: m}}\nrouter: {{queue_timeout_s: {text}}}\n")
    assert config.router.queue_timeout_s == value

"""Single values change in a cluster YAML's text; comments, layout and all else stay."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.config.editing import EditError, with_values

RATIO = {"prefill.replicas": 3, "decode.replicas": 5}


def changed(text: str, **more: int) -> str:
    return with_values(text, {**RATIO, **more}, "c.yaml")


def test_values_are_changed_where_they_stand() -> None:
    """Block and flow style, with comments behind and between."""
    text = """\
# Our cluster.
engine: mock
model: {path: m}
prefill:
  # Prompts
  replicas: 1   # one is enough
  kv_cache_bytes: 1 GB
decode: {kv_cache_bytes: 1 GB, replicas: 7}  # Answers
"""
    assert changed(text) == text.replace("replicas: 1 ", "replicas: 3 ").replace(
        "replicas: 7", "replicas: 5"
    )


def test_keys_that_are_missing_are_written() -> None:
    """Into the sections that are there, in their style; comments stay with their lines."""
    text = """\
engine: mock
model: {path: m}
prefill:
  # Prompts
  kv_cache_bytes: 1 GB
decode: {kv_cache_bytes: 1 GB}
"""
    assert changed(text) == (
        text.replace("  kv_cache", "  replicas: 3\n  kv_cache").replace(
            "{kv_cache", "{replicas: 5, kv_cache"
        )
    )


@pytest.mark.parametrize("end", ["", "\n", "\n# The end.\n", "\n\n\n"])
@pytest.mark.parametrize(
    "last",
    [
        "name: ours",
        "policy:\n    conditional:\n        min_uncached_tokens: 5",
        "policy: {prefix_routing: true}",
        "prefill:\n  cpus:\n  - [1]",
        "prefill: {}",
        "security:\n  api_keys:\n  - tenant: a\n    key_env: A",
    ],
)
def test_sections_that_are_missing_are_written(last: str, end: str) -> None:
    """At the end of the file, whatever its last lines are; every comment is still there."""
    text = f"# Ours.\nengine: mock\nmodel:\n  path: m # a model\n{last}{end}"
    if "cpus" in last:
        result = with_values(text, {"decode.replicas": 5}, "c.yaml")
    else:
        result = changed(text, **{"policy.conditional.min_uncached_tokens": 70})
        assert parse(result).policy.conditional.min_uncached_tokens == 70
        assert parse(result).prefill.replicas == 3
    assert parse(result).decode.replicas == 5
    assert result.count("#") == text.count("#")


def test_a_flow_style_file_is_changed() -> None:
    """A whole cluster between braces."""
    text = "{engine: mock, model: {path: m}, prefill: &p {kv_cache_bytes: 1000}}"
    found = parse(changed(text))
    assert (found.prefill.replicas, found.decode.replicas) == (3, 5)


def test_pools_that_are_written_once_are_not_changed() -> None:
    """Both pools name the same text, so one cannot change without the other."""
    text = "engine: mock\nmodel: {path: m}\nprefill: &pool {replicas: 2}\ndecode: *pool\n"
    with pytest.raises(EditError, match="same anchor"):
        changed(text)


def test_merged_keys_are_overridden() -> None:
    """A key that comes from elsewhere is written where it counts."""
    text = (
        "engine: mock\nmodel: {path: m}\nprefill: &pool {replicas: 2}\n"
        "decode:\n  <<: *pool\n  replicas: 4\n"
    )
    found = parse(changed(text))
    assert (found.prefill.replicas, found.decode.replicas) == (3, 5)


def test_what_would_be_no_cluster_is_refused() -> None:
    """CPUs are named for each node, so their lists would have to change as well."""
    text = "engine: mock\nmodel: {path: m}\nprefill: {replicas: 1, cpus: [[0]]}\n"
    with pytest.raises(EditError, match="cpus"):
        changed(text)


def test_numbers_that_are_right_already_change_nothing() -> None:
    """Not even a space."""
    text = "engine: mock\nmodel: {path: m}\nprefill: {replicas: 3}\ndecode:\n   replicas: 5"
    assert changed(text) == text

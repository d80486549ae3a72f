"""The section ``policy.autotune``: what is refused before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from support.tuner_profile import FAST

from splitserve.orchestrator.config import ConfigError, load_resolved, parse
from splitserve.orchestrator.config.loading import dump_resolved
from splitserve.orchestrator.launch.checks import autotune as subject
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.files import ClusterFiles
from splitserve.orchestrator.launch.paths import with_profile_path
from splitserve.orchestrator.tuner.profile import write_profile

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = """
name: tuned
engine: mock
model: {path: mock}
prefill: &pool
  {replicas: 2, kv_cache_bytes: 64 MB, engine_args: {block_size: 32, max_model_len: 4096}}
decode: *pool
"""


def text_with(autotune: str, cluster: str = CLUSTER) -> str:
    """The cluster with that section."""
    return f"{cluster}policy: {{autotune: {{{autotune}}}}}\n"


def refusal(text: str) -> str:
    """What is said of a YAML that is refused."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["off", "advise", "on", "'off'", "'on'"])
def test_modes_are_words(mode: str, tmp_path: Path) -> None:
    """Also where YAML takes a bare word for a truth value; and they survive being handed on."""
    config = parse(text_with(f"mode: {mode}, ttft_ms: 500.0"))
    assert config.policy.autotune.mode == mode.strip("'")
    path = tmp_path / "resolved.json"
    path.write_text(dump_resolved(config))
    assert load_resolved(path) == config


def test_it_is_off_by_default() -> None:
    """And then nothing of it is checked."""
    assert parse(CLUSTER).policy.autotune.mode == "off"
    assert subject.autotune(Subject(parse(CLUSTER), {})).detail == "off"
    assert parse(text_with("window_s: 900.0")).policy.autotune.mode == "off"


@pytest.mark.parametrize(
    ("autotune", "words"),
    [
        ("mode: sometimes", "policy.autotune.mode (line 8): input should be 'off', 'advise' or"),
        ("mode: on", "policy.autotune: give ttft_ms, itl_ms or both"),
        ("mode: on, ttft_ms: 0.0", "policy.autotune.ttft_ms (line 8): input should be greater"),
        (
            "mode: advise, ttft_ms: 500.0, missed_interval_s: 400.0",
            "missed_interval_s is 400, longer than change_interval_s 300",
        ),
        (
            "mode: advise, ttft_ms: 500.0, window_s: 400.0",
            "window_s is 400, longer than change_interval_s 300",
        ),
        ("mod: on", "policy.autotune.mod (line 8): unknown key; did you mean 'mode'?"),
    ],
)
def test_what_is_refused(autotune: str, words: str) -> None:
    """Each with its key and what to write."""
    assert words in refusal(text_with(autotune))


def test_two_nodes_have_no_ratio() -> None:
    """Each is the last of its role."""
    small = CLUSTER.replace("replicas: 2", "replicas: 1")
    assert "with 2 nodes each is the last of its role" in refusal(
        text_with("mode: advise, itl_ms: 50.0", small)
    )


def test_on_needs_nodes_that_may_change_roles() -> None:
    """The obstacle is named; advice may be had all the same."""
    unlike = CLUSTER.replace("decode: *pool", "decode: {<<: *pool, kv_cache_bytes: 1 MiB}")
    said = refusal(text_with("mode: on, itl_ms: 50.0", unlike))
    assert "policy.autotune.mode is on, but prefill.kv_cache_bytes is 64000000" in said
    assert "use `advise`" in said
    parse(text_with("mode: advise, itl_ms: 50.0", unlike))


def finding(profile: str = "") -> list[str]:
    """The problems that ``up`` and ``doctor`` tell."""
    more = f", profile: '{profile}'" if profile else ""
    config = with_profile_path(parse(text_with(f"mode: advise, ttft_ms: 500.0{more}")))
    return subject.autotune(Subject(config, {})).failures


def test_the_profile_is_looked_at(tmp_path: Path) -> None:
    """One that is there, is one, and is of this cluster passes; else the file and what to do."""
    path = tmp_path / "profile.json"
    (missing,) = finding(str(path))
    assert missing.startswith(f"policy.autotune.profile: {path} cannot be read (No such file or")
    assert "measure it with `splitserve profile tuned`" in missing
    path.write_text("{")
    (broken,) = finding(str(path))
    assert broken.startswith(f"policy.autotune.profile: {path} is no JSON: ")
    path.write_bytes(write_profile(msgspec.structs.replace(FAST, model="other")))
    (foreign,) = finding(str(path))
    assert f"{path} is not a profile of this cluster: it was measured with model other" in foreign
    path.write_bytes(write_profile(FAST))
    assert finding(str(path)) == []


def test_the_default_is_the_clusters_last_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `splitserve profile` leaves it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = ClusterFiles("tuned").profile_path
    path.parent.mkdir(parents=True)
    (missing,) = finding()
    assert str(path) in missing
    path.write_bytes(write_profile(FAST))
    assert finding() == []

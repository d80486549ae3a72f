"""Whether a cluster with lossy codecs may start, by `up`, which measures, and by processes that are
started alone, which need its record.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.config import ConfigError, load
from splitserve.orchestrator.config.loading import parse
from splitserve.orchestrator.engines.transformers.findings import CodecQuality
from splitserve.orchestrator.launch import quality_gate
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.cache_settings import cache_settings
from splitserve.orchestrator.launch.paths import with_cache_paths
from splitserve.orchestrator.launch.quality_gate import hold_quality
from splitserve.orchestrator.launch.quality_record import (
    keep_record,
    page_number,
    read_record,
    record_path,
    require_quality,
)
from splitserve.orchestrator.launch.single import single_cache, single_node, single_router

if TYPE_CHECKING:
    from pathlib import Path

SECRET = {"SPLITSERVE_SECRET": "5a" * 32}

TEXT = """
name: gated
model: {path: MODEL}
prefill: {cpus: [[0]], engine_args: {dtype: bfloat16, block_size: 32}}
decode: {cpus: [[1]], engine_args: {dtype: bfloat16, block_size: 32}}
cache:
  chunk_tokens: 64
  quality: {text: PROSE, max_kl: 0.005}
  tiers:
    - {type: cpu, capacity_bytes: 64 MiB}
    - {type: disk, capacity_bytes: 256 MiB, codec: CODEC}
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "prose.txt").write_text("words")
    return tmp_path


class Measures:
    """Stands in for the process that loads the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Any, **kl: float) -> None:
        self.asked: list[list[str]] = []
        self._config, self._kl = config, kl
        monkeypatch.setattr(quality_gate, "_measure", self._measure)

    def _measure(self, source: str, names: Any) -> None:
        self.asked.append(list(names))
        keep_record(self._config, figures(**{name: self._kl[name] for name in names}))


def figures(**kl: float) -> list[CodecQuality]:
    """Of codecs that cost so much."""
    return [CodecQuality(name, cost, 0.1, 0.99, 2.0, 100) for name, cost in kl.items()]


def config_of(folder: Path, model: Path, codec: str, **changes: str) -> Any:
    text = TEXT.replace("MODEL", str(model)).replace("CODEC", codec)
    text = text.replace("PROSE", str(folder / "prose.txt"))
    for old, new in changes.items():
        text = text.replace(old, new)
    return parse(text)


def test_a_codec_within_the_limit_may_be_used(
    state: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured once, and again when the text changes; people are told the figures."""
    config = config_of(state, tiny_model, "int8")
    measures = Measures(monkeypatch, config, int8=0.001)
    said: list[str] = []
    for _ in range(3):
        hold_quality(config, "c.yaml", said.append)
    assert measures.asked == [["int8"]]
    assert any("KL divergence 0.001 per token (limit 0.005)" in line for line in said)
    (state / "prose.txt").write_text("other words")
    hold_quality(config, "c.yaml", said.append)
    assert len(measures.asked) == 2


@pytest.mark.parametrize("kl", [0.006, math.nan, math.inf])
def test_a_codec_beyond_the_limit_is_refused(
    state: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kl: float
) -> None:
    """At each start, also from what was kept; what is no number is beyond it."""
    config = config_of(state, tiny_model, "int5z")
    measures = Measures(monkeypatch, config, int5z=kl)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            hold_quality(config, "c.yaml", lambda _: None)
        assert "int5z costs" in refused.value.problems[0]
        assert "0.005 is the most" in refused.value.problems[0]
    assert measures.asked


@pytest.mark.parametrize("codec", ["raw", "bf16z"])
def test_what_loses_nothing_is_not_measured(
    state: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """The model is not even loaded."""
    config = config_of(state, tiny_model, codec)
    measures = Measures(monkeypatch, config)
    hold_quality(config, "c.yaml", lambda _: None)
    require_quality(config)
    assert measures.asked == []


def test_auto_may_lose_only_where_a_limit_is_held(
    state: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``cache.quality`` it may choose ``int8``, which is measured and is part of the keys;
    without it nothing is lost.
    """
    config = config_of(state, tiny_model, "auto")
    measures = Measures(monkeypatch, config, int8=0.001)
    hold_quality(config, "c.yaml", lambda _: None)
    assert measures.asked == [["int8"]]
    assert config.cache.key_codec == "int8"
    free = config.cache.model_copy(update={"quality": None})
    assert (free.key_codec, free.auto_codecs) == ("raw", ("bf16z",))


def test_auto_may_lose_more_where_the_yaml_says_so(
    state: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``int5z`` is then measured, refused beyond the limit, and part of the keys."""
    listed = {"max_kl: 0.005": "max_kl: 0.005, auto: [int5z, int8]"}
    config = config_of(state, tiny_model, "auto", **listed)
    assert config.cache.auto_codecs == ("bf16z", "int8", "int5z")
    assert config.cache.key_codec == "int5z"
    told = cache_settings(with_cache_paths(config).cache, bytes(32)).tiers
    assert told[1].auto_codecs == ("bf16z", "int8", "int5z")
    measures = Measures(monkeypatch, config, int8=0.001, int5z=0.006)
    with pytest.raises(ConfigError, match="int5z costs"):
        hold_quality(config, "c.yaml", lambda _: None)
    assert measures.asked == [["int8", "int5z"]]
    none = config_of(state, tiny_model, "auto", **{"max_kl: 0.005": "max_kl: 0.005, auto: []"})
    assert (none.cache.auto_codecs, none.cache.key_codec) == (("bf16z",), "raw")


def test_a_text_that_is_not_there(state: Path, tiny_model: Path) -> None:
    """Is refused with its path."""
    (state / "prose.txt").unlink()
    with pytest.raises(ConfigError, match=r"prose\.txt cannot be read: No such file"):
        hold_quality(config_of(state, tiny_model, "int8"), "c.yaml", lambda _: None)


def test_a_measure_that_fails_stops_the_start(
    state: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the process said: here the text is too short."""
    config = config_of(state, tiny_model, "int8")
    source = state / "c.yaml"
    source.write_text(
        TEXT.replace("MODEL", str(tiny_model))
        .replace("CODEC", "int8")
        .replace("PROSE", str(state / "nothing.txt"))
    )
    with pytest.raises(StartError, match="could not be measured") as failed:
        hold_quality(config, str(source), lambda _: None)
    assert any("nothing.txt" in line for line in failed.value.details)


def yaml_of(state: Path, model: Path, codec: str = "int8", **changes: str) -> str:
    """The path of a cluster YAML whose nodes are found elsewhere; the cache has no real sizes."""
    text = TEXT.replace("MODEL", str(model)).replace("CODEC", codec)
    text = text.replace("PROSE", str(state / "prose.txt")).replace("64 MiB", "8 MiB")
    for old, new in changes.items():
        text = text.replace(old, new)
    path = state / "c.yaml"
    path.write_text(text + "router: {port: 21998}\n")
    return str(path)


def start(process: str, source: str) -> None:
    """As far as it may be refused. A node and a cache server take all that they were told."""
    if process == "cache-server":
        single_cache(source, SECRET)
    else:
        single_node(source, SECRET, process)


@pytest.mark.parametrize("process", ["prefill-0", "cache-server"])
def test_a_process_alone_needs_a_record(state: Path, tiny_model: Path, process: str) -> None:
    """Without it, or with one of another model, chunk size or codec, or beyond the limit, it is
    refused in words; with one it starts.
    """
    source = yaml_of(state, tiny_model)
    config = config_of(state, tiny_model, "int8")
    path = record_path(config)
    with pytest.raises(ConfigError, match=r"does not say what int8 costs; run `splitserve cache"):
        start(process, source)
    keep_record(config, figures(int5z=0.001))
    with pytest.raises(ConfigError, match=r"no figures of int8; run"):
        start(process, source)
    keep_record(config, figures(int8=0.001))
    start(process, source)
    with pytest.raises(ConfigError, match=r"measured with another cache\.chunk_tokens"):
        start(process, yaml_of(state, tiny_model, **{"chunk_tokens: 64": "chunk_tokens: 96"}))
    source = yaml_of(state, tiny_model)
    good = path.read_text()
    path.write_text(good.replace('"model": "', '"model": "0'))
    with pytest.raises(ConfigError, match="measured with another model; run"):
        start(process, source)
    path.write_text(good.replace("0.001", "0.006"))
    with pytest.raises(ConfigError, match=r"int8 costs 0\.006 nats per token"):
        start(process, source)
    path.write_text("{")
    with pytest.raises(ConfigError, match="does not say what int8 costs"):
        start(process, source)


def test_a_router_alone_needs_none(state: Path, tiny_model: Path) -> None:
    """It holds no KV."""
    single_router(yaml_of(state, tiny_model), SECRET)


def test_the_record_lies_where_the_yaml_says(state: Path, tiny_model: Path) -> None:
    """So that a copy of it counts on a host that has neither the text nor, for a cache server, the
    model.
    """
    named = {"max_kl: 0.005": f"max_kl: 0.005, record: {state / 'deep' / 'q.json'}"}
    config = config_of(state, tiny_model, "int8", **named)
    assert keep_record(config, figures(int8=0.001)) == state / "deep" / "q.json"
    (state / "prose.txt").unlink()
    start("prefill-0", yaml_of(state, tiny_model, **named))
    start("cache-server", yaml_of(state, state / "nowhere", **named))


def test_up_without_the_model_takes_the_record(state: Path, tiny_model: Path) -> None:
    """As on a machine that only starts a cluster on Ray; and refuses what is beyond the limit."""
    keep_record(config_of(state, tiny_model, "int8"), figures(int8=0.001))
    far = config_of(state, state / "nowhere", "int8")
    said: list[str] = []
    hold_quality(far, "c.yaml", said.append)
    assert any("KL divergence 0.001" in line for line in said)
    keep_record(config_of(state, tiny_model, "int8"), figures(int8=0.006))
    with pytest.raises(ConfigError, match="int8 costs"):
        hold_quality(far, "c.yaml", said.append)


@pytest.mark.parametrize(
    "command", [("up",), ("up", "--detach"), ("quickstart",)], ids=lambda command: command[-1]
)
def test_no_command_starts_a_cluster_beyond_the_limit(
    state: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Whichever it is, on Ray too."""
    pool = "{placement: {num_cpus: 1}, engine_args: {dtype: bfloat16, block_size: 32}}"
    (state / "ray.yaml").write_text(
        f"launcher: ray\nmodel: {{path: owner/model}}\nprefill: {pool}\ndecode: {pool}\n"
        f"cache: {{chunk_tokens: 64, quality: {{text: {state}/prose.txt, max_kl: 0.005}}, tiers: "
        "[{type: cpu, capacity_bytes: 8 MiB}, {type: s3, url: 's3://b/p', codec: int8}]}\n"
    )
    config = load(str(state / "ray.yaml"))
    keep_record(config, figures(int8=0.006))
    result = CliRunner().invoke(main, [*command, str(state / "ray.yaml")])
    assert result.exit_code == 2
    assert "int8 costs 0.006 nats per token" in result.stderr


def test_a_record_grows_by_codecs(state: Path, tiny_model: Path) -> None:
    """As long as nothing else has changed; then it begins anew."""
    config = config_of(state, tiny_model, "int8")
    keep_record(config, figures(int8=0.001))
    keep_record(config, figures(int5z=0.002))
    found = read_record(record_path(config))
    assert found is not None
    assert {each.codec for each in found.codecs} == {"int8", "int5z"}
    (state / "prose.txt").write_text("other words")
    keep_record(config, figures(int5z=0.003))
    found = read_record(record_path(config))
    assert found is not None
    assert [(each.codec, each.kl) for each in found.codecs] == [("int5z", 0.003)]


def test_pages_without_a_codec_lose_nothing(state: Path, tiny_model: Path) -> None:
    """Their chunks are kept as they are, so nothing is asked for."""
    args = "{dtype: bfloat16, kv_cache_dtype: fp8, block_size: 32}"
    config = config_of(state, tiny_model, "int8", **{"{dtype: bfloat16, block_size: 32}": args})
    require_quality(config)
    hold_quality(config, "c.yaml", lambda _: None)


@pytest.mark.parametrize(
    ("dtype", "kv", "expected"),
    [
        ("bfloat16", "auto", "bfloat16"), ("float32", "auto", "float32"),
        ("auto", "auto", "float32"), ("bfloat16", "fp8", None), ("float32", "bfloat16", "bfloat16"),
    ],
)  # fmt: skip
def test_what_pages_hold(
    state: Path, tiny_model: Path, dtype: str, kv: str, expected: str | None
) -> None:
    """As the engines are configured; the checkpoint's type where that says ``auto``."""
    args = f"{{dtype: {dtype}, kv_cache_dtype: {kv}, block_size: 32}}"
    config = config_of(state, tiny_model, "int8", **{"{dtype: bfloat16, block_size: 32}": args})
    assert page_number(config) == expected

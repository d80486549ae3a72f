"""Whether a cluster with lossy codecs may start."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.config.loading import parse
from splitserve.orchestrator.engines.transformers.findings import CodecQuality, Measured
from splitserve.orchestrator.launch import quality_gate
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.quality_gate import hold_quality, page_number

if TYPE_CHECKING:
    from pathlib import Path

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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kl: float) -> None:
        self.asked: list[list[str]] = []
        self._kl = kl
        monkeypatch.setattr(quality_gate, "_measure", self._measure)

    def _measure(self, source: str, names: Any) -> Measured:
        self.asked.append(list(names))
        return Measured(
            tuple(CodecQuality(name, self._kl[name], 0.1, 0.99, 2.0, 100) for name in names)
        )


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
    measures = Measures(monkeypatch, int8=0.001)
    config = config_of(state, tiny_model, "int8")
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
    measures = Measures(monkeypatch, int5z=kl)
    config = config_of(state, tiny_model, "int5z")
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
    measures = Measures(monkeypatch)
    hold_quality(config_of(state, tiny_model, codec), "c.yaml", lambda _: None)
    assert measures.asked == []


def test_auto_may_lose_only_where_a_limit_is_held(
    state: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``cache.quality`` it may choose ``int8``, which is measured and is part of the keys;
    without it nothing is lost.
    """
    measures = Measures(monkeypatch, int8=0.001)
    config = config_of(state, tiny_model, "auto")
    hold_quality(config, "c.yaml", lambda _: None)
    assert measures.asked == [["int8"]]
    assert config.cache.key_codec == "int8"
    free = config.cache.model_copy(update={"quality": None})
    assert (free.key_codec, free.auto_codecs) == ("raw", ("bf16z",))


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

"""What codecs cost in quality, with a real (tiny, random) model in the library transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from splitserve.orchestrator.cli.cache_quality import show
from splitserve.orchestrator.cli.main import main
from splitserve.orchestrator.engines.transformers.controls import controls
from splitserve.orchestrator.engines.transformers.findings import CodecQuality, Measured
from splitserve.orchestrator.engines.transformers.quality import (
    KvKind,
    QualityError,
    QualityMeter,
    codec_coder,
)

PROSE = Path(__file__).parents[3] / "data" / "prose.txt"
CHUNK = 64
CLUSTER = """
name: measured
model: {{path: {model}}}
prefill: {{cpus: [[0]], engine_args: {{dtype: bfloat16, block_size: 32}}}}
decode: {{cpus: [[1]], engine_args: {{dtype: bfloat16, block_size: 32}}}}
cache:
  chunk_tokens: 64
  quality: {{text: {text}, max_kl: {max_kl}, tokens: 512}}
  tiers:
    - {{type: cpu, capacity_bytes: 64 MiB}}
    - {{type: disk, capacity_bytes: 256 MiB, codec: int8}}
"""


@pytest.fixture(scope="module")
def meter(tiny_model: Path) -> QualityMeter:
    return QualityMeter(str(tiny_model), KvKind(CHUNK, "bfloat16"))


@pytest.fixture(scope="module")
def found(meter: QualityMeter) -> dict[str, CodecQuality]:
    coders = {name: codec_coder(name) for name in ("bf16z", "int8", "int5z")}
    assert meter.rope_theta == 10_000.0
    coders |= controls(meter.rope_theta)
    return {each.codec: each for each in meter.measure(PROSE.read_text(), coders, tokens=600)}


def test_lossless_codecs_cost_nothing(found: dict[str, CodecQuality]) -> None:
    """To the bit: the predictions are the same numbers."""
    assert (found["bf16z"].kl, found["bf16z"].kl_p99, found["bf16z"].top1) == (0.0, 0.0, 1.0)
    assert found["bf16z"].tokens == 2 * CHUNK


def test_fewer_bits_cost_more_and_are_fewer_bytes(found: dict[str, CodecQuality]) -> None:
    """The order of the codecs is that of both."""
    kl = [found[name].kl for name in ("bf16z", "int8", "int5z")]
    ratio = [found[name].ratio for name in ("bf16z", "int8", "int5z")]
    assert kl == sorted(kl)
    assert kl[1] > 0
    assert ratio == sorted(ratio)
    assert found["int8"].top1 > 0.9


@pytest.mark.parametrize("fault", ["int8, wrong scale", "int8, wrong position"])
def test_faults_are_seen(found: dict[str, CodecQuality], fault: str) -> None:
    """A scale that is a quarter off, or keys that are sixteen tokens off, cost many times what the
    codec costs.
    """
    assert found[fault].kl > 10 * found["int5z"].kl > 10 * found["int8"].kl


def test_a_text_that_is_too_short_is_refused(meter: QualityMeter) -> None:
    """With the numbers."""
    with pytest.raises(QualityError, match="256 are the least"):
        meter.measure("short", {"int8": codec_coder("int8")}, tokens=4096)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """With what transformers says."""
    with pytest.raises(QualityError, match="cannot be loaded"):
        QualityMeter(str(tmp_path), KvKind(CHUNK, "bfloat16"))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["cache", "quality", *arguments])


def test_the_command_measures_and_holds_the_limit(tiny_model: Path, tmp_path: Path) -> None:
    """Exit status 1 and a sentence when a codec of the cluster's tiers costs more."""
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.format(model=tiny_model, text=PROSE, max_kl=1e-9))
    result = run(str(path), "--json")
    assert result.exit_code == 1, result.output
    answer = json.loads(result.stdout)
    assert [each["codec"] for each in answer["codecs"]] == ["bf16z", "int8", "int5z"]
    assert answer["codecs"][1]["tokens"] == 2 * CHUNK
    assert "int8 costs" in result.stderr
    assert "int5z costs" not in result.stderr
    lines = result.stderr.splitlines()
    for words in ("loading tiny in float32", "measuring bf16z, int8, int5z on at most 512 tokens"):
        assert any(line.startswith(words) for line in lines), result.stderr
    assert [line.split(" in ")[0] for line in lines if " to go" in line] == [
        f"{done} of 6 steps" for done in range(1, 7)
    ]


def test_a_text_that_sees_no_fault_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """With a limit so high that the spoiled controls pass."""
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.format(model=tiny_model, text=PROSE, max_kl=100))
    result = run(str(path), "--codec", "int8", "--controls")
    assert result.exit_code == 1, result.output
    assert "wrong position" in result.stdout
    assert "tells nothing" in result.stderr


def test_people_see_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Each codec's figures and the limit."""
    show(Measured((CodecQuality("int8", 1.14e-4, 7e-4, 0.995, 1.954, 1024),)), 5e-4)
    out = capsys.readouterr().out
    for expected in ("int8", "0.00011", "99.5%", "1.95", "1024 predictions", "0.0005 nats"):
        assert expected in out


def test_a_cluster_without_a_model_is_refused(tmp_path: Path) -> None:
    """Mock engines have none; a text has to be named."""
    path = tmp_path / "mock.yaml"
    path.write_text("name: m\nengine: mock\nmodel: {path: m}\n")
    assert "has no model" in run(str(path), "--text", str(PROSE)).stderr
    assert "name a text" in run(str(path)).stderr

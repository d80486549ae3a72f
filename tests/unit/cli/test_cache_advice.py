"""``splitserve cache advise``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from splitserve.orchestrator.cli.advice_picture import svg
from splitserve.orchestrator.cli.cache_advice import advise
from splitserve.orchestrator.cli.charts import Curve
from splitserve.orchestrator.cli.errors import EXIT_FAILED, EXIT_REFUSED, TellingGroup

if TYPE_CHECKING:
    from pathlib import Path

CHAT = [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6], [1, 2, 5, 7]]
"""Two chats that take turns; blocks of ten tokens."""


def trace_of(
    folder: Path, prompts: list[list[int]], contents: list[list[int]] | None = None
) -> str:
    path = folder / "chats.jsonl"
    lines = []
    for number, ids in enumerate(prompts):
        line: dict[str, Any] = {"timestamp": number, "input_length": 10 * len(ids) + 1}
        line |= {"output_length": 1, "hash_ids": [*ids, 1000 + number]}
        if contents is not None:
            line["content_ids"] = [*contents[number], 1000 + number]
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return str(path)


def run(*arguments: str) -> tuple[int, str, str]:
    group = TellingGroup(commands={"advise": advise})
    result = CliRunner().invoke(group, ["advise", "--block-tokens", "10", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def found(*arguments: str) -> Any:
    code, out, err = run("--json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_curve_ends_at_what_can_be_saved(tmp_path: Path) -> None:
    """Sizes are those up to what the trace needs; the partial last blocks are not stored."""
    result = found("--trace", trace_of(tmp_path, CHAT), "--policy", "lru")
    assert result["requests"] == 5
    ceiling = result["ceiling"]
    assert (ceiling["capacity_chunks"], ceiling["saved_tokens"]) == (7, 70)
    assert ceiling["hit_share"] == pytest.approx(7 / 14)
    assert ceiling["saved_share"] == pytest.approx(70 / 145, abs=1e-4)
    sizes = {row["capacity_chunks"]: row["saved_tokens"] for row in result["sizes"]}
    assert list(sizes) == [1, 2, 3, 4, 5, 6, 7]
    assert [sizes[size] for size in (1, 2, 4, 7)] == [0, 0, 40, 70]
    assert ceiling["capacity_bytes"] is None


def test_tiers_say_what_they_add(tmp_path: Path) -> None:
    """Each to those above it, and what twice its size would add."""
    arguments = ["--trace", trace_of(tmp_path, CHAT), "--policy", "lru"]
    arguments += ["--bytes-per-token", "100", "--tier", "cpu=2kB", "--tier", "disk=7kB"]
    cpu, disk = found(*arguments)["tiers"]
    assert (cpu["name"], cpu["capacity_bytes"], cpu["saved_tokens"]) == ("cpu", 2_000, 0)
    assert cpu["doubled_adds_share"] == pytest.approx(40 / 145, abs=1e-4)
    assert (disk["name"], disk["saved_tokens"]) == ("disk", 70)
    assert disk["adds_share"] == pytest.approx(70 / 145, abs=1e-4)
    assert disk["doubled_adds_share"] == 0


def test_more_users_hit_less(tmp_path: Path) -> None:
    """Twice the users save as much with twice the size."""
    arguments = ["--trace", trace_of(tmp_path, CHAT), "--policy", "lru", "--users-factor", "2"]
    sizes = {row["capacity_chunks"]: row for row in found(*arguments)["sizes"]}
    assert sizes[4]["crowded"]["saved_share"] < sizes[4]["saved_share"]
    assert sizes[4]["crowded"]["saved_share"] == sizes[2]["saved_share"]


def test_tables_and_sentences(tmp_path: Path) -> None:
    """People see sizes in bytes, the policy, a bar, the tiers and what the trace cannot tell."""
    arguments = ["--trace", trace_of(tmp_path, CHAT), "--bytes-per-token", "100"]
    arguments += ["--tier", "cpu=2kB", "--users-factor", "2"]
    code, out, _ = run(*arguments)
    assert code == 0
    assert "chats.jsonl: 5 requests, 145 prompt tokens" in out
    assert "would hold 7 kB, hit 50.0% of chunks and save 48.3% of prefill" in out
    for expected in ("s3fifo", "users", "█", "100%", "cpu", "points", "no content_ids"):
        assert expected in out


def test_prompts_that_lost_their_beginning_are_reported(tmp_path: Path) -> None:
    """With content ids: how many, what they miss, and which."""
    prompts, contents = [[1, 2, 3, 4], [5, 6]], [[1, 2, 3, 4], [3, 4]]
    path = trace_of(tmp_path, prompts, contents)
    assert found("--trace", path)["truncated"] == {"requests": 1, "lost_blocks": 2}
    assert found("--trace", path, "--truncated-blocks", "3")["truncated"]["requests"] == 0
    _, out, _ = run("--trace", path)
    assert "1 prompts repeat" in out
    assert "request 2: 2 blocks of request 1" in out
    _, out, _ = run("--trace", trace_of(tmp_path, prompts, prompts))
    assert "No prompt repeats an earlier one" in out


def test_the_picture_is_svg(tmp_path: Path) -> None:
    """One line per curve and a dashed one for the ceiling, inside the frame."""
    picture = tmp_path / "curve.svg"
    code, out, _ = run(
        *("--trace", trace_of(tmp_path, CHAT), "--users-factor", "3"),
        *("--bytes-per-token", "100", "--tier", "cpu=2kB", "--picture", str(picture)),
    )
    assert code == 0
    assert "The picture is in" in out
    root = ElementTree.fromstring(picture.read_text())
    curves = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == 2
    for curve in curves:
        for point in curve.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 760
            assert 0 <= y <= 440
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"cpu", "7 kB", "with 3 times the users", "no cache saves more: 48.3%"} <= set(texts)


def test_a_picture_of_one_size_can_be_drawn() -> None:
    """And names are escaped."""
    text = svg("a < b", [Curve("&", ((5.0, 0.0),))], 0.0, [], str)
    assert ElementTree.fromstring(text) is not None


def test_a_models_kv_is_counted(tmp_path: Path) -> None:
    """From its config.json; one that does not say is refused."""
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    config |= {"num_hidden_layers": 3, "torch_dtype": "float32"}  # type: ignore[dict-item]
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = trace_of(tmp_path, CHAT)
    result = found("--trace", trace, "--model", str(tmp_path))
    assert result["bytes_per_token"] == 2 * 3 * 2 * 8 * 4
    nested = {"text_config": {**config, "head_dim": 16}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert (
        found("--trace", trace, "--model", str(tmp_path))["bytes_per_token"] == 2 * 3 * 2 * 16 * 2
    )
    for broken in ({}, {**config, "kv_lora_rank": 512}, {**config, "dtype": "int3"}, [1]):
        (tmp_path / "config.json").write_text(json.dumps(broken))
        code, _, err = run("--trace", trace, "--model", str(tmp_path))
        assert code == EXIT_REFUSED
        assert "give --bytes-per-token" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tier", "cpu=1GB"], "needs --model or --bytes-per-token"),
        (["--bytes-per-token", "100", "--tier", "cpu=1 furlong"], "write a tier as NAME=SIZE"),
        (["--bytes-per-token", "100", "--tier", "1GB"], "write a tier as NAME=SIZE"),
        (["--bytes-per-token", "100", "--tier", "cpu=999"], "room for a chunk of 1 kB"),
        (
            ["--bytes-per-token", "100", "--tier", "cpu=1GB", "--tier", "cpu=2GB"],
            "there is a tier cpu already",
        ),
        (["--bytes-per-token", "1", "--model", "x"], "not both"),
        (["--model", "owner/name"], "is not on this machine"),
        (["--picture", "curve.png"], "name a file.svg"),
        (["--block-tokens", "1000"], "is the size of blocks right?"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, arguments: list[str], expected: str) -> None:
    """With a sentence and the status of a refusal; no traceback."""
    code, out, err = run("--trace", trace_of(tmp_path, CHAT), *arguments)
    assert (code, out) == (EXIT_REFUSED, "")
    assert err.startswith("error: ")
    assert expected in err


def test_bad_files_are_told(tmp_path: Path) -> None:
    """Missing, not a trace, without a whole block."""
    code, _, err = run("--trace", str(tmp_path / "none.jsonl"))
    assert (code, err) == (
        EXIT_FAILED,
        f"error: {tmp_path}/none.jsonl: No such file or directory\n",
    )
    (tmp_path / "bad.jsonl").write_text("hello\n")
    code, _, err = run("--trace", str(tmp_path / "bad.jsonl"))
    assert code == EXIT_REFUSED
    assert "bad.jsonl, line 1: this is no known format" in err
    code, _, err = run("--trace", trace_of(tmp_path, [[]]))
    assert code == EXIT_REFUSED
    assert "nothing can be saved" in err

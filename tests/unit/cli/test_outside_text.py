"""What engines, peers and configurations say is shown as it is: nothing of it is markup, and a
terminal obeys none of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from click.testing import CliRunner

from splitserve.orchestrator import cli
from splitserve.orchestrator.agent.status_file import NodeStatus
from splitserve.orchestrator.cli.bench_tool import ToolError
from splitserve.orchestrator.cli.doctor import _print
from splitserve.orchestrator.cli.errors import TellingGroup
from splitserve.orchestrator.cli.up import _print_cluster
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.finding import Finding

if TYPE_CHECKING:
    import pytest

CAUSE = "ValueError: [/models/x] is [red] \x1b[2J\nat alloc_cpu.cpp:117"
_CONSOLE = re.compile(r"\bConsole\(((?:[^()]|\([^()]*\))*)\)(?!\.is_terminal)")
SHOWN = "ValueError: [/models/x] is [red] ?[2J?at alloc_cpu.cpp:117"


def test_an_engines_last_words_in_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, with brackets, without what a terminal would obey."""
    monkeypatch.setenv("COLUMNS", "400")
    facts = {
        "name": "demo",
        "phase": "serving",
        "url": "http://127.0.0.1:1",
        "pid": 1,
        "source": "[/root]/x.yaml",
        "running": True,
        "nodes": [msgspec.to_builtins(_failed()) | {"owed": {}}],
        "routers": [],
        "flip_obstacle": "",
        "autotune": None,
        "cache": None,
    }
    _print_cluster(facts)
    shown = capsys.readouterr().out
    assert f"failed: {SHOWN}" in shown
    assert "from [/root]/x.yaml)" in shown


def test_an_engines_story_in_an_error() -> None:
    """The same for what ends a start."""

    @click.group(cls=TellingGroup)
    def main() -> None:
        pass

    @main.command()
    def fail() -> None:
        raise StartError("it failed", ("a\tb", CAUSE.replace("\n", " ")))

    told = CliRunner().invoke(main, ["fail"]).stderr
    assert "\x1b" not in told
    assert "  | ValueError: [/models/x] is [red] ?[2J at alloc_cpu.cpp:117\n" in told


def test_what_the_doctor_and_the_load_generator_were_told() -> None:
    """The same for a finding's words, and for a server's in the generator's story; its colours are
    left out.
    """
    with CliRunner().isolation() as (told, _, _):
        _print(Finding("model", "a\x1b]0;x\x07b"))
        assert told.getvalue().decode() == "ok    model: a?]0;x?b\n"
    assert str(ToolError("it failed", ["\x1b[31mred\x1b[0m", "a\x1b]0;b\rc"])).splitlines() == [
        "it failed",
        "  | red",
        "  | a?]0;b",
        "  | c",
    ]


def test_no_console_reads_markup() -> None:
    """Except those on standard error, which show this program's own words."""
    made = {
        f"{path.name}: {found}"
        for path in Path(cli.__path__[0]).glob("*.py")
        for found in _CONSOLE.findall(path.read_text())
    }
    assert made
    wrong = [told for told in made if not ("markup=False" in told or "stderr=True" in told)]
    assert wrong == []


def _failed() -> NodeStatus:
    """A node whose engine has said that."""
    return NodeStatus(
        node="prefill-0",
        phase="failed",
        role="prefill",
        stage="",
        elapsed_s=1.0,
        incarnation="",
        agent_pid=1,
        engine_url="",
        log_path="",
        likely_cause=CAUSE,
    )

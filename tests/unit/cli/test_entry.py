"""Ctrl-C whatever a command is about: while it is imported, and while it runs."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from click.testing import CliRunner

from splitserve.orchestrator.cli import up
from splitserve.orchestrator.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

AS_IN_A_TERMINAL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Where tests run in the background, processes may be begun with Ctrl-C ignored."""
INTERRUPTED = """
import os, sys

class Commands:
    def find_spec(self, name, path, target=None):
        if name == "splitserve.orchestrator.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Commands())
from splitserve.orchestrator.cli.entry import main
main()
"""
"""Ctrl-C when the import of the commands begins."""


def ended(program: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", AS_IN_A_TERMINAL + program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_interrupted_imports_end_quietly() -> None:
    """Status 130 and not a word."""
    result = ended(INTERRUPTED)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_after_the_imports_the_command_runs() -> None:
    """With its words, and Ctrl-C as Python has it."""
    result = ended(
        "import sys; sys.argv = ['splitserve', 'version']\n"
        "from splitserve.orchestrator.cli.entry import main\n"
        "try:\n    main()\n"
        "finally:\n    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("splitserve ")


def test_an_interrupted_command_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 130, without a traceback or "Aborted!"."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(up, "known_clusters", interrupted)
    result = CliRunner().invoke(main, ["status"])
    assert (result.exit_code, result.output) == (130, "")

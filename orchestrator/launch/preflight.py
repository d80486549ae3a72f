"""What this machine must offer before anything is started: ``up`` refuses, ``doctor`` explains.

Each check lies in a module of ``checks``; ``checks.table`` lists them.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.launch.checks.subject import Subject
from splitserve.orchestrator.launch.checks.table import CHECKS
from splitserve.orchestrator.launch.finding import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from splitserve.orchestrator.config import ClusterConfig


_KEYS = "engine_args"
"""Told first: where a key is misspelt, what else is wrong may come of that."""


def findings(subject: Subject, *, measures: bool = False) -> Iterator[tuple[Finding, float]]:
    """What each check found and the seconds that it took, in the order of the table; those that
    measure only if asked for.
    """
    failed: set[str] = set()
    for check in CHECKS:
        if check.measures and not measures:
            continue
        started = time.monotonic()
        first = [name for name in check.after if name in failed]
        if first:
            finding = Finding(check.name, f"not looked at before {', '.join(first)} is mended")
        else:
            finding = check.find(subject)
        if finding.severity is Severity.FAIL:
            failed.add(check.name)
        yield finding, time.monotonic() - started


def preflight(config: ClusterConfig, environ: Mapping[str, str] | None = None) -> None:
    """Every quick check of a cluster on this machine has passed; else raises ``ConfigError`` with
    all problems at once.
    """
    check(Subject(config, os.environ if environ is None else environ))


def check(subject: Subject) -> None:
    """The same, of what runs here."""
    found = [finding for finding, _ in findings(subject)]
    found.sort(key=lambda finding: finding.check != _KEYS)
    problems = [problem for finding in found for problem in finding.failures]
    if problems:
        raise ConfigError(problems)

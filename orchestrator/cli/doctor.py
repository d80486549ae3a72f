"""``splitserve doctor``: every check that ``up`` makes before it starts anything, and those that
measure, with what was found and what to change.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import click

from splitserve.orchestrator.cli.errors import EXIT_REFUSED, RefusedError
from splitserve.orchestrator.cli.figures import as_lines
from splitserve.orchestrator.cli.running_findings import running_cluster
from splitserve.orchestrator.config import ConfigError, nodes
from splitserve.orchestrator.config.loading import load_with_contradictions
from splitserve.orchestrator.launch.checks.network import members_here
from splitserve.orchestrator.launch.checks.subject import ROUTER, Subject
from splitserve.orchestrator.launch.files import ClusterFiles
from splitserve.orchestrator.launch.finding import Finding, Severity, gravest, told
from splitserve.orchestrator.launch.paths import with_cache_paths, with_profile_path
from splitserve.orchestrator.launch.preflight import findings

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORT_VERSION = 1
"""Of the form of ``--json``; names are added to it, never changed."""


@click.command()
@click.argument("config", default="quickstart")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--node", "names", multiple=True, metavar="NAME", help="Check only what this node "
    "needs of this machine (`router`: the router); may be repeated. By default what the YAML's "
    "`hosts` place here.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Leave out what measures: transports, tiers, clocks.")
def doctor(config: str, names: tuple[str, ...], as_json: bool, quick: bool) -> None:
    """Check CONFIG against this machine; no engine is started. Exit status 2 when something must be
    changed.
    """
    report = _Report(config)
    try:
        subject = _subject(config, names)
    except ConfigError as error:
        if not as_json:
            raise
        report.add(Finding("configuration", "cannot be used", told(error.problems)), 0.0)
    else:
        for finding, seconds in _all_findings(subject, measures=not quick):
            report.add(finding, seconds)
            if not as_json:
                _print(finding)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=1))
    else:
        click.echo(report.verdict())
    if report.severity is Severity.FAIL:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _subject(config: str, names: tuple[str, ...]) -> Subject:
    loaded, contradictions = load_with_contradictions(config)
    known = [ROUTER, *(node.name for node in nodes(loaded))]
    if unknown := [name for name in names if name not in known]:
        raise RefusedError(f"no node {unknown[0]!r} in {config}; known: {', '.join(known)}")
    files = ClusterFiles(loaded.name)
    return Subject(
        config=with_profile_path(with_cache_paths(loaded)),
        environ=os.environ,
        contradictions=tuple(contradictions),
        running=files.record() if files.is_running() else None,
        here=frozenset(names) if names else members_here(loaded),
    )


def _all_findings(subject: Subject, *, measures: bool) -> Iterator[tuple[Finding, float]]:
    if subject.running is not None:
        started = time.monotonic()
        finding = running_cluster(ClusterFiles(subject.config.name), subject.running)
        yield finding, time.monotonic() - started
    yield from findings(subject, measures=measures)


class _Report:
    """Everything that was found."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._found: list[tuple[Finding, float]] = []

    def add(self, finding: Finding, seconds: float) -> None:
        """One more."""
        self._found.append((finding, seconds))

    @property
    def severity(self) -> Severity:
        """That of the gravest finding."""
        return gravest(finding.severity for finding, _ in self._found)

    def verdict(self) -> str:
        """How many things there are to change, in one line."""
        problems = [problem for finding, _ in self._found for problem in finding.problems]
        failures = sum(problem.severity is Severity.FAIL for problem in problems)
        warnings = len(problems) - failures
        took = sum(seconds for _, seconds in self._found)
        return (
            f"{len(self._found)} checks in {took:.1f} s: {failures} to change before it can serve, "
            f"{warnings} warning{'' if warnings == 1 else 's'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The whole report."""
        return {
            "version": REPORT_VERSION,
            "config": self._config,
            "severity": str(self.severity),
            "findings": [
                {**finding.as_dict(), "seconds": round(seconds, 3)}
                for finding, seconds in self._found
            ],
        }


def _print(finding: Finding) -> None:
    lines = as_lines(f"{finding.severity:5} {finding.check}: {finding.detail}")
    for problem in finding.problems:
        grade = "" if problem.severity is Severity.FAIL else "warning: "
        lines += as_lines(f"      - {grade}{problem}")
    click.echo("\n".join(lines))

"""What a check has found: how grave it is, what was measured, and for each problem the key and the
remedy.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_SECTIONS = (
    "name|engine|launcher|ray|model|router|prefill|decode|cache|policy|security|observability|supervision"
    "|experimental_cuda|allow_shared_devices"
)
_KEY = re.compile(rf"(?<![\w.-])(?:{_SECTIONS})(?:\.[a-z_][a-z0-9_-]*|\[\d+\])*(?![\w-])")
_PATH = re.compile(rf"(?<![\w.-])(?:{_SECTIONS})(?:\.[a-z_][a-z0-9_-]*|\[\d+\])+")


class Severity(enum.StrEnum):
    """How grave a finding is, least first."""

    OK = "ok"
    WARN = "warn"
    """It starts, and something will be slow, refused or lost."""
    FAIL = "FAIL"
    """It does not start, or does not serve; ``up`` refuses it."""


_RANK = {severity: rank for rank, severity in enumerate(Severity)}


def gravest(severities: Iterable[Severity]) -> Severity:
    """The gravest of them; ``ok`` when there is none."""
    return max(severities, key=_RANK.__getitem__, default=Severity.OK)


@dataclass(frozen=True)
class Problem:
    """One thing to change."""

    keys: tuple[str, ...]
    """What to change: keys of the YAML, variables of the environment, settings of the kernel."""
    what: str
    """What is wrong, with the values."""
    fix: str
    """What to do about it."""
    severity: Severity = Severity.FAIL
    sentence: str = ""
    """All of it in words, where it was told as one sentence."""

    def __str__(self) -> str:
        return self.sentence or f"{', '.join(self.keys)}: {self.what}; {self.fix}"

    @classmethod
    def told(cls, sentence: str, severity: Severity = Severity.FAIL) -> Problem:
        """A problem that comes as a sentence, ``KEY: what is wrong; what to do``. Where it does not
        begin with keys they are looked for in it.
        """
        head, _, rest = sentence.partition(": ")
        begins = [part.split(" (line ")[0] for part in head.split(", ")]
        if rest and all(_KEY.fullmatch(part) for part in begins):
            keys, text = tuple(begins), rest
        else:
            keys, text = tuple(dict.fromkeys(_PATH.findall(sentence))), sentence
        mark = "; " if "; " in text else ": "
        what, _, fix = text.rpartition(mark)
        return cls(keys, what or text, fix, severity, sentence)

    def as_dict(self) -> dict[str, Any]:
        """For ``doctor --json``."""
        return {
            "severity": str(self.severity),
            "keys": list(self.keys),
            "what": self.what,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Finding:
    """The result of one check. No problems means that it passed."""

    check: str
    detail: str
    """What was looked at, with the values found."""
    problems: tuple[Problem, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    """Figures behind ``detail``, each name with its unit."""

    @property
    def severity(self) -> Severity:
        """That of its gravest problem."""
        return gravest(problem.severity for problem in self.problems)

    @property
    def failures(self) -> list[str]:
        """Its problems that keep a cluster from starting, as sentences."""
        return [str(p) for p in self.problems if p.severity is Severity.FAIL]

    def as_dict(self) -> dict[str, Any]:
        """For ``doctor --json``."""
        return {
            "check": self.check,
            "severity": str(self.severity),
            "detail": self.detail,
            "problems": [problem.as_dict() for problem in self.problems],
            "measured": self.measured,
        }


def told(sentences: Iterable[str], severity: Severity = Severity.FAIL) -> tuple[Problem, ...]:
    """Problems that come as sentences."""
    return tuple(Problem.told(sentence, severity) for sentence in sentences)


def warning(keys: str | tuple[str, ...], what: str, fix: str) -> Problem:
    """Something that will be slow, refused or lost."""
    return Problem((keys,) if isinstance(keys, str) else keys, what, fix, Severity.WARN)


def failure(keys: str | tuple[str, ...], what: str, fix: str) -> Problem:
    """Something that keeps a cluster from starting or serving."""
    return Problem((keys,) if isinstance(keys, str) else keys, what, fix)

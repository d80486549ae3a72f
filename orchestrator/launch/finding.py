"""What a check of this machine has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``problems`` say what to change; empty means that it passed."""

    check: str
    detail: str
    problems: tuple[str, ...] = ()

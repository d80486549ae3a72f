"""Before ``up`` starts a cluster with ``cache.quality``: what its lossy codecs cost, and whether
that is allowed.

The model is loaded by a process of its own (``splitserve cache quality``), whose memory is free
again when engines start. What it found counts for as long as model, text and settings are the same
(``quality_record.py``).
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.quality_record import (
    can_lose,
    covering,
    facts_here,
    facts_with_text,
    held_quality,
    lossy_codecs,
    record_path,
    too_lossy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.orchestrator.config import ClusterConfig

MEASURE_LIMIT_S = 3600.0
_LOG_LINES = 15


def hold_quality(config: ClusterConfig, source: str, say: Callable[[str], None]) -> None:
    """Nothing, when no lossy codec costs more than ``cache.quality.max_kl``. ``source`` is the YAML
    of this configuration.

    A machine without the model takes the record's word for it. Raises ``ConfigError`` when a codec
    costs more, and ``StartError`` when it cannot be measured.
    """
    quality, names = held_quality(config), lossy_codecs(config)
    if quality is None:
        return
    facts = facts_here(config)
    if not can_lose(facts):
        return
    if "model" in facts:
        facts = facts_with_text(config)
    found = covering(config, facts)
    if found is None:
        say(f"measuring what {' and '.join(names)} cost in quality; this is done once")
        _measure(source, names)
        found = covering(config, facts)
    if found is None:
        raise StartError(
            f"{record_path(config)} has not the figures that were measured; did model or text "
            "change meanwhile?"
        )
    for each in found:
        say(
            f"codec {each.codec}: KL divergence {each.kl:.2g} per token (limit "
            f"{quality.max_kl:g}), {each.top1:.1%} of likeliest tokens unchanged"
        )
    if problems := too_lossy(found, quality.max_kl):
        raise ConfigError(problems, source)


def _measure(source: str, names: Sequence[str]) -> None:
    """The record has their figures."""
    command = [sys.executable, "-m", "splitserve.orchestrator.cli.main", "cache", "quality", source]
    command += [argument for name in names for argument in ("--codec", name)]
    failed = "the quality of the cache's codecs could not be measured"
    try:
        ended = subprocess.run(
            [*command, "--no-limit"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=MEASURE_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"{failed} within {MEASURE_LIMIT_S:.0f} s; lower cache.quality.tokens"
        ) from error
    if ended.returncode:
        raise StartError(failed, tuple(ended.stderr.splitlines()[-_LOG_LINES:]))

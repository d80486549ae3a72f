"""Before a cluster with ``cache.quality`` starts: what its lossy codecs cost, and whether that is
allowed.

The model is loaded by a process of its own (``splitserve cache quality``), whose memory is free
again when engines start. What was found is kept beside the cluster's files for as long as model,
text and codecs are the same.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from splitserve.kernels.quantise import NUMBERS
from splitserve.kv_transfer.cache.codecs.names import LOSSY
from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.engines.transformers.findings import Measured
from splitserve.orchestrator.launch.base import StartError
from splitserve.orchestrator.launch.checks.model import model_of
from splitserve.orchestrator.launch.files import ClusterFiles, write_private
from splitserve.orchestrator.models.folder_facts import read_facts
from splitserve.orchestrator.models.identity import weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitserve.kv_transfer.cache.codecs.names import CodecName
    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.engines.transformers.findings import CodecQuality

MEASURE_LIMIT_S = 3600.0
_LOG_LINES = 15


def lossy_codecs(config: ClusterConfig) -> list[CodecName]:
    """Those that some tier may use."""
    return [] if config.cache is None else [name for name in config.cache.codecs if name in LOSSY]


def page_number(config: ClusterConfig) -> str | None:
    """What the engines' pages hold, one of ``NUMBERS``; None for kinds without a codec. Raises
    ``ModelError`` for a model folder that cannot be read.
    """
    args = config.prefill.engine_args
    kind = args.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    if kind == "auto":
        folder = Path(model_of(config))
        kind = read_facts(folder).dtype or "bfloat16" if folder.is_dir() else "bfloat16"
    return kind if kind in NUMBERS else None


def hold_quality(config: ClusterConfig, source: str, say: Callable[[str], None]) -> None:
    """Nothing, when no lossy codec costs more than ``cache.quality.max_kl``. ``source`` is the YAML
    of this configuration.

    Raises ``ConfigError`` when one does, and ``StartError`` when it cannot be measured.
    """
    names = lossy_codecs(config)
    if config.cache is None or config.cache.quality is None or not names:
        return
    limit, path = config.cache.quality.max_kl, ClusterFiles(config.name).run_dir / "quality.json"
    what = _depends_on(config, names)
    measured = _kept(path, what)
    if measured is None:
        say(f"measuring what {' and '.join(names)} cost in quality; this is done once")
        measured = _measure(source, names)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = msgspec.structs.replace(measured, what=what)
        write_private(path, msgspec.json.encode(kept))
    for found in measured.codecs:
        say(
            f"codec {found.codec}: KL divergence {found.kl:.2g} per token (limit {limit:g}), "
            f"{found.top1:.1%} of likeliest tokens unchanged"
        )
    problems = too_lossy(measured.codecs, limit)
    if problems:
        raise ConfigError(problems, source)


def too_lossy(found: Sequence[CodecQuality], max_kl: float) -> list[str]:
    """One sentence for each codec that costs more than that, or what is no number."""
    return [
        f"cache.quality.max_kl: {each.codec} costs {each.kl:.2g} nats per token with this model "
        f"and text, {max_kl:g} is the most; choose a codec that loses less, or raise the limit"
        for each in found
        if not each.kl <= max_kl
    ]


def _depends_on(config: ClusterConfig, names: Sequence[str]) -> str:
    assert config.cache is not None
    quality = config.cache.quality
    assert quality is not None
    try:
        text = Path(quality.text).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            [f"cache.quality.text: {quality.text} cannot be read: {error.strerror}"]
        ) from error
    digest = hashlib.blake2b(text, digest_size=16)
    model = weights_identity(Path(model_of(config)), None)
    facts = (model, page_number(config), config.cache.chunk_tokens, quality.tokens,
             quality.compute, *names)  # fmt: skip
    digest.update(repr(facts).encode())
    return digest.hexdigest()


def _kept(path: Path, what: str) -> Measured | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Measured)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return found if found.what == what else None


def _measure(source: str, names: Sequence[str]) -> Measured:
    command = [sys.executable, "-m", "splitserve.orchestrator.cli.main", "cache", "quality", source]
    command += [argument for name in names for argument in ("--codec", name)]
    failed = "the quality of the cache's codecs could not be measured"
    try:
        ended = subprocess.run(
            [*command, "--no-limit", "--json"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=MEASURE_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"{failed} within {MEASURE_LIMIT_S:.0f} s; lower cache.quality.tokens"
        ) from error
    if ended.returncode:
        raise StartError(failed, tuple(ended.stderr.splitlines()[-_LOG_LINES:]))
    return msgspec.json.decode(ended.stdout, type=Measured)

"""What lossy codecs were measured to cost, in a file that every process of the cluster can read.

``splitserve cache quality`` and ``up`` write it; whoever may use lossy chunks and does not measure
itself (``splitserve node``, ``cache-server``, manifests for Kubernetes, hosts of Ray) holds it to
the limit of its own YAML. It names what it was measured with, by content, so a copy of it counts on
every machine with that model. The text is compared by ``up`` alone, which can measure again.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.kernels.quantise import NUMBERS
from splitserve.kv_transfer.cache.codecs.names import LOSSY
from splitserve.orchestrator.config import ConfigError
from splitserve.orchestrator.engines.transformers.findings import CodecQuality
from splitserve.orchestrator.launch.checks.model import model_of
from splitserve.orchestrator.launch.files import ClusterFiles, write_private
from splitserve.orchestrator.models.folder_facts import read_facts
from splitserve.orchestrator.models.identity import weights_identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitserve.kv_transfer.cache.codecs.names import CodecName
    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.config.cache_schema import QualityConfig

FILE_NAME = "quality.json"
_WORDS = {
    "model": "another model",
    "number": "pages of another kind of number",
    "chunk_tokens": "another cache.chunk_tokens",
    "tokens": "another cache.quality.tokens",
    "compute": "another cache.quality.compute",
    "text": "another text",
}


class QualityRecord(msgspec.Struct, frozen=True):
    """The figures, and all that they depend on."""

    model: str
    """Content of the weights, or a Hub id."""
    number: str
    """What the engines' pages hold."""
    chunk_tokens: int
    tokens: int
    compute: str
    text: str
    """Content of the text."""
    codecs: tuple[CodecQuality, ...]


def lossy_codecs(config: ClusterConfig) -> list[CodecName]:
    """Those that some tier may use."""
    return [] if config.cache is None else [name for name in config.cache.codecs if name in LOSSY]


def held_quality(config: ClusterConfig) -> QualityConfig | None:
    """The limit that the cluster's codecs are held to; None where none is set, and where nothing is
    lost.
    """
    if config.cache is None or not lossy_codecs(config):
        return None
    return config.cache.quality


def page_number(config: ClusterConfig) -> str | None:
    """What the engines' pages hold, one of ``NUMBERS``; None for kinds without a codec. Raises
    ``ConfigError`` and ``ModelError`` where only the model tells and it cannot be read here.
    """
    args = config.prefill.engine_args
    kind = args.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    if kind == "auto":
        folder = Path(model_of(config))
        kind = read_facts(folder).dtype or "bfloat16" if folder.is_dir() else "bfloat16"
    return kind if kind in NUMBERS else None


def record_path(config: ClusterConfig) -> Path:
    """Where this machine has the record: ``cache.quality.record``, or beside the cluster's
    files.
    """
    quality = config.cache.quality if config.cache is not None else None
    if quality is not None and quality.record is not None:
        return Path(quality.record).expanduser()
    return ClusterFiles(config.name).run_dir / FILE_NAME


def read_record(path: Path) -> QualityRecord | None:
    """None when there is none, or none that this version has written. Raises ``ConfigError`` when
    it cannot be read.
    """
    try:
        return msgspec.convert(json.loads(path.read_bytes()), QualityRecord)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        problem = f"cache.quality.record: {path} cannot be read: {error.strerror}"
        raise ConfigError([problem]) from error


def record_text(config: ClusterConfig) -> str:
    """The record as it is handed on to other machines; empty where none is needed or there."""
    found = read_record(record_path(config)) if held_quality(config) is not None else None
    return "" if found is None else _text(found)


def keep_record(config: ClusterConfig, found: Sequence[CodecQuality]) -> Path:
    """The record has these figures, beside those of other codecs measured with the same; returns
    its path. Raises ``ConfigError`` when the text or the model cannot be read.
    """
    path, facts = record_path(config), facts_with_text(config)
    old = read_record(path)
    names = {each.codec for each in found}
    kept = [] if old is None or _unlike(old, facts) else old.codecs
    codecs = (*(each for each in kept if each.codec not in names), *found)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, _text(QualityRecord(**facts, codecs=codecs)).encode())
    path.chmod(0o644)  # Nothing in it is secret, and a service's user may be another one
    return path


def facts_here(config: ClusterConfig) -> dict[str, Any]:
    """What the figures depend on but for the text, as far as this machine knows it: that of a cache
    server needs no model.
    """
    cache = config.cache
    assert cache is not None
    assert cache.quality is not None
    facts: dict[str, Any] = {
        "chunk_tokens": cache.chunk_tokens,
        "tokens": cache.quality.tokens,
        "compute": cache.quality.compute,
    }
    with suppress(ConfigError):
        facts["model"] = weights_identity(Path(model_of(config)), None)
    with suppress(ConfigError):
        facts["number"] = page_number(config)
    return facts


def can_lose(facts: dict[str, Any]) -> bool:
    """Whether lossy codecs code such pages: kinds of numbers without a codec stay as they are."""
    return facts.get("number", "unknown") is not None


def facts_with_text(config: ClusterConfig) -> dict[str, Any]:
    """``facts_here`` and the text, which has to be there. Raises ``ConfigError``."""
    assert config.cache is not None
    quality = config.cache.quality
    assert quality is not None
    try:
        text = Path(quality.text).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            [f"cache.quality.text: {quality.text} cannot be read: {error.strerror}"]
        ) from error
    return facts_here(config) | {"text": hashlib.blake2b(text, digest_size=16).hexdigest()}


def covering(config: ClusterConfig, facts: dict[str, Any]) -> tuple[CodecQuality, ...] | None:
    """The kept figures of every lossy codec of the cluster; None when some are not there or depend
    on something else.
    """
    record, names = read_record(record_path(config)), lossy_codecs(config)
    if record is None or _unlike(record, facts):
        return None
    found = tuple(each for each in record.codecs if each.codec in names)
    return found if len(found) == len(names) else None


def require_quality(config: ClusterConfig) -> None:
    """No lossy codec of the cluster costs more than ``cache.quality`` allows, by the record that is
    here. Raises ``ConfigError`` that says what is missing, and who makes it.
    """
    quality = held_quality(config)
    if quality is None:
        return
    facts = facts_here(config)
    if not can_lose(facts):
        return
    path, names = record_path(config), lossy_codecs(config)
    record = read_record(path)
    remedy = (
        "run `splitserve cache quality` with this YAML where model and text are, and bring the "
        "file here (cache.quality.record names it)"
    )
    if record is None:
        what = " and ".join(names)
        raise ConfigError([f"cache.quality: {path} does not say what {what} costs; {remedy}"])
    if unlike := _unlike(record, facts):
        what = ", ".join(_WORDS[name] for name in unlike)
        raise ConfigError([f"cache.quality: {path} was measured with {what}; {remedy}"])
    known = {each.codec for each in record.codecs}
    if unknown := [name for name in names if name not in known]:
        what = " and ".join(unknown)
        raise ConfigError([f"cache.quality: {path} has no figures of {what}; {remedy}"])
    used = [each for each in record.codecs if each.codec in names]
    if problems := too_lossy(used, quality.max_kl):
        raise ConfigError(problems)


def too_lossy(found: Sequence[CodecQuality], max_kl: float) -> list[str]:
    """One sentence for each codec that costs more than that, or what is no number."""
    return [
        f"cache.quality.max_kl: {each.codec} costs {each.kl:.2g} nats per token with this model "
        f"and text, {max_kl:g} is the most; choose a codec that loses less, or raise the limit"
        for each in found
        if not each.kl <= max_kl
    ]


def _text(record: QualityRecord) -> str:
    """In the JSON of Python, which has a word for what is no number: it has to come back as that,
    and be refused.
    """
    return json.dumps(msgspec.to_builtins(record))


def _unlike(record: QualityRecord, facts: dict[str, Any]) -> list[str]:
    return [name for name, value in facts.items() if getattr(record, name) != value]

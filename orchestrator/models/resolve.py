"""What a YAML's ``model.path`` means: a folder, a prepared model's name, or a Hub id.

The order is fixed: an existing folder first, then the catalogue, then a Hub id, which is left as it
is for the engine (and its own cache and network rules). A path that looks like one (``./x``,
``/x``, ``~/x``) is never taken for a Hub id.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from splitserve.orchestrator.models.catalog import PREPARED_MODELS, prepared_model
from splitserve.orchestrator.models.errors import ModelNotPreparedError, UnknownModelError

MANIFEST = "splitserve-model.json"
"""Written last into a prepared folder; names what it was made from."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class ResolvedModel:
    """What to give to an engine as its model."""

    spec: str
    """As written in the YAML."""
    kind: Literal["folder", "prepared", "hub"]
    engine_model: str
    """An absolute folder, or a Hub id."""

    @property
    def folder(self) -> Path | None:
        """The model's folder on this machine, None for a Hub id."""
        return None if self.kind == "hub" else Path(self.engine_model)


def models_cache() -> Path:
    """The folder that holds prepared models: ``$XDG_CACHE_HOME/splitserve/models``, by default
    under ``~/.cache``.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "splitserve" / "models"


def is_prepared(name: str) -> bool:
    """Whether the model of that name lies ready in this user's cache, made from what the catalogue
    now names.
    """
    try:
        manifest = json.loads((models_cache() / name / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    expected = PREPARED_MODELS[name]
    return isinstance(manifest, dict) and manifest.get("files_sha256") == expected.folder_sha256


def resolve_model(spec: str) -> ResolvedModel:
    """What ``spec`` names.

    Raises ``ModelNotPreparedError`` for a prepared model that is not in the cache yet, and
    ``UnknownModelError`` for a name that fits nothing or a folder without a ``config.json``.
    """
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        if not (path / "config.json").is_file():
            raise UnknownModelError(
                f"model folder {path} holds no config.json: give a Hugging Face model folder"
            )
        return ResolvedModel(spec, "folder", str(path.resolve()))
    if spec in PREPARED_MODELS:
        if not is_prepared(spec):
            raise ModelNotPreparedError(
                f"model {spec!r} is not on this machine yet: run 'splitserve model prepare {spec}'"
            )
        return ResolvedModel(spec, "prepared", str(models_cache() / spec))
    if spec.startswith((".", "/", "~")):
        raise UnknownModelError(f"there is no model folder {path}")
    if _HUB_ID.fullmatch(spec):
        return ResolvedModel(spec, "hub", spec)
    if "/" in spec:
        raise UnknownModelError(
            f"there is no model folder {path}, and {spec!r} is no Hub id (owner/name)"
        )
    try:
        prepared_model(spec)
    except UnknownModelError as error:
        raise UnknownModelError(
            f"{error} A folder or a Hub id (owner/name) can be given too."
        ) from None
    raise AssertionError("a catalogue name was handled above")

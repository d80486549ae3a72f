"""Whether state, logs, sockets and temporary files can be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.checks.cache import existing
from splitserve.orchestrator.launch.files import ClusterFiles, state_home
from splitserve.orchestrator.launch.finding import Finding, failure, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem

LOG_ROOM_BYTES = 256 * 2**20
"""What the logs of a cluster may grow to before they are turned over."""
TEMPORARY_ROOM_BYTES = 64 * 2**20
SOCKET_NAME_CHARACTERS = 40
"""vLLM puts sockets with names of that length into the temporary folder."""
SOCKET_LIMIT_CHARACTERS = 107
"""The kernel's, of a socket's whole path."""


def folders(subject: Subject) -> Finding:
    """Everything that is written has a place with room."""
    config = subject.config
    files = ClusterFiles(config.name)
    logs = Path(config.observability.log_dir or files.log_dir).expanduser()
    places = {"XDG_STATE_HOME": state_home(), "observability.log_dir": logs}
    if config.cache is not None and config.cache.socket_path is not None:
        places["cache.socket_path"] = Path(config.cache.socket_path).parent
    problems: list[Problem] = []
    for key, path in places.items():
        problems += _unusable(key, path, LOG_ROOM_BYTES)
    problems += _temporary(subject)
    return Finding("folders", f"state in {state_home()}, logs in {logs}", tuple(problems))


def _unusable(key: str, path: Path, room_bytes: int) -> Iterator[Problem]:
    """What keeps ``path`` from being made, or written to."""
    there = existing(path)
    blocked = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
    if blocked is not None:
        yield failure(key, f"{path} is no folder: {blocked} is a file", "name another folder")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield failure(key, f"{path} cannot be written to by this user", "name another folder")
    elif (free := shutil.disk_usage(there).free) < room_bytes:
        told_as = warning if free else failure
        yield told_as(
            key,
            f"{free / 2**20:.0f} MiB are free at {path}, and {room_bytes / 2**20:.0f} MiB may be "
            "needed",
            "make room, or name another folder",
        )


def _temporary(subject: Subject) -> Iterator[Problem]:
    """Engines keep the sockets between their processes there."""
    named = subject.environ.get("TMPDIR", "")
    if named and not Path(named).is_dir():
        yield warning(
            "TMPDIR", f"{named} is no folder: another one is taken", "make it, or unset it"
        )
        return
    try:
        folder = Path(named or tempfile.gettempdir())
    except FileNotFoundError as error:
        yield failure("TMPDIR", f"there is no temporary folder ({error})", "set it to one")
        return
    yield from _unusable("TMPDIR", folder, TEMPORARY_ROOM_BYTES)
    if len(str(folder)) + SOCKET_NAME_CHARACTERS > SOCKET_LIMIT_CHARACTERS:
        yield failure(
            "TMPDIR",
            f"sockets in {folder} would have longer names than the kernel takes "
            f"({SOCKET_LIMIT_CHARACTERS} characters)",
            "set it to a folder with a shorter name",
        )

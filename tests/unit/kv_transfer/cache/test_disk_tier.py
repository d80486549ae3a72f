"""What the disk tier promises beyond being a tier."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.chunks import ODD, PAGES, empty_like, make_chunk, unaligned_like, verify

from splitserve.kv_transfer.cache.settings import TierSettings
from splitserve.kv_transfer.cache.tiers import disk
from splitserve.kv_transfer.cache.tiers.base import (
    ReadOutcome,
    TierConfigError,
    TierUnavailableError,
    WriteOutcome,
)
from splitserve.kv_transfer.cache.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20


def settings(folder: Path | str, **changes: Any) -> TierSettings:
    """A disk tier there."""
    return TierSettings(type="disk", **{"url": str(folder), "capacity_bytes": MIB, **changes})


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    made = DiskTier(settings(tmp_path))
    yield made
    made.close()


def files(folder: Path) -> set[str]:
    """Names of all but the lock."""
    return {path.name for path in folder.rglob("*") if path.is_file()} - {"lock"}


def test_chunks_outlive_the_process(tmp_path: Path, tier: DiskTier) -> None:
    """The next owner lists them, the oldest first, and reads them."""
    chunks = [make_chunk(seed) for seed in range(4)]
    tier.write([chunk.buffers for chunk in chunks])
    tier.close()
    for age, chunk in enumerate(chunks):
        path = tmp_path / "chunks" / chunk.key.hex()[-2:] / chunk.key.hex()
        os.utime(path, (1000 - age, 1000 - age))
    following = DiskTier(settings(f"file://{tmp_path}"))
    assert [stored.key for stored in following.stored()] == [c.key for c in reversed(chunks)]
    buffers = empty_like(chunks[0])
    assert list(following.read([buffers])) == [(0, ReadOutcome.HIT)]
    assert verify(buffers) == chunks[0].header
    following.close()


def test_a_folder_has_one_owner(tmp_path: Path, tier: DiskTier) -> None:
    """The second is told who has it; when the first is gone it may."""
    with pytest.raises(TierConfigError, match=rf"running cache server \(process {os.getpid()}\)"):
        DiskTier(settings(tmp_path))
    tier.close()
    DiskTier(settings(tmp_path)).close()


def test_a_dead_owner_leaves_the_folder_free(tmp_path: Path) -> None:
    """Killed in the middle of a write: its lock is gone, its unfinished file is removed."""
    program = (
        "import os, signal, sys\n"
        "from splitserve.kv_transfer.cache.settings import TierSettings\n"
        "from splitserve.kv_transfer.cache.tiers.disk import DiskTier\n"
        "from support.chunks import make_chunk\n"
        "os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "tier = DiskTier(TierSettings(type='disk', url=sys.argv[1]))\n"
        "tier.write([make_chunk(1).buffers])\n"
    )
    tests = os.path.dirname(os.path.dirname(sys.modules["support.chunks"].__file__ or ""))
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": tests},
        timeout=60,
        check=False,
    )
    assert ended.returncode == -9
    assert len(files(tmp_path)) == 1
    tier = DiskTier(settings(tmp_path))
    assert files(tmp_path) == set()
    assert list(tier.stored()) == []
    tier.close()


def test_foreign_files_are_left_alone(tmp_path: Path, tier: DiskTier) -> None:
    """Whatever lies there under names that no chunk has, and in folders of other names."""
    chunk = make_chunk(1)
    tier.write([chunk.buffers])
    strangers = [
        tmp_path / "chunks" / "notes.txt",
        tmp_path / "chunks" / chunk.key.hex()[-2:] / "notes.txt",
        tmp_path / "chunks" / "zz" / chunk.key.hex(),
    ]
    strangers[2].parent.mkdir()
    for path in strangers:
        path.write_bytes(b"mine")
    assert [stored.key for stored in tier.stored()] == [chunk.key]
    tier.close()
    DiskTier(settings(tmp_path)).close()
    assert all(path.read_bytes() == b"mine" for path in strangers)


def test_files_too_short_for_a_chunk_are_removed(tmp_path: Path, tier: DiskTier) -> None:
    """A machine that lost power leaves such files."""
    chunks = [make_chunk(seed) for seed in range(2)]
    tier.write([chunk.buffers for chunk in chunks])
    os.truncate(tmp_path / "chunks" / chunks[0].key.hex()[-2:] / chunks[0].key.hex(), 0)
    assert [stored.key for stored in tier.stored()] == [chunks[1].key]
    assert files(tmp_path) == {chunks[1].key.hex()}


def test_the_folder_is_private(tmp_path: Path, tier: DiskTier) -> None:
    """Nobody else reads chunks; a folder that others can read is refused with what to do."""
    tier.write([make_chunk(1).buffers])
    folder = tmp_path / "chunks"
    modes = {path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")]}
    assert modes == {0}
    tier.close()
    folder.chmod(0o750)
    with pytest.raises(TierConfigError, match=f"chmod 700 {folder}"):
        DiskTier(settings(tmp_path))


def test_somebody_empties_the_folder(tmp_path: Path, tier: DiskTier) -> None:
    """Writing makes anew what it needs."""
    chunk = make_chunk(1)
    subprocess.run(["rm", "-r", *map(str, (tmp_path / "chunks").iterdir())], check=True)
    assert tier.write([chunk.buffers]) == [WriteOutcome.WRITTEN]
    assert list(tier.read([empty_like(chunk)])) == [(0, ReadOutcome.HIT)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
@pytest.mark.parametrize("call", ["open", "writev", "rename"])
def test_no_room_in_the_middle_of_a_write(
    tmp_path: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    """Wherever the system says so, with part of the file written: full, and no part is left."""
    chunk, before = make_chunk(1), make_chunk(2, ODD)
    tier.write([before.buffers, make_chunk(3).buffers, chunk.buffers])
    tier.remove([make_chunk(3).key, chunk.key])
    monkeypatch.setattr(os, call, fails_second_time(getattr(os, call), code))
    outcomes = tier.write([make_chunk(3).buffers, chunk.buffers])
    monkeypatch.undo()
    assert outcomes == [WriteOutcome.WRITTEN, WriteOutcome.FULL]
    assert files(tmp_path) == {before.key.hex(), make_chunk(3).key.hex()}
    assert tier.write([chunk.buffers]) == [WriteOutcome.WRITTEN]


def fails_second_time(real: Callable[..., Any], code: int) -> Callable[..., Any]:
    """The call, which from the second time on does half of its work and then fails."""
    calls = iter(range(100))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 0:
            return real(*arguments, **options)
        if real.__name__ == "writev":
            real(arguments[0], [arguments[1][0]])
        raise OSError(code, os.strerror(code))

    return call


def test_a_disk_that_fails(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not take is an error with the place; what it cannot read is broken and gone."""
    chunk = make_chunk(1)
    tier.write([chunk.buffers])

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "writev", fail)
    with pytest.raises(TierUnavailableError, match=r"cannot write to /.*Input/output error"):
        tier.write([make_chunk(2).buffers])
    monkeypatch.setattr(os, "preadv", fail)
    assert list(tier.read([empty_like(chunk)])) == [(0, ReadOutcome.BROKEN)]
    assert tier.contains([chunk.key]) == [False]


def test_more_capacity_than_disk(tmp_path: Path, tier: DiskTier) -> None:
    """Start-up names both numbers; what the tier has itself counts as room."""
    tier.write([make_chunk(1).buffers])
    tier.check()
    tier.close()
    for capacity, kind, said in (
        (1 << 60, TierUnavailableError, rf"{1 << 60} bytes, but only \d+"),
        (None, TierConfigError, "capacity_bytes"),
    ):
        large = DiskTier(settings(tmp_path, capacity_bytes=capacity))
        with pytest.raises(kind, match=said):
            large.check()
        large.close()


def test_large_reads_are_done_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order given; one that fails ends the read, and no thread writes to a buffer then."""
    monkeypatch.setattr(disk, "READ_GROUP_BYTES", 60_000)
    chunks = [make_chunk(seed, PAGES if seed % 3 else ODD) for seed in range(20)]
    tier = DiskTier(settings(tmp_path))
    tier.write([chunk.buffers for chunk in chunks])
    tier.remove([chunks[4].key])
    buffers = [empty_like(chunk) for chunk in chunks]
    outcomes = list(tier.read(buffers))
    absent = {4: ReadOutcome.ABSENT}
    assert outcomes == [(index, absent.get(index, ReadOutcome.HIT)) for index in range(20)]
    for index, chunk in enumerate(chunks):
        assert index in absent or verify(buffers[index]) == chunk.header
    real, names = os.preadv, iter(range(100))

    def fails_third_time(*arguments: Any) -> int:
        if next(names) == 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", fails_third_time)
    with pytest.raises(TierUnavailableError, match="cannot read from"):
        list(tier.read(buffers))
    for buffer in buffers:
        buffer.body[:] = bytes(len(buffer.body))
    tier.close()
    assert not any(any(buffer.body) for buffer in buffers)


@pytest.mark.parametrize("like", [empty_like, unaligned_like])
def test_direct_and_buffered_read_the_same_files(tmp_path: Path, like: Any) -> None:
    """Each reads what the other wrote, into buffers of any alignment."""
    chunks = [make_chunk(1), make_chunk(2, ODD)]
    for writing, reading in (("direct", "buffered"), ("buffered", "direct")):
        tier = DiskTier(settings(tmp_path, options={"io": writing}))
        tier.write([chunk.buffers for chunk in chunks])
        tier.close()
        tier = DiskTier(settings(tmp_path, options={"io": reading}))
        buffers = [like(chunk) for chunk in chunks]
        assert dict(tier.read(buffers)) == {0: ReadOutcome.HIT, 1: ReadOutcome.HIT}
        assert [verify(buffer) for buffer in buffers] == [chunk.header for chunk in chunks]
        tier.close()


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read and written through the page cache."""
    real = os.open

    def without_direct(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", without_direct)
    tier, chunk = DiskTier(settings(tmp_path)), make_chunk(1)
    assert not tier.is_direct
    assert tier.write([chunk.buffers]) == [WriteOutcome.WRITTEN]
    assert list(tier.read([empty_like(chunk)])) == [(0, ReadOutcome.HIT)]
    tier.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "relative/folder"}, "no absolute path"),
        ({"url": ""}, "no absolute path"),
        ({"url": "file://host/folder"}, "names a host"),
        ({"url": "ftp://host/folder"}, r"'ftp'; known are file://"),
        ({"url": "/proc/nowhere"}, "cannot use /proc/nowhere"),
        ({"url": "/${NOT_SET_ANYWHERE}"}, "NOT_SET_ANYWHERE is not set"),
        ({"options": {"io": "fast"}}, r"options of the disk tier.*'fast'"),
        ({"options": {"oi": "direct"}}, r"'oi' is unknown; known are io, readers"),
    ],
)
def test_bad_settings(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Each is explained."""
    with pytest.raises(TierConfigError, match=said):
        DiskTier(settings(tmp_path, **changes))

"""Chunks as files, one each, in a private folder that one process owns.

A chunk is ``chunks/ab/abcd...`` (its key in hex). It is written to a new name and renamed, so a
reader sees all of it or nothing. Nothing is synced: a cache may lose chunks when the machine stops,
and one whose bytes did not reach the disk has the wrong size or checksums, which makes it a miss;
waiting for the device with each chunk was measured to cost up to a fifth of the write speed.

``io=direct`` (the default) goes past the page cache. Beside buffered reads of files that are not in
it, direct ones were measured 1.3 to 1.8 times as fast with a tenth of the processor time, and the
arena is the memory tier already. Files in the page cache are read several times faster with
``io=buffered``: for hosts that leave much memory unused. Direct needs page-aligned buffers and
bodies of whole pages, and a file system that has it; all else is buffered.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import re
import shutil
import stat
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from splitserve.kv_transfer.cache.tiers.address import Count, expand, read_options, split_url
from splitserve.kv_transfer.cache.tiers.base import (
    HEADER_BYTES,
    ChunkBuffers,
    ReadOutcome,
    SharedMemory,
    StoredChunk,
    TierCapabilities,
    TierConfigError,
    TierUnavailableError,
    WriteOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from splitserve.kv_transfer.cache.settings import TierSettings

ALIGNMENT_BYTES = 4096
"""Of addresses, sizes and offsets of direct reads and writes."""
READ_GROUP_BYTES = 2 << 20
"""Handed to a reading thread at once: waking one costs as much as reading a small chunk."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
_FILE_NAME = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = "unfinished"


class DiskOptions(msgspec.Struct, frozen=True):
    """Options of the tier."""

    io: Literal["direct", "buffered"] = "direct"
    readers: Count = 2
    """Chunks that are read at once."""


class DiskTier:
    """Owns ``PATH/chunks`` until it is closed, by a lock on a file in it."""

    capabilities = TierCapabilities(name="disk", is_exclusive=True, is_remote=False)

    def __init__(self, settings: TierSettings) -> None:
        options = read_options(settings, DiskOptions)
        self._place = _path(settings)
        self._folder = self._place / "chunks"
        self._unfinished = self._folder / _UNFINISHED
        self._capacity_bytes = settings.capacity_bytes
        self._only_reads = settings.admission == "never"
        self._numbers = itertools.count()
        self._readers = options.readers
        self._threads = ThreadPoolExecutor(options.readers, thread_name_prefix="cache-disk")
        self._lock = -1
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._be_private()
            self._lock = self._take_lock()
            # What a writer that died has left
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self.close()
            raise TierConfigError(
                f"the disk tier cannot use {self._place}: {error}; give it a folder that this "
                "user may write to"
            ) from error
        self._direct = options.io == "direct" and self._can_be_direct()

    @property
    def is_direct(self) -> bool:
        """Whether page-aligned chunks go past the page cache."""
        return self._direct

    def use_memory(self, memory: SharedMemory) -> None:
        """Any memory is as good."""

    def check(self) -> None:
        """A file can be written and the capacity fits beside what else is on the disk. That it does
        not is no ``TierConfigError``: the disk of a server that is started again may be full for a
        while.
        """
        if not self._only_reads:
            self._write_probe()
        if self._capacity_bytes is None:
            raise TierConfigError(
                f"the disk tier in {self._place} needs capacity_bytes: the disk is shared with "
                "everything else on it"
            )
        own = sum(entry.stat().st_size for entry in self._entries())
        possible = own + self.free_bytes()
        if self._capacity_bytes > possible:
            raise TierUnavailableError(
                f"the disk tier in {self._place} is to hold {self._capacity_bytes} bytes, but only "
                f"{possible} are free there or already its own; set a smaller capacity_bytes or "
                "make room"
            )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """One ``stat`` each."""
        return [os.path.exists(self._file(key)) for key in keys]

    def read(self, chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, ReadOutcome]]:
        """In the order given, ``readers`` threads at once: the disk works while the caller verifies
        what has come.
        """
        groups = _groups(chunks)
        if len(groups) == 1:  # nothing to overlap that is worth waking a thread
            yield from ((index, self._read(chunks[index])) for index in groups[0])
            return
        waiting: deque[tuple[range, Future[list[ReadOutcome]]]] = deque()
        try:
            for group in groups:
                part = [chunks[index] for index in group]
                waiting.append((group, self._threads.submit(self._read_all, part)))
                if len(waiting) > self._readers:
                    done, reading = waiting.popleft()
                    yield from zip(done, reading.result(), strict=True)
            while waiting:
                done, reading = waiting.popleft()
                yield from zip(done, reading.result(), strict=True)
        finally:
            for _, reading in waiting:
                reading.cancel()
            wait([reading for _, reading in waiting])

    def write(self, chunks: Sequence[ChunkBuffers]) -> list[WriteOutcome]:
        """One after the other."""
        return [self._write(chunk) for chunk in chunks]

    def remove(self, keys: Sequence[bytes]) -> int:
        """The files are gone."""
        removed = 0
        for key in keys:
            try:
                os.unlink(self._file(key))
                removed += 1
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._unavailable("remove from", error) from error
        return removed

    def stored(self) -> Iterator[StoredChunk]:
        """By time of writing. Files with other names are left alone, those that are too short to be
        chunks are removed.
        """
        entries = sorted(
            (status.st_mtime_ns, entry.name, status.st_size)
            for entry in self._entries()
            for status in [entry.stat()]
        )
        for _, name, size in entries:
            key = bytes.fromhex(name)
            if size <= HEADER_BYTES:
                self.remove([key])
                continue
            with contextlib.suppress(FileNotFoundError), open(self._file(key), "rb", 0) as file:
                yield StoredChunk(key, size, file.read(HEADER_BYTES))

    def listed(self, prefix: bytes) -> Iterator[bytes]:
        """By the names of files."""
        begin = prefix.hex()
        try:
            names = [entry.name for entry in self._entries()]
        except OSError as error:
            raise self._unavailable("look at", error) from error
        for name in names:
            if name.startswith(begin):
                yield bytes.fromhex(name)

    def free_bytes(self) -> int:
        """What the file system gives to users like this one."""
        try:
            status = os.statvfs(self._folder)
        except OSError as error:
            raise self._unavailable("look at", error) from error
        return status.f_bavail * status.f_frsize

    def clock_unix_s(self) -> None:
        """This host's."""

    def close(self) -> None:
        """The folder may have another owner; a lock ends with its descriptor."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _read_all(self, chunks: list[ChunkBuffers]) -> list[ReadOutcome]:
        return [self._read(chunk) for chunk in chunks]

    def _read(self, chunk: ChunkBuffers) -> ReadOutcome:
        outcome = self._read_file(chunk)
        if outcome is ReadOutcome.BROKEN:
            self.remove([chunk.key])
        return outcome

    def _read_file(self, chunk: ChunkBuffers) -> ReadOutcome:
        flags = self._flags(chunk)
        try:
            file = os.open(self._file(chunk.key), os.O_RDONLY | flags)
        except FileNotFoundError:
            return ReadOutcome.ABSENT
        except OSError as error:
            raise self._unavailable("read from", error) from error
        try:
            if not chunk.hold(os.fstat(file).st_size):
                return ReadOutcome.BROKEN
            if flags & os.O_DIRECT and chunk.body_bytes % ALIGNMENT_BYTES:
                return ReadOutcome.BROKEN  # What was written past the page cache has whole pages.
            complete = _read_parts(file, [chunk.header, chunk.found_body])
            return ReadOutcome.HIT if complete else ReadOutcome.BROKEN
        except OSError as error:
            if error.errno == errno.EIO:  # a bad spot of the disk: that chunk is lost
                return ReadOutcome.BROKEN
            raise self._unavailable("read from", error) from error
        finally:
            os.close(file)

    def _write(self, chunk: ChunkBuffers) -> WriteOutcome:
        new = self._unfinished / f"{os.getpid()}-{next(self._numbers)}"
        try:
            file = self._create(new, self._flags(chunk))
            try:
                _write_parts(file, [chunk.header, chunk.body])
            finally:
                os.close(file)
            self._publish(new, self._file(chunk.key))
        except OSError as error:
            # Where even this is refused, the next owner's start removes the rest
            with contextlib.suppress(OSError):
                os.unlink(new)
            if error.errno in FULL:
                return WriteOutcome.FULL
            raise self._unavailable("write to", error) from error
        return WriteOutcome.WRITTEN

    def _create(self, new: Path, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(new, flags, 0o600)
        except FileNotFoundError:  # somebody has emptied the folder
            self._unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(new, flags, 0o600)

    def _publish(self, new: Path, final: str) -> None:
        try:
            os.rename(new, final)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(final), mode=0o700, exist_ok=True)
            os.rename(new, final)

    def _flags(self, chunk: ChunkBuffers) -> int:
        if self._direct and _is_aligned(chunk.header) and _is_aligned(chunk.body):
            return os.O_CLOEXEC | os.O_DIRECT
        return os.O_CLOEXEC

    def _file(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[-2:]}/{name}"  # The beginning is the tenant's.

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        for shard in os.scandir(self._folder):
            if shard.name != _UNFINISHED and shard.is_dir(follow_symlinks=False):
                for entry in os.scandir(shard.path):
                    if _FILE_NAME.fullmatch(entry.name) and entry.name.endswith(shard.name):
                        yield entry

    def _be_private(self) -> None:
        status = os.stat(self._folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise TierConfigError(
                f"{self._folder} holds what users of the model wrote and can be read by others or "
                f"is theirs; make this user its owner and run `chmod 700 {self._folder}`"
            )

    def _take_lock(self) -> int:
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            os.close(lock)
            raise TierConfigError(
                f"the disk tier in {self._place} belongs to a running cache server (process "
                f"{owner}); end that one or give each its own folder"
            ) from None
        with contextlib.suppress(OSError):  # A full disk: whose it is stays unsaid.
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _can_be_direct(self) -> bool:
        """Whether the file system takes a direct write of one page."""
        probe = self._unfinished / "probe"
        try:
            file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            return os.write(file, mmap.mmap(-1, ALIGNMENT_BYTES)) == ALIGNMENT_BYTES
        except OSError:
            return False
        finally:
            os.close(file)
            os.unlink(probe)

    def _write_probe(self) -> None:
        probe = self._unfinished / "probe"
        try:
            probe.write_bytes(bytes(ALIGNMENT_BYTES))
            probe.unlink()
        except OSError as error:
            raise TierUnavailableError(
                f"the disk tier in {self._place} cannot be written to: {error}; make room"
            ) from error

    def _unavailable(self, verb: str, error: OSError) -> TierUnavailableError:
        return TierUnavailableError(
            f"the disk tier cannot {verb} {self._place}: {error}; look after the disk"
        )


def _path(settings: TierSettings) -> Path:
    """The folder of ``file:///folder`` or of a plain path."""
    if "://" in settings.url:
        parts = split_url(settings, ("file",))
        if parts.netloc:
            raise TierConfigError(
                f"the disk tier's url {settings.url!r} names a host; it has to be file:///folder"
            )
        text = parts.path
    else:
        text = settings.url
    path = Path(expand(text, "url of the disk tier"))
    if not path.is_absolute():
        raise TierConfigError(f"the disk tier's url {settings.url!r} is no absolute path")
    return path


def _groups(chunks: Sequence[ChunkBuffers]) -> list[range]:
    """Runs of chunks of about ``READ_GROUP_BYTES``, at least one chunk each."""
    groups = []
    start = size = 0
    for index, chunk in enumerate(chunks):
        size += len(chunk.body)
        if size >= READ_GROUP_BYTES or index == len(chunks) - 1:
            groups.append(range(start, index + 1))
            start, size = index + 1, 0
    return groups


def _is_aligned(part: memoryview) -> bool:
    address: int = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
    return address % ALIGNMENT_BYTES == 0 and len(part) % ALIGNMENT_BYTES == 0


def _read_parts(file: int, parts: list[memoryview]) -> bool:
    """Fill ``parts`` from the file's beginning; False when it ends before."""
    done = 0
    while parts:
        count = os.preadv(file, parts, done)
        if count == 0:
            return False
        done += count
        parts = _after(parts, count)
    return True


def _write_parts(file: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _after(parts, os.writev(file, parts))


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``parts`` behind its first ``count`` bytes."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if count else parts

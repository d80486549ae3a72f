"""Chunks as objects of S3, Google Cloud Storage or Azure, by the library ``obstore``.

An object is one chunk, put in one request (so a reader sees all of it or nothing) and got in ranges
of at most ``part_bytes``, several at a time. The library hands its own buffers over, so each byte
is copied once into the arena. Requests of all callers share ``concurrency`` threads, which bounds
connections and what is held in memory: about ``concurrency`` parts.

Several hosts may share a bucket; what one of them removes is absent for the others. Stores expire
objects by rules of the bucket, not by ``ttl_s``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from splitserve.kv_transfer.cache.tiers.address import (
    Count,
    Seconds,
    expand,
    read_options,
    split_url,
    without_userinfo,
)
from splitserve.kv_transfer.cache.tiers.base import (
    CONNECT_TIMEOUT_S,
    HEADER_BYTES,
    OPERATION_TIMEOUT_S,
    ChunkBuffers,
    ReadOutcome,
    SharedMemory,
    StoredChunk,
    TierCapabilities,
    TierConfigError,
    TierError,
    TierUnavailableError,
    WriteOutcome,
)

try:
    import obstore
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
    from obstore.store import from_url
except ImportError as missing:
    raise TierConfigError(
        "the s3 tier needs the library obstore; install it with `pip install 'splitserve[s3]'`"
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from splitserve.kv_transfer.cache.settings import TierSettings

_STORE_OPTIONS = {
    "endpoint": "endpoint",
    "region": "region",
    "access_key": "access_key_id",
    "secret_key": "secret_access_key",
    "session_token": "session_token",
}
"""Option to the name that the library has for it."""
_ENDPOINTS = {"s3": "https://s3.amazonaws.com", "gs": "https://storage.googleapis.com"}
"""Where a store answers when no endpoint is named."""
KEYS_PER_REQUEST = 1000
_NAME = re.compile(r"[0-9a-f]{64}")
_ROLE_QUESTIONS = ("/latest/api/token", "/computeMetadata/", "/metadata/identity/")
"""Where the library asks for the machine's role when nothing else gives credentials."""
_Part = tuple[ReadOutcome, str | None]
"""What became of one request, and which version of the object it saw."""
_FAULTS = (BaseError, OSError, ValueError)
"""What the library raises; a missing object is ``FileNotFoundError``."""


class ObjectOptions(msgspec.Struct, frozen=True):
    """Options of the tier; credentials that are not given come from the environment, or from the
    machine's role.
    """

    endpoint: str = ""
    """Of a server that speaks S3 and is not AWS."""
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    concurrency: Count = 8
    part_bytes: Annotated[int, msgspec.Meta(gt=HEADER_BYTES)] = 16 << 20
    connect_timeout_s: Seconds = CONNECT_TIMEOUT_S
    timeout_s: Seconds = OPERATION_TIMEOUT_S


class ObjectTier:
    """Owns its threads and the library's connections."""

    capabilities = TierCapabilities(name="s3", is_exclusive=False, is_remote=True)

    def __init__(self, settings: TierSettings) -> None:
        self._options = options = read_options(settings, ObjectOptions)
        url = split_url(settings, ("s3", "gs", "az"))
        if not url.netloc:
            raise TierConfigError(f"the s3 tier needs a url {url.scheme}://bucket/folder")
        self._scheme = url.scheme
        self._shown = without_userinfo(settings.url)
        self._only_reads = settings.admission == "never"
        self._store = self._make_store(expand(settings.url, "url of the s3 tier"), options)
        self._threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="cache-s3")

    def use_memory(self, memory: SharedMemory) -> None:
        """Any memory is as good."""

    def check(self) -> None:
        """The bucket is there and takes an object, or can be listed when it is only read."""
        if self._only_reads:
            self._do(obstore.list_with_delimiter, self._store)
            return
        probe = f"check-{os.urandom(8).hex()}"
        self._do(obstore.put, self._store, probe, b"1", use_multipart=False)
        self._do(obstore.delete, self._store, probe)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """One HEAD each, ``concurrency`` at once."""
        return list(self._threads.map(self._is_there, keys))

    def read(self, chunks: Sequence[ChunkBuffers]) -> Iterator[tuple[int, ReadOutcome]]:
        """As they come. When it ends early it waits for the requests that are under way. All parts
        of what the buffers hold are asked for: of a shorter object those behind its end are
        refused, which costs a question each.
        """
        part_of: dict[Future[_Part], int] = {}
        for index, chunk in enumerate(chunks):
            for start in range(0, HEADER_BYTES + len(chunk.body), self._options.part_bytes):
                part_of[self._threads.submit(self._read_part, chunk, start)] = index
        missing = Counter(part_of.values())
        parts: dict[int, set[_Part]] = {index: set() for index in missing}
        waiting = set(part_of)
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for part in done:
                    index = part_of[part]
                    parts[index].add(part.result())
                    missing[index] -= 1
                    if missing[index] == 0:
                        yield index, self._outcome(chunks[index].key, parts[index])
        finally:
            for part in waiting:
                part.cancel()
            wait(waiting)

    def write(self, chunks: Sequence[ChunkBuffers]) -> list[WriteOutcome]:
        """``concurrency`` at once. No store says that it is full in a way that all share."""
        return list(self._threads.map(self._write, chunks))

    def remove(self, keys: Sequence[bytes]) -> int:
        """They are counted before: stores do not tell whether there was something to delete."""
        there = [key for key, found in zip(keys, self.contains(keys), strict=True) if found]
        self._delete(there)
        return len(there)

    def stored(self) -> Iterator[StoredChunk]:
        """Nothing: other hosts come and go there."""
        return iter(())

    def listed(self, prefix: bytes) -> Iterator[bytes]:
        """The store is asked for the names behind the prefix, and what is behind its last one is
        skipped here: the library's own prefixes are whole folders.
        """
        begin = prefix.hex()
        try:
            for page in obstore.list(self._store, offset=begin or None):
                for meta in page:
                    name = str(meta["path"])
                    if name.startswith(begin) and _NAME.fullmatch(name):
                        yield bytes.fromhex(name)
        except _FAULTS as error:
            raise self._explained(error) from error

    def free_bytes(self) -> None:
        """Stores do not end."""

    def clock_unix_s(self) -> float | None:
        """By the date of an answer, which every HTTP server gives, also when it refuses."""
        url = urlsplit(self._options.endpoint or _ENDPOINTS.get(self._scheme, ""))
        if not url.hostname:
            return None
        kind = HTTPConnection if url.scheme == "http" else HTTPSConnection
        connection = kind(url.hostname, url.port, timeout=self._options.timeout_s)
        try:
            connection.request("HEAD", "/")
            date = connection.getresponse().getheader("Date")
            return parsedate_to_datetime(date).timestamp() if date else None
        except (OSError, HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def close(self) -> None:
        """Every thread has ended."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _outcome(self, key: bytes, parts: set[_Part]) -> ReadOutcome:
        outcomes = {outcome for outcome, _ in parts}
        if outcomes == {ReadOutcome.HIT}:
            # Parts of two objects: it was replaced in between, and would be there next time
            return ReadOutcome.HIT if len(parts) == 1 else ReadOutcome.ABSENT
        if ReadOutcome.ABSENT in outcomes:
            return ReadOutcome.ABSENT
        self._delete([key])
        return ReadOutcome.BROKEN

    def _read_part(self, chunk: ChunkBuffers, start: int) -> _Part:
        """The bytes from ``start`` on, at most ``part_bytes``, are in the chunk's buffers when it
        is a hit; none, when the object is a shorter one that ends before.
        """
        end = min(HEADER_BYTES + len(chunk.body), start + self._options.part_bytes)
        name = chunk.key.hex()
        try:
            got = obstore.get(self._store, name, options={"range": (start, end)})
            size = got.meta["size"]
            if not chunk.hold(size):
                return ReadOutcome.BROKEN, None
            content = memoryview(got.bytes())
        except FileNotFoundError:
            return ReadOutcome.ABSENT, None
        except _FAULTS as error:
            # An object that ends before the range is an error too, each store has its own
            meta = self._meta(name)
            if meta is not None and not chunk.hold(meta["size"]):
                return ReadOutcome.BROKEN, None
            if meta is not None and start >= meta["size"]:
                return ReadOutcome.HIT, meta["e_tag"]
            raise self._explained(error) from error
        end = min(end, size)
        if len(content) != end - start:
            return ReadOutcome.BROKEN, None
        in_header = max(0, HEADER_BYTES - start)
        if in_header:
            chunk.header[start:] = content[:in_header]
        _copy(content[in_header:], chunk.body[max(0, start - HEADER_BYTES) : end - HEADER_BYTES])
        return ReadOutcome.HIT, got.meta["e_tag"]

    def _write(self, chunk: ChunkBuffers) -> WriteOutcome:
        parts = [chunk.header, chunk.body]
        self._do(obstore.put, self._store, chunk.key.hex(), parts, use_multipart=False)
        return WriteOutcome.WRITTEN

    def _is_there(self, key: bytes) -> bool:
        return self._meta(key.hex()) is not None

    def _meta(self, name: str) -> Any:
        """What the store says of an object; None when there is none."""
        try:
            return obstore.head(self._store, name)
        except FileNotFoundError:
            return None
        except _FAULTS as error:
            raise self._explained(error) from error

    def _delete(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), KEYS_PER_REQUEST):
            names = [key.hex() for key in keys[start : start + KEYS_PER_REQUEST]]
            self._do(obstore.delete, self._store, names)

    def _do(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            call(*arguments, **options)
        except _FAULTS as error:
            raise self._explained(error) from error

    def _make_store(self, url: str, options: ObjectOptions) -> Any:
        """The library's store; the rest of its settings it takes from the environment."""
        values = {name: getattr(options, ours) for ours, name in _STORE_OPTIONS.items()}
        config = {name: value for name, value in values.items() if value}
        timeout = timedelta(seconds=options.timeout_s)
        client = {
            "timeout": timeout,
            "connect_timeout": timedelta(seconds=options.connect_timeout_s),
            "allow_http": options.endpoint.startswith("http://"),
        }
        # One more try for what fails early; what was waited for is not waited for again
        retry = {"max_retries": 1, "retry_timeout": timeout / 2}
        try:
            return from_url(url, config=config, client_options=client, retry_config=retry)
        except _FAULTS as error:
            raise TierConfigError(
                f"the s3 tier cannot use {self._shown}: {_first_line(error)}"
            ) from error

    def _explained(self, error: Exception) -> TierError:
        place = f"the s3 tier at {self._shown}"
        said = _first_line(error)
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return TierConfigError(
                f"{place} refuses the credentials: {said}; correct access_key and secret_key, or "
                "what the environment says"
            )
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in str(error):
            return TierConfigError(f"{place}: there is no such bucket; make it or correct the url")
        if any(question in said for question in _ROLE_QUESTIONS):
            return TierConfigError(
                f"{place} has no credentials, and the machine has no role: {said}; set access_key "
                "and secret_key, or the variables that the store's own tools read"
            )
        remedy = "start it, or correct url and endpoint"
        return TierUnavailableError(f"{place} cannot be reached: {said}; {remedy}")


def _copy(source: memoryview, target: memoryview) -> None:
    """Megabytes, without holding up other threads as an assignment of slices would."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _first_line(error: Exception) -> str:
    """What the library says, without the answer's document and its own structure."""
    return str(error).partition("\n")[0].partition(": <?xml")[0]

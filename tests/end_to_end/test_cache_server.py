"""The cache server and its clients as processes that are killed, and stopped in the middle of
something.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cache_rig import (
    CHUNK_TOKENS,
    DEADLINE_S,
    CacheEngine,
    Running,
    ServerProcess,
    audit,
    prompt_of,
    served,
    settings_in,
    until,
)
from support.standing_still import stand_still

from splitserve.kv_transfer.cache import lookup_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.kv_transfer.cache.settings import CacheSettings

TESTS = Path(__file__).parents[1]
PROMPT = prompt_of(5 * CHUNK_TOKENS + 9)
WHOLE = 5 * CHUNK_TOKENS


@pytest.fixture
def settings(tmp_path: Path) -> CacheSettings:
    return settings_in(tmp_path, disk=True)


@contextmanager
def process_of(settings: CacheSettings, folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(settings, folder)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def engine_of(settings: CacheSettings, **options: float) -> Iterator[CacheEngine]:
    engine = CacheEngine(settings, **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.stop()


def files(folder: Path) -> int:
    return sum(len(path.name) == 64 for path in (folder / "disk").glob("chunks/*/*"))


def begun_with_hits(engine: CacheEngine) -> Running:
    """A request of the prompt whose look-up has found the whole of it: the first one that was
    answered within the look-ups' limit.
    """
    begun: list[Running] = []

    def has_hits() -> bool:
        for request in begun:
            engine.abort(request)
        begun[:] = [engine.begin(PROMPT)]
        return engine.hit_tokens(begun[0]) == WHOLE

    until(has_hits, "hits")
    return begun[0]


def until_hits(engine: CacheEngine, prompt: list[int]) -> None:
    until(lambda: engine.serve(prompt).cached >= WHOLE, "a hit")
    engine.until_idle()


def test_a_killed_server_comes_back_with_its_disk(settings: CacheSettings, tmp_path: Path) -> None:
    """Requests go on meanwhile, each load and save ends, and prompts of before hit again."""
    with process_of(settings, tmp_path) as server, engine_of(settings, ranks=2) as engine:
        engine.serve(PROMPT)
        until(lambda: files(tmp_path) == 5, "the disk to have everything")
        for _ in range(3):
            request = engine.begin(PROMPT)
            engine.order_load(request)
            server.send(signal.SIGKILL)
            until(lambda r=request: engine.has_loaded(r), "the load's end")  # type: ignore[misc]
            engine.abort(request)
            engine.serve(prompt_of(200, 2))
            engine.until_idle()
            server.end()
            server = ServerProcess(settings, tmp_path)
            until_hits(engine, PROMPT)
        server.end()


def test_a_server_that_is_killed_while_it_reads_its_disk(
    settings: CacheSettings, tmp_path: Path
) -> None:
    """With nothing in the arena: the load fails at once, not at its time's end."""
    with process_of(settings, tmp_path), engine_of(settings) as engine:
        engine.serve(PROMPT)
        until(lambda: files(tmp_path) == 5, "the disk to have everything")
    limits = {"load_timeout_s": 4 * DEADLINE_S}
    with process_of(settings, tmp_path) as server, engine_of(settings, **limits) as engine:
        request = engine.begin(PROMPT)
        assert engine.hit_tokens(request) == WHOLE
        engine.cache.allocated(request.name, request.blocks, WHOLE)
        server.send(signal.SIGSTOP)
        engine.step()
        server.send(signal.SIGKILL)
        until(lambda: engine.has_loaded(request), "the load's end")
        assert request.loaded[0].chunks == 0
        engine.abort(request)
        engine.until_idle()


def test_a_stopped_server_delays_and_hangs_nothing(
    settings: CacheSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load ends at its time, look-ups cost their limit and then nothing, blocks are let go; when
    it continues, prompts hit again.
    """
    monkeypatch.setattr(lookup_client, "REST_S", 0.5)
    limits = {"load_timeout_s": 0.5, "lookup_timeout_s": 0.2}
    with process_of(settings, tmp_path) as server, engine_of(settings, **limits) as engine:
        engine.serve(PROMPT)
        engine.until_idle()
        request = begun_with_hits(engine)
        engine.cache.allocated(request.name, request.blocks, WHOLE)
        server.send(signal.SIGSTOP)
        began = time.monotonic()
        engine.step()
        until(lambda: engine.has_loaded(request), "the load's end")
        assert not request.loaded[0].is_whole
        engine.abort(request)
        for start in range(5):
            engine.serve(prompt_of(200, 10 + start))
        engine.until_idle()
        assert time.monotonic() - began < DEADLINE_S
        assert engine.cache.counters["load_tokens"] == WHOLE
        server.send(signal.SIGCONT)
        until_hits(engine, PROMPT)


class Writer:
    """A process that has reserved slots."""

    def __init__(self, settings: CacheSettings, chunks: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.cache_writer_program",
             settings.socket_path, str(chunks)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "reserved\n"

    def stop(self) -> None:
        """It does nothing from now on."""
        stand_still(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def write(self) -> None:
        """It has written to all of its slots."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "written\n"

    def end(self) -> None:
        self.process.kill()
        with self.process:
            self.process.wait()


def test_a_stopped_writer_writes_into_nobodys_slot(settings: CacheSettings, tmp_path: Path) -> None:
    """It is stopped while others fill and overturn a small arena, continues and writes: what the
    others have saved is right. Its slots are free when it is dead.
    """
    settings = settings_in(tmp_path, slots=8)
    with served(settings) as server:
        writer = Writer(settings, 3)
        writer.stop()
        with engine_of(settings) as engine, engine_of(settings, ranks=2) as other:
            for start in range(8):
                engine.serve(prompt_of(200, start))
                engine.until_idle()
                assert other.serve(prompt_of(200, start)).cached == 3 * CHUNK_TOKENS
                other.until_idle()
            writer.go_on()
            writer.write()
            assert engine.serve(prompt_of(200, 7)).cached == 3 * CHUNK_TOKENS
            assert server.book.counters["broken_chunks"] == 0
            assert server.book.saves.open_reservations == 3
            writer.end()
            until(lambda: not server.book.saves.open_reservations, "the slots to come free")
            engine.until_idle()
            other.until_idle()
        audit(server)

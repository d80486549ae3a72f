"""Engines' ends of the cache against a real server in a thread, with real KV memory."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.cache_rig import (
    CHUNK_TOKENS,
    DEADLINE_S,
    SHAPE,
    CacheEngine,
    audit,
    prompt_of,
    served,
    settings_in,
    until,
)

from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    Arena,
    FromServer,
    Hello,
    Reserve,
    Reserved,
)
from splitserve.orchestrator.engines.mock.model import KvShape, chunk_geometry

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from splitserve.kv_transfer.cache.settings import CacheSettings

LONG = prompt_of(5 * CHUNK_TOKENS + 9)


@pytest.fixture
def engines() -> Iterator[Callable[..., CacheEngine]]:
    """A function that starts engines; they are stopped after the test, and hold nothing then."""
    made: list[CacheEngine] = []

    def make(settings: CacheSettings, **options: object) -> CacheEngine:
        made.append(CacheEngine(settings, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def blocks_of(tokens: int) -> KvShape:
    return dataclasses.replace(SHAPE, block_tokens=tokens)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 4)])
def test_ranks_of_any_number_read_what_ranks_of_any_number_wrote(
    tmp_path: Path, engines: Callable[..., CacheEngine], writers: int, readers: int
) -> None:
    """All whole chunks come, every byte is right, and nothing is held afterwards."""
    settings = settings_in(tmp_path)
    with served(settings) as server:
        writer, reader = engines(settings, ranks=writers), engines(settings, ranks=readers)
        assert writer.serve(LONG).cached == 0
        writer.until_idle()
        assert reader.serve(LONG).cached == 5 * CHUNK_TOKENS
        reader.until_idle()
        audit(server)


@pytest.mark.parametrize(("written", "read"), [(16, 32), (32, 16), (64, 8), (8, 64)])
def test_engines_of_any_block_size_read_each_others_chunks(
    tmp_path: Path, engines: Callable[..., CacheEngine], written: int, read: int
) -> None:
    """Chunks are converted: every byte is right, with other tensor-parallel sizes too."""
    settings = settings_in(tmp_path)
    with served(settings) as server:
        writer = engines(settings, shape=blocks_of(written), ranks=2)
        writer.serve(LONG)
        writer.until_idle()
        for ranks in (1, 2):
            reader = engines(settings, shape=blocks_of(read), ranks=ranks)
            assert reader.serve(LONG).cached == 5 * CHUNK_TOKENS
            reader.until_idle()
        audit(server)


@pytest.mark.parametrize("written", [16, 32, 64])
@pytest.mark.parametrize("known_blocks", [1, 3, 4, 5, 7])
def test_what_the_engine_has_is_not_loaded(
    tmp_path: Path, engines: Callable[..., CacheEngine], written: int, known_blocks: int
) -> None:
    """A prompt whose first blocks are in the engine gets the rest, from the middle of a chunk, and
    of a block of the chunk, on.
    """
    settings = settings_in(tmp_path)
    with served(settings):
        writer = engines(settings, shape=blocks_of(written))
        writer.serve(LONG)
        writer.until_idle()
        reader = engines(settings)
        known = reader.serve(LONG).blocks[:known_blocks]
        reader.until_idle()
        request = reader.begin(LONG, shared=known)
        missing = 5 * CHUNK_TOKENS - known_blocks * SHAPE.block_tokens
        assert reader.load(request) == missing
        reader.compute(request)
        reader.check(request)
        reader.finish(request)
        reader.until_idle()


def test_blocks_may_lie_anywhere(tmp_path: Path, engines: Callable[..., CacheEngine]) -> None:
    """Scattered blocks are saved and loaded like consecutive ones."""
    settings = settings_in(tmp_path)
    with served(settings):
        for engine in (engines(settings), engines(settings, ranks=2)):
            taken = engine.pool.take([], engine.pool.free_blocks)
            assert taken is not None
            random.Random(len(engine.threads)).shuffle(taken)
            engine.pool.give_back(taken)
            cached = engine.serve(LONG).cached
            engine.until_idle()
        assert cached == 5 * CHUNK_TOKENS


def test_a_chat_goes_on_with_its_answer(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """The answer's KV is saved when the request ends, but for its last token: the next turn hits
    the chunks that reach into it.
    """
    settings = settings_in(tmp_path)
    with served(settings):
        engine, other = engines(settings), engines(settings)
        prompt, answer = prompt_of(100), prompt_of(29, 3)
        request = engine.begin([*prompt, *answer])
        engine.compute(request)
        request.prompt = prompt
        engine.finish(request, answer)
        engine.until_idle()
        assert other.serve([*prompt, *answer, *prompt_of(30, 5)]).cached == 2 * CHUNK_TOKENS


def test_the_last_token_of_an_answer_is_not_saved(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """An engine that plans ahead says it is computed; its KV may not be there yet."""
    settings = settings_in(tmp_path)
    with served(settings):
        engine = engines(settings)
        prompt = prompt_of(2 * CHUNK_TOKENS - 1)
        request = engine.begin(prompt)
        engine.compute(request)
        tokens = [*prompt, 7]
        engine.cache.finished(request.name, len(tokens), tokens, request.blocks)
        engine.pool.give_back(request.blocks)
        engine.until_idle()
        assert engine.serve([*tokens, 1]).cached == CHUNK_TOKENS


def test_two_requests_that_compute_the_same_chunk_at_once(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """One of them writes it. The engine is not cut off, and what is found is right."""
    settings = settings_in(tmp_path)
    with served(settings) as server:
        engine = engines(settings, ranks=2)
        first, second = engine.begin(LONG), engine.begin(LONG)
        engine.step((first, len(LONG)), (second, len(LONG)))
        for request in (first, second):
            engine.finish(request)
        engine.until_idle()
        assert engine.serve(LONG).cached == 5 * CHUNK_TOKENS
        assert [thread.counters()["cache_connections"] for thread in engine.threads] == [1, 1]
        engine.until_idle()
        audit(server)


def test_a_broken_chunk_in_the_arena_is_a_miss(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """The load fails, the chunk is nowhere any more and counted; the next request saves it anew."""
    settings = settings_in(tmp_path, disk=True)
    with served(settings) as server:
        writer, reader = engines(settings), engines(settings, ranks=2)
        writer.serve(LONG)
        writer.until_idle()
        audit(server)
        entry = sorted(server.book.arena.index, key=lambda entry: entry.value.offset)[2]
        server.arena.memory.view[entry.value.offset + 77] ^= 1
        request = reader.begin(LONG)
        assert reader.load(request) == 0
        until(lambda: server.book.counters["broken_chunks"] >= 1, "the chunk to be counted")
        until(lambda: server.book.arena.index.get(entry.key) is None, "the chunk to go")
        until(lambda: len(disk_files(tmp_path)) == 4, "the chunk's file to go")
        reader.compute(request)
        reader.finish(request)
        reader.until_idle()
        assert writer.serve(LONG).cached == 5 * CHUNK_TOKENS
        writer.until_idle()
        audit(server)


@pytest.mark.parametrize("at", [40, 16 * 1024 + 100], ids=["header", "body"])
def test_a_broken_chunk_on_disk_is_a_miss(
    tmp_path: Path, engines: Callable[..., CacheEngine], at: int
) -> None:
    """A byte of a file has flipped while no server ran: its chunk is found to be broken, in the
    server or by the reader, and its file is gone.
    """
    settings = settings_in(tmp_path, disk=True)
    with served(settings) as server:
        writer = engines(settings)
        writer.serve(LONG)
        writer.until_idle()
        writer.stop()
        audit(server)
    content = bytearray((broken := disk_files(tmp_path)[1]).read_bytes())
    content[at] ^= 1
    broken.write_bytes(content)
    with served(settings) as server:
        reader = engines(settings)
        cached = reader.serve(LONG).cached
        assert cached < 5 * CHUNK_TOKENS
        reader.until_idle()
        audit(server)
        assert not any(path.read_bytes() == content for path in disk_files(tmp_path))
        again = engines(settings)
        assert again.serve(LONG).cached == 5 * CHUNK_TOKENS


def disk_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "disk").glob("chunks/*/*") if len(path.name) == 64]


def test_a_restarted_server_has_what_was_on_disk(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """Engines connect again by themselves, and hit. What waited to be written when the server was
    asked to stop was written.
    """
    settings = settings_in(tmp_path, disk=True)
    with served(settings):
        engine = engines(settings, ranks=2)
        engine.serve(LONG)
        engine.until_idle()
    assert len(disk_files(tmp_path)) == 5
    engine.step()
    with served(settings) as server:
        until(
            lambda: all(t.counters()["cache_connections"] == 2 for t in engine.threads),
            "the workers to connect again",
        )

        def hits() -> bool:
            return engine.serve(LONG).cached == 5 * CHUNK_TOKENS

        until(hits, "the scheduler to connect again")
        engine.until_idle()
        audit(server)


def test_loads_larger_than_the_arena(tmp_path: Path, engines: Callable[..., CacheEngine]) -> None:
    """Three engines load 12 chunks each through 4 slots at once: all of them get everything."""
    prompts = [prompt_of(12 * CHUNK_TOKENS + 1, start) for start in (1, 2)]
    settings = settings_in(tmp_path, disk=True)
    with served(settings):
        writer = engines(settings)
        for prompt in prompts:
            writer.serve(prompt)
        writer.until_idle()
        writer.stop()
    settings = settings_in(tmp_path, disk=True, slots=4)
    with served(settings) as server:
        made = [engines(settings, ranks=ranks) for ranks in (1, 2, 1)]
        requests = [
            (engine, engine.begin(prompts[number % 2])) for number, engine in enumerate(made)
        ]
        for engine, request in requests:
            assert engine.order_load(request) == 12 * CHUNK_TOKENS
        for engine, request in requests:
            until(lambda e=engine, r=request: e.has_loaded(r), "the load's end")  # type: ignore[misc]
            assert [loaded.chunks for loaded in request.loaded] == [12] * len(engine.threads)
            request.computed = 12 * CHUNK_TOKENS
            engine.compute(request)
            engine.check(request)
            engine.finish(request)
            engine.until_idle()
        audit(server)


def test_what_is_said_of_a_long_prompt_fits(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """700 chunks of a model with 24 layers are saved and loaded: their checksums alone would not
    fit into one packet.
    """
    shape = KvShape(layers=24, heads=1, block_tokens=64, head_bytes=8)
    settings = settings_in(tmp_path, slots=1500)
    with served(settings) as server:
        writer, reader = (engines(settings, shape=shape, blocks=800) for _ in range(2))
        prompt = prompt_of(700 * CHUNK_TOKENS + 1)
        writer.serve(prompt)
        writer.until_idle()
        assert reader.serve(prompt).cached == 700 * CHUNK_TOKENS
        reader.until_idle()
        audit(server)


def test_an_order_that_nobody_knows(tmp_path: Path, engines: Callable[..., CacheEngine]) -> None:
    """The load fails, nothing is taken for broken, and the reader does not ask for it again."""
    settings = settings_in(tmp_path)
    with served(settings) as server:
        writer, reader = engines(settings, order="tiles-of-2031"), engines(settings)
        writer.serve(LONG)
        writer.until_idle()
        first = reader.begin(LONG)
        assert reader.load(first) == 0
        reader.compute(first)
        reader.finish(first)
        second = reader.begin(LONG)
        assert reader.hit_tokens(second) == 0
        reader.abort(second)
        reader.until_idle()
        assert server.book.counters["broken_chunks"] == 0
        assert writer.serve(LONG).cached == 5 * CHUNK_TOKENS


def test_blocks_are_held_within_the_limit(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """A save that would hold too much is postponed; what never fits is not saved, and no block
    stays held.
    """
    settings = settings_in(tmp_path)
    with served(settings) as server:
        engine = engines(settings, save_limit_bytes=1)
        requests = [engine.begin(prompt_of(200, start)) for start in range(3)]
        engine.step(*((request, 200) for request in requests))
        for request in requests:
            engine.finish(request)
        engine.until_idle()
        assert engine.cache.counters["saves_postponed"] > 0
        audit(server)


def test_a_request_that_ends_while_it_loads(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """Its load ends by itself, and is of no consequence."""
    settings = settings_in(tmp_path)
    with served(settings) as server:
        engine = engines(settings)
        engine.serve(LONG)
        engine.until_idle()
        request = engine.begin(LONG)
        engine.order_load(request)
        engine.abort(request)
        engine.until_idle()
        audit(server)


class RawWorker:
    """A worker that says what the test wants, and nothing else."""

    def __init__(self, settings: CacheSettings, rank: int = 0, ranks: int = 1) -> None:
        self.connection: socket.socket = packets.connect(settings.socket_path)
        self._decoder: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)
        packets.send(self.connection, Hello(
            version=PROTOCOL_VERSION, engine="raw", rank=rank, ranks=ranks, model=bytes(32),
            geometry=chunk_geometry(CHUNK_TOKENS, SHAPE),
        ))  # fmt: skip
        self.greeting = self.hear()

    def hear(self) -> object:
        """The next message."""
        self.connection.settimeout(DEADLINE_S)
        packet, *_ = self.connection.recvmsg(packets.BUFFER_BYTES)
        self.connection.setblocking(False)
        return self._decoder.decode(packet) if packet else None

    def reserve(self, *keys: bytes) -> tuple[int, ...]:
        packets.send(self.connection, Reserve(save_id=1, parent=b"", keys=b"".join(keys)))
        answer = self.hear()
        assert isinstance(answer, Reserved)
        return answer.offsets


def test_slots_of_a_client_that_talks_nonsense_are_its_own_until_it_closes(
    tmp_path: Path, engines: Callable[..., CacheEngine]
) -> None:
    """It is told to go at once; another engine gets its slots only when it has."""
    settings = settings_in(tmp_path, slots=2)
    with served(settings) as server:
        raw, engine = RawWorker(settings), engines(settings)
        assert min(raw.reserve(b"a" * 32, b"b" * 32)) >= 0
        raw.connection.send(b"\xc1 nonsense")
        assert raw.hear() is None
        engine.serve(prompt_of(70))
        engine.until_idle()
        assert engine.threads[0].counters()["cache_chunks_without_room"] == 1
        assert server.book.saves.open_reservations == 2
        raw.connection.close()
        until(lambda: not server.book.saves.open_reservations, "the slots to come free")
        engine.serve(prompt_of(70))
        engine.until_idle()
        assert engine.serve(prompt_of(70)).cached == CHUNK_TOKENS
        engine.until_idle()
        audit(server)


def test_engines_that_die_together(tmp_path: Path) -> None:
    """Connections that close in the same moment, with slots and loads open, are no trouble."""
    settings = settings_in(tmp_path, slots=8)
    with served(settings) as server:
        for _ in range(20):
            raws = [RawWorker(settings, rank, 4) for rank in range(4)]
            for raw in raws:
                raw.reserve(b"a" * 32, b"b" * 32)
            for raw in raws:
                raw.connection.close()
        audit(server)


@pytest.mark.parametrize(
    ("rank", "ranks", "words"), [(2, 2, "rank 2 of 2"), (0, 3, "of 3 cannot hold")]
)
def test_ranks_that_cannot_be(tmp_path: Path, rank: int, ranks: int, words: str) -> None:
    """They are refused with a sentence, and the server lives."""
    settings = settings_in(tmp_path)
    with served(settings):
        raw = RawWorker(settings, rank, ranks)
        assert isinstance(raw.greeting, Arena)
        assert words in raw.greeting.refusal
        raw.connection.close()
        good = RawWorker(settings)
        assert isinstance(good.greeting, Arena)
        assert not good.greeting.refusal
        good.connection.close()

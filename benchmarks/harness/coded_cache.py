"""Real KV as chunks, and a cache with a codec from end to end: server process, tier, an engine's
copying thread, pages.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from splitserve.kernels.quantise import read_numbers
from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.arena import Arena
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.chunk_coding import encode_chunk
from splitserve.kv_transfer.cache.chunk_format import body_checksums
from splitserve.kv_transfer.cache.codecs.names import CODED, LOSSY
from splitserve.kv_transfer.cache.control_messages import ClearWish, StatWish
from splitserve.kv_transfer.cache.copy_thread import CacheThread
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.messages import FromServer, Manage, Managed, ReadyChunk
from splitserve.kv_transfer.cache.orders import CacheOrders, LoadOrder, SaveOrder
from splitserve.kv_transfer.cache.settings import CacheClientConfig, CacheSettings, TierSettings
from splitserve.kv_transfer.cache.socket_path import is_listening
from splitserve.kv_transfer.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

MODEL = bytes(32)
CHUNK_TOKENS, BLOCK_TOKENS = 256, 32
DEADLINE_S = 120.0
POLL_S = 0.002
LOSSY_SHARE = {"int8": 1 / 127, "int5z": 1 / 15}
"""How far off a number may be, of the largest one of its layer."""


@dataclass
class RealChunks:
    """KV of a text, as chunks in the arena's form."""

    geometry: ChunkGeometry
    chunks: list[Chunk]
    bodies: list[memoryview]

    @property
    def count(self) -> int:
        return len(self.chunks)

    @property
    def keys(self) -> bytes:
        """Of all chunks, in order."""
        return b"".join(bytes(8) + number.to_bytes(24, "big") for number in range(self.count))

    def check(self, pages: Pages, codec: str) -> None:
        """The pages hold the chunks: to the bit, or as near as the codec promises."""
        for number, body in enumerate(self.bodies):
            expected = np.frombuffer(body, np.uint8).reshape(self.geometry.layers, -1)
            found = pages.bytes[:, pages.ids(number)].reshape(self.geometry.layers, -1)
            if codec not in LOSSY:
                assert np.array_equal(found, expected), f"{codec}: other bytes"
                continue
            for layer in range(self.geometry.layers):
                exact = read_numbers(expected[layer], self.geometry.number)
                near = read_numbers(np.ascontiguousarray(found[layer]), self.geometry.number)
                off = np.abs(exact - near).max() / np.abs(exact).max()
                assert 0 < off < LOSSY_SHARE[codec], f"{codec}: layer {layer} is off by {off:.3f}"


class Pages:
    """An engine's KV memory, with room for so many chunks behind one unused block."""

    def __init__(self, geometry: ChunkGeometry, chunks: int) -> None:
        self._geometry = geometry
        page = geometry.heads * geometry.slice_bytes
        blocks = chunks * geometry.blocks + 1
        self._map = mmap.mmap(-1, geometry.layers * blocks * page)
        self.bytes = np.frombuffer(self._map, np.uint8).reshape(geometry.layers, blocks, page)
        self.bytes[:] = 1
        address = int(self.bytes.ctypes.data)
        self.layout = PageLayout(
            layer_bases=tuple(address + n * blocks * page for n in range(geometry.layers)),
            block_stride=page, page_bytes=page, num_blocks=blocks,
            block_tokens=geometry.block_tokens, heads=geometry.heads, first_head=0,
            total_heads=geometry.heads,
        )  # fmt: skip

    def ids(self, chunk: int) -> list[int]:
        """Blocks of one chunk."""
        first = 1 + chunk * self._geometry.blocks
        return list(range(first, first + self._geometry.blocks))


def real_chunks(folder: Path, text: Path, count: int, kept: Path | None = None) -> RealChunks:
    """The model's KV of the text in bfloat16 rows; ``kept`` is a file that has it from an earlier
    run, or gets it.
    """
    if kept is not None and kept.exists():
        rows = np.load(kept)
    else:
        from splitserve.orchestrator.engines.transformers.quality import KvKind, QualityMeter

        meter = QualityMeter(str(folder), KvKind(CHUNK_TOKENS, "bfloat16"))
        windows = -(-count // 3)
        _, found = meter.chunks(text.read_text(), tokens=windows * 4 * CHUNK_TOKENS)
        rows = np.array(found[:count])
        if kept is not None:
            np.save(kept, rows)
    _, layers, heads, tokens, row_bytes = rows.shape  # uint8 [chunks, layers, heads, tokens, bytes]
    geometry = ChunkGeometry(
        layers=layers, chunk_tokens=tokens, block_tokens=BLOCK_TOKENS, heads=heads,
        key_bytes=row_bytes // 2, value_bytes=row_bytes // 2, item_bytes=2, order="rows",
        number="bfloat16",
    )  # fmt: skip
    bodies = [_body(each, geometry) for each in rows[:count]]
    chunks = [
        Chunk(0, geometry, 1, body_checksums(body, geometry, 1), (), MODEL) for body in bodies
    ]
    return RealChunks(geometry, chunks, bodies)


def _body(layers: Sequence[Any], geometry: ChunkGeometry) -> memoryview:
    """Rows of tokens in blocks."""
    body = memoryview(mmap.mmap(-1, geometry.chunk_bytes))
    for number, rows in enumerate(layers):
        blocks = rows.reshape(geometry.heads, geometry.blocks, -1).transpose(1, 0, 2)
        start = number * geometry.layer_bytes
        body[start : start + geometry.layer_bytes] = blocks.tobytes()
    return body


def slots_with(chunks: RealChunks) -> tuple[Arena, dict[str, list[ReadyChunk]]]:
    """An arena that holds every chunk in every form, by codec."""
    forms = ("raw", *CODED)
    geometry = chunks.geometry
    arena = Arena(len(forms) * chunks.count * (geometry.chunk_bytes + (1 << 16)))
    arena.cut(geometry.chunk_bytes)
    arena.start()
    until(lambda: arena.touched_bytes >= arena.size_bytes, "the arena's memory")
    ready: dict[str, list[ReadyChunk]] = {name: [] for name in forms}
    for name in forms:
        for number, (chunk, body) in enumerate(zip(chunks.chunks, chunks.bodies, strict=True)):
            offset = arena.take()
            assert offset is not None
            kept, sums, frames = body, chunk.checksums, b""
            if name != "raw":
                coded = encode_chunk(name, chunk, body, begins_prompt=number == 0)  # type: ignore[arg-type]
                assert coded is not None
                kept, frames, sums = coded
            arena.memory.view[offset : offset + len(kept)] = kept
            ready[name].append(
                ReadyChunk(number, offset, geometry, 1, sums, codec=name, frames=frames)  # type: ignore[arg-type]
            )
    return arena, ready


class CacheUnderTest:
    """A cache server process with an arena and perhaps a tier, and an engine's rank."""

    def __init__(
        self,
        folder: Path,
        chunks: RealChunks,
        tier: TierSettings | None,
        *,
        cpu_codec: str = "raw",
        wrap: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        folder.mkdir(parents=True)
        self._chunks = chunks
        self._folder = folder
        self._socket = str(folder / "cache.sock")
        # Chunks may take half of it while they wait to be written
        room = (3 * chunks.count + 2) * (chunks.geometry.chunk_bytes + 4096)
        cpu = TierSettings(type="cpu", capacity_bytes=room, codec=cpu_codec)  # type: ignore[arg-type]
        settings = CacheSettings(
            socket_path=self._socket, chunk_tokens=CHUNK_TOKENS,
            tiers=(cpu,) if tier is None else (cpu, tier),
        )  # fmt: skip
        self._has_tier = tier is not None
        (folder / "cache.json").write_bytes(msgspec.json.encode(settings))
        command = [sys.executable, "-m", "splitserve.kv_transfer.cache", str(folder / "cache.json")]
        with (folder / "cache.log").open("wb") as log:
            self._process = subprocess.Popen(wrap(command), stdout=log, stderr=log)
        until(lambda: is_listening(self._socket), f"the cache server of {folder.name}")
        self.pages = Pages(chunks.geometry, chunks.count)
        self._thread = CacheThread(
            CacheClientConfig(socket_path=self._socket, chunk_tokens=CHUNK_TOKENS),
            engine=folder.name, rank=0, ranks=1, model=MODEL, layout=self.pages.layout,
            geometry=chunks.geometry,
        )  # fmt: skip
        self._thread.start()
        self._ids = 0

    def fill(self) -> None:
        """The chunks are in the arena and in the tier."""
        blocks: tuple[int, ...] = ()
        for number, body in enumerate(self._chunks.bodies):
            ids = self.pages.ids(number)
            whole = np.frombuffer(body, np.uint8)
            self.pages.bytes[:, ids] = whole.reshape(self.pages.bytes.shape[0], len(ids), -1)
            blocks += tuple(ids)
        until(lambda: self._thread.counters().get("cache_connected", 0), "the server's greeting")
        self._ids += 1
        save = SaveOrder(self._ids, b"", self._chunks.keys, blocks, is_final=True)
        self._thread.begin_step(CacheOrders(saves=(save,)))
        until(lambda: self._stat("cpu")["chunks"] == self._chunks.count, "chunks in the arena")
        if self._has_tier:
            until(lambda: self._stat("redis")["writes"] == self._chunks.count, "chunks in the tier")
        self.pages.bytes[:] = 0

    def load(self) -> float:
        """Seconds until all chunks are in their pages."""
        self._ids += 1
        blocks = tuple(b for number in range(self._chunks.count) for b in self.pages.ids(number))
        order = LoadOrder(self._ids, f"r{self._ids}", self._chunks.keys, 0, blocks, DEADLINE_S)
        began = time.perf_counter()
        self._thread.begin_step(CacheOrders(loads=(order,)))
        while not (news := self._thread.take_news(DEADLINE_S)).loaded:
            assert time.perf_counter() - began < DEADLINE_S, "a load does not end"
        took = time.perf_counter() - began
        log = (self._folder / "cache.log").read_text()[-2000:]
        assert news.loaded[0].is_whole, f"{news.loaded[0]}, {self._thread.counters()}\n{log}"
        return took

    def forget_arena(self) -> None:
        """The chunks are in the tier alone."""
        self._ask("clear", ClearWish(tenant=None, tier="cpu", limit_s=DEADLINE_S))

    def stop(self) -> None:
        """Thread and process have ended."""
        self._thread.stop()
        self._process.terminate()
        self._process.wait(DEADLINE_S)

    def _stat(self, tier: str) -> dict[str, Any]:
        found = self._ask("stat", StatWish())
        return next(each for each in found["tiers"] if each["name"] == tier)

    def _ask(self, verb: str, wish: msgspec.Struct) -> dict[str, Any]:
        connection = packets.connect(self._socket)
        try:
            connection.settimeout(DEADLINE_S)
            arguments = msgspec.msgpack.encode(wish)
            packets.send(connection, Manage(request_id=1, verb=verb, arguments=arguments))
            answer = msgspec.msgpack.decode(connection.recv(1 << 20), type=FromServer)
            assert isinstance(answer, Managed), answer
            found: dict[str, Any] = msgspec.msgpack.decode(answer.result)
            return found
        finally:
            connection.close()


def until(condition: Callable[[], object], what: str) -> None:
    """Return once it holds. Raises ``TimeoutError`` naming ``what``."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not in {DEADLINE_S:g} s: {what}")
        time.sleep(POLL_S)

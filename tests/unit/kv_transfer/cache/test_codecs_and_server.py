"""A real server with a coded disk, and an engine's copying thread: from pages to disk and back."""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace
from support.cache_rig import served, until
from support.kv_numbers import GEOMETRY, MODEL, body_like_kv, numbers_in

from splitserve.kv_transfer.cache.copy_thread import CacheThread
from splitserve.kv_transfer.cache.orders import CacheOrders, LoadOrder, SaveOrder
from splitserve.kv_transfer.cache.settings import CacheClientConfig, CacheSettings, TierSettings
from splitserve.kv_transfer.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from splitserve.kv_transfer.cache.geometry import ChunkGeometry
    from splitserve.kv_transfer.cache.server import CacheServer

CHUNKS = 3
KEYS = [bytes(8) + bytes([n + 1]) * 24 for n in range(CHUNKS)]
OFF = {"raw": 0.0, "bf16z": 0.0, "int8": 1 / 127, "int5z": 1 / 15}
"""How far off a number may be, of the largest."""


@dataclass
class Engine:
    """One rank with room for all chunks twice."""

    thread: CacheThread
    memory: Any  # [layers, blocks, bytes]
    geometry: ChunkGeometry
    orders: int = 0

    def blocks(self, first: int) -> tuple[int, ...]:
        return tuple(range(first, first + CHUNKS * self.geometry.blocks))

    def fill(self) -> None:
        """Each chunk's pages have numbers of their own."""
        for number in range(CHUNKS):
            body = np.frombuffer(body_like_kv(self.geometry, seed=number), np.uint8)
            ids = self.blocks(1)[number * self.geometry.blocks :][: self.geometry.blocks]
            self.memory[:, list(ids)] = body.reshape(self.geometry.layers, len(ids), -1)

    def save(self) -> None:
        self.orders += 1
        order = SaveOrder(self.orders, b"", b"".join(KEYS), self.blocks(1), is_final=True)
        self.thread.begin_step(CacheOrders(saves=(order,)))
        until(lambda: self.orders in self.thread.take_news().saved, "the save to end")

    def load(self) -> Any:
        """How the load has ended."""
        self.orders += 1
        target = self.blocks(1 + CHUNKS * self.geometry.blocks)
        self.memory[:, list(target)] = 0
        order = LoadOrder(self.orders, "r", b"".join(KEYS), 0, target, 10.0)
        self.thread.begin_step(CacheOrders(loads=(order,)))
        ended: list[Any] = []
        until(lambda: ended.extend(self.thread.take_news().loaded) or ended, "the load to end")
        return ended[0]

    def farthest(self) -> float:
        """How far the loaded numbers are from those saved, of the largest one."""
        half = CHUNKS * self.geometry.blocks
        saved, loaded = (self.memory[:, 1 + n * half : 1 + (n + 1) * half] for n in (0, 1))
        exact = numbers_in(saved.tobytes(), self.geometry)
        return float(np.abs(exact - numbers_in(loaded.tobytes(), self.geometry)).max()
                     / np.abs(exact).max())  # fmt: skip


@contextmanager
def engine_at(settings: CacheSettings, geometry: ChunkGeometry = GEOMETRY) -> Iterator[Engine]:
    page = geometry.heads * geometry.slice_bytes
    blocks = 1 + 2 * CHUNKS * geometry.blocks
    area = mmap.mmap(-1, geometry.layers * blocks * page)
    memory = np.frombuffer(area, np.uint8).reshape(geometry.layers, blocks, page)
    layout = PageLayout(
        layer_bases=tuple(int(layer.ctypes.data) for layer in memory), block_stride=page,
        page_bytes=page, num_blocks=blocks, block_tokens=geometry.block_tokens,
        heads=geometry.heads, first_head=0, total_heads=geometry.heads,
    )  # fmt: skip
    thread = CacheThread(
        CacheClientConfig(socket_path=settings.socket_path, chunk_tokens=geometry.chunk_tokens),
        engine="e", rank=0, ranks=1, model=MODEL, layout=layout, geometry=geometry,
    )  # fmt: skip
    thread.start()
    until(lambda: thread.counters().get("cache_connected"), "the engine to connect")
    yield Engine(thread, memory, geometry)
    thread.stop()


def settings_with(folder: Path, codec: Any, **more: Any) -> CacheSettings:
    return CacheSettings(
        socket_path=str(folder / "cache.sock"),
        chunk_tokens=GEOMETRY.chunk_tokens,
        tiers=(
            TierSettings(type="cpu", capacity_bytes=16 * GEOMETRY.chunk_bytes),
            TierSettings(
                type="disk", capacity_bytes=2**24, url=str(folder / "disk"), codec=codec, **more
            ),
        ),
    )


def until_on_disk(server: CacheServer) -> Any:
    """The disk's book."""
    book = server.book.tiers[0]
    until(lambda: book.counters["writes_written"] == CHUNKS, "the chunks to be on the disk")
    return book


@pytest.mark.parametrize("number", ["bfloat16", "float32"])
@pytest.mark.parametrize("codec", ["raw", "bf16z", "int8", "int5z"])
def test_pages_come_back_from_a_coded_disk(tmp_path: Path, codec: str, number: str) -> None:
    """From memory to the bit; after a restart of the server from the disk, to the bit or within the
    codec's step; once more from memory, where they still are as the disk had them.
    """
    geometry = GEOMETRY
    if number == "float32":
        geometry = replace(GEOMETRY, number=number, item_bytes=4, key_bytes=128, value_bytes=128)
    settings = settings_with(tmp_path, codec)
    with served(settings) as server, engine_at(settings, geometry) as engine:
        engine.fill()
        engine.save()
        assert engine.load().is_whole
        assert engine.farthest() == 0.0
        disk = until_on_disk(server)
        stored = disk.index.used_bytes
        assert disk.counters["coded_chunks"] == (CHUNKS if codec != "raw" else 0)
    with served(settings) as server, engine_at(settings, geometry) as engine:
        assert server.book.tiers[0].index.used_bytes == stored
        engine.fill()
        for _ in range(2):
            assert engine.load().is_whole
            off = engine.farthest()
            assert off == 0.0 if OFF[codec] == 0.0 else 0.0 < off < OFF[codec]
        assert server.book.tiers[0].counters["hits"] == CHUNKS
        plain = CHUNKS * geometry.chunk_bytes
        read = server.book.tiers[0].counters["read_bytes"]
        assert read == plain if codec == "raw" else read < 0.9 * plain


@pytest.mark.parametrize(("before", "after"), [("bf16z", "raw"), ("raw", "bf16z")])
def test_exact_codecs_share_chunks(tmp_path: Path, before: str, after: str) -> None:
    """What one has stored the other one reads, to the bit."""
    settings = settings_with(tmp_path, before)
    with served(settings) as server, engine_at(settings) as engine:
        engine.fill()
        engine.save()
        until_on_disk(server)
    settings = settings_with(tmp_path, after)
    with served(settings) as server, engine_at(settings) as engine:
        engine.fill()
        assert engine.load().is_whole
        assert engine.farthest() == 0.0
        assert server.book.tiers[0].counters["hits"] == CHUNKS


def test_a_coded_chunk_that_is_broken_is_a_miss(tmp_path: Path) -> None:
    """A byte of a frame has changed on the disk: the load ends before that chunk, which is gone
    everywhere; those before it are in place.
    """
    settings = settings_with(tmp_path, "int8")
    with served(settings) as server, engine_at(settings) as engine:
        engine.fill()
        engine.save()
        until_on_disk(server)
    (path,) = (tmp_path / "disk").rglob(KEYS[1].hex())
    content = bytearray(path.read_bytes())
    content[16384 + 500] ^= 1
    path.write_bytes(content)
    with served(settings) as server, engine_at(settings) as engine:
        engine.fill()
        assert engine.load().chunks == 1
        until(lambda: not path.exists(), "the broken chunk to be removed")
        assert server.book.counters["broken_chunks"] == 1


def test_auto_measures_before_it_codes(tmp_path: Path) -> None:
    """The first chunks are as they are, and codecs are tried on them; a disk that was found to be
    slow has its next chunks coded.
    """
    settings = settings_with(tmp_path, "auto", auto_codecs=("bf16z", "int8"))
    with served(settings) as server, engine_at(settings) as engine:
        engine.fill()
        engine.save()
        disk = until_on_disk(server)
        assert disk.counters["coded_chunks"] == 0
        assert disk.codecs.to_try() == ()
        assert disk.codec == "raw"
        disk.health.read(1_000, 1.0)
        disk.health.bytes_per_s = 1e6
        assert disk.codec == "int8"
        assert disk.speed.bytes_per_s > 1.8e6

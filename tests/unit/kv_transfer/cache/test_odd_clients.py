"""Clients that say anything: the book refuses what cannot be, and keeps its promises to others."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.cache_world import CacheWorld
from support.fake_arena import GEOMETRY

from splitserve.kv_transfer.cache.book_effects import AskTier, ReadChunk, WriteChunk
from splitserve.kv_transfer.cache.chunk import Chunk
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    CloseChunks,
    Commit,
    Hello,
    Lookup,
    OpenChunks,
    Reserve,
)

KEYS = [bytes(8) + bytes([n]) + bytes(23) for n in range(4)]
ODD_CLIENTS = (900, 901)


def keys(chance: Random) -> bytes:
    """Some keys, none, one twice, or half of one."""
    joined = b"".join(chance.choices(KEYS, k=chance.randint(0, 4)))
    return joined[:-3] if chance.random() < 0.1 else joined


def said(chance: Random) -> Any:
    """Any message, with ids and indices that may belong to nothing."""
    number = chance.randint(0, 3)
    indices = tuple(chance.randint(-2, 5) for _ in range(chance.randint(0, 3)))
    sums = bytes(chance.choice([8, 8, 8, 0, 7, 16]))
    return chance.choice([
        Lookup(lookup_id=number, keys=keys(chance), limit_s=chance.choice([-1.0, 0.0, 1.0])),
        OpenChunks(load_id=number, keys=keys(chance), limit_s=chance.choice([-1.0, 0.0, 5.0])),
        CloseChunks(load_id=number, indices=indices, broken=indices[:1]),
        Reserve(save_id=number, parent=chance.choice([b"", KEYS[0], b"x"]), keys=keys(chance)),
        Commit(save_id=number, written=tuple((i, sums) for i in indices), abandoned=indices[1:]),
        Commit(save_id=number, written=(), abandoned=indices),
    ])  # fmt: skip


class Server:
    """A book, and tiers that do at once, or at the end, what they are asked to."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        world = CacheWorld(seed, slots=4)
        self.arena, self.book, self.now = world.arena, world.book, world.now
        self.jobs: list[Any] = []
        for client in ODD_CLIENTS:
            hello = Hello(
                version=PROTOCOL_VERSION, engine=str(client), rank=0, ranks=1, model=bytes(32),
                geometry=GEOMETRY,
            )  # fmt: skip
            assert not self.book.hello(client, hello).refusal
        self.verbs = {
            Lookup: self.book.lookup, OpenChunks: self.book.open, CloseChunks: self.book.close,
            Reserve: self.book.reserve, Commit: self.book.commit,
        }  # fmt: skip

    def hear(self, client: int, message: Any) -> None:
        self.jobs += self.verbs[type(message)](client, message, self.now)

    def answer(self) -> None:
        """A tier does its next job."""
        job = self.jobs.pop(0)
        match job:
            case AskTier():
                self.jobs += self.book.asked(job.ask_id, 0, 0.01, self.now)
            case ReadChunk():
                chunk = Chunk(job.offset, GEOMETRY, 1, bytes(8))
                found = chunk if self.chance.random() < 0.5 else None
                self.jobs += self.book.was_read(job.tier, job.key, found, 0.01, self.now)
            case WriteChunk():
                self.jobs += self.book.was_written(job.tier, job.key, "written", self.now)

    def tick(self) -> None:
        self.now += 0.7
        self.jobs += self.book.tick(self.now)


@pytest.mark.parametrize("seed", range(60))
def test_anything_may_be_said(seed: int) -> None:
    """Only ``ValueError`` comes of it, for which a client is cut off; nothing is left of it when it
    is gone.
    """
    server = Server(seed)
    chance, refused = server.chance, 0
    for _ in range(300):
        try:
            server.hear(chance.choice(ODD_CLIENTS), said(chance))
        except ValueError:
            refused += 1
        if server.jobs and chance.random() < 0.6:
            server.answer()
        if chance.random() < 0.1:
            server.tick()
    assert refused > 10
    for client in ODD_CLIENTS:
        server.jobs += server.book.client_gone(client, server.now)
    while server.jobs:
        server.answer()
    for _ in range(30):
        server.tick()
    book = server.book
    assert (book.saves.open_reservations, book.loads.open_loads) == (0, 0)
    assert not book.arena.is_busy
    assert server.arena.slots - len(server.arena.free) == len(book.arena.index)

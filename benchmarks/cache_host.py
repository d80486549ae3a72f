"""What the cache costs on one host, beside plain copies and vLLM's own hashing.

1. *copies*: chunks of the real model (SmolLM2-135M in float32, chunks of 256 tokens, blocks of 128)
   between an engine's scattered pages and the arena, checksums included, beside one ``memmove`` per
   page of the same bytes in the same process. Bar: 0.8.
2. *look-up*: 1,000 chunks that are there, from the scheduler's hook to its answer, the message to
   the server process and back included. Bar: 250 microseconds.
3. *hashing*: keys of a prompt's chunks, beside vLLM's block hashes of the same prompt at as many
   tokens per key, on one core. Bar: 3 times.

Bytes are compared, and keys counted, before anything is timed. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from harness import report
from harness.stats import aa_ratio_spread, summarise

from splitserve.kv_transfer.cache import packets
from splitserve.kv_transfer.cache.arena import Arena
from splitserve.kv_transfer.cache.geometry import ChunkGeometry
from splitserve.kv_transfer.cache.keys import NO_TENANT, chunk_keys, compile_keys, root_key
from splitserve.kv_transfer.cache.lookup_client import LookupClient
from splitserve.kv_transfer.cache.messages import (
    PROTOCOL_VERSION,
    Commit,
    FromServer,
    Hello,
    ReadyChunk,
    Reserve,
    Reserved,
)
from splitserve.kv_transfer.cache.page_copier import PageCopier
from splitserve.kv_transfer.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Callable

COPY_RATIO_LEAST = 0.8
LOOKUP_LIMIT_US = 250.0
HASH_RATIO_LEAST = 3.0
LOOKUP_CHUNKS = 1_000
LAYERS, HEADS, DIM, ITEM = 30, 3, 64, 4
BLOCK_TOKENS, CHUNK_TOKENS, CHUNKS = 128, 256, 8
HASHED_TOKENS = 32_768
TOKENS_PER_KEY = (16, 64, 128, 256, 512)
MODEL = bytes(32)
DEADLINE_S = 30.0


def real_geometry() -> ChunkGeometry:
    """Chunks of SmolLM2-135M in float32."""
    return ChunkGeometry(
        LAYERS, CHUNK_TOKENS, BLOCK_TOKENS, HEADS, DIM * ITEM, DIM * ITEM, ITEM, "vec"
    )


class Pages:
    """An engine's KV memory with random content."""

    def __init__(self, geometry: ChunkGeometry, blocks: int) -> None:
        page = geometry.heads * geometry.slice_bytes
        layer = blocks * page
        self._map = mmap.mmap(-1, geometry.layers * layer)
        self.bytes = np.frombuffer(self._map, np.uint8).reshape(geometry.layers, blocks, page)
        self.bytes[:] = np.random.default_rng(0).integers(0, 256, (1, blocks, page), np.uint8)
        address = self.bytes.ctypes.data
        self.layout = PageLayout(
            layer_bases=tuple(address + number * layer for number in range(geometry.layers)),
            block_stride=page,
            page_bytes=page,
            num_blocks=blocks,
            block_tokens=geometry.block_tokens,
            heads=geometry.heads,
            first_head=0,
            total_heads=geometry.heads,
        )


def copies(rounds: int) -> dict[str, Any]:
    """Save and load of ``CHUNKS`` chunks, beside ``memmove`` of as many other pages: nobody finds
    in the processor's cache what the other one has left there.
    """
    geometry = real_geometry()
    blocks = CHUNKS * geometry.blocks
    pages = Pages(geometry, 4 * blocks + 1)
    ours, theirs = touched_arena(geometry), touched_arena(geometry)
    offsets = [slot for _ in range(CHUNKS) if (slot := ours.take()) is not None]
    copier = PageCopier(pages.layout, geometry)
    rng = random.Random(1)
    times: dict[str, list[float]] = {"save": [], "load": [], "memmove in": [], "memmove out": []}
    for turn in range(rounds + 1):
        ids = list(range(1, pages.layout.num_blocks))
        rng.shuffle(ids)
        parts = [ids[number * blocks : (number + 1) * blocks] for number in range(4)]
        sums: list[bytes] = []
        ways: list[tuple[str, Callable[[], None]]] = [
            ("save", lambda p=parts, s=sums: save(copier, ours, offsets, p[0], s)),
            ("memmove in", lambda p=parts: plain(pages, theirs, p[1], to_arena=True)),
            ("load", lambda p=parts, s=sums: load(copier, ours, offsets, p[2], s)),
            ("memmove out", lambda p=parts: plain(pages, theirs, p[3], to_arena=False)),
        ]
        if turn % 2:
            ways = [ways[1], ways[0], ways[3], ways[2]]
        for name, way in ways:
            began = time.perf_counter()
            way()
            took = time.perf_counter() - began
            if turn:  # The first round touches what nobody has touched.
                times[name].append(CHUNKS * geometry.chunk_bytes / took / 1e9)
        assert np.array_equal(pages.bytes[:, parts[0]], pages.bytes[:, parts[2]]), "other bytes"
    ours.close()
    theirs.close()
    return {
        name: comparison(times[name], times[peer])
        for name, peer in (("save", "memmove in"), ("load", "memmove out"))
    }


def touched_arena(geometry: ChunkGeometry) -> Arena:
    """Room for ``CHUNKS`` chunks, in memory that is there."""
    arena = Arena(CHUNKS * geometry.chunk_bytes + (1 << 20))
    arena.cut(geometry.chunk_bytes)
    arena.start()
    until = time.monotonic() + DEADLINE_S
    while arena.touched_bytes < arena.size_bytes:
        assert time.monotonic() < until, "the arena's memory does not come"
    return arena


def save(
    copier: PageCopier, arena: Arena, offsets: list[int], ids: list[int], sums: list[bytes]
) -> None:
    """Chunks from the pages ``ids``; their checksums are appended to ``sums``."""
    count = copier.geometry.blocks
    for number, offset in enumerate(offsets):
        chunk = ids[number * count : (number + 1) * count]
        parts = [copier.save_layer(arena.memory, offset, layer, chunk) for layer in range(LAYERS)]
        sums.append(b"".join(parts))


def load(
    copier: PageCopier, arena: Arena, offsets: list[int], ids: list[int], sums: list[bytes]
) -> None:
    """Chunks into the pages ``ids``."""
    count = copier.geometry.blocks
    for number, offset in enumerate(offsets):
        ready = ReadyChunk(number, offset, copier.geometry, 1, sums[number])
        assert copier.load(arena.memory, ready, 0, ids[number * count : (number + 1) * count])


def plain(pages: Pages, arena: Arena, ids: list[int], *, to_arena: bool) -> None:
    """One ``memmove`` per page between the pages ``ids`` and as many bytes of the arena."""
    page = pages.layout.page_bytes
    at = arena.memory.address
    for base in pages.layout.layer_bases:
        for block in ids:
            one = base + block * page
            target, source = (at, one) if to_arena else (one, at)
            ctypes.memmove(target, source, page)
            at += page


def comparison(ours: list[float], peer: list[float]) -> dict[str, Any]:
    """GB/s of both, and their ratio round by round."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    return {
        "gb_per_s": summarise(ours).as_dict(),
        "memmove_gb_per_s": summarise(peer).as_dict(),
        "ratio": summarise(ratios).as_dict(),
        "aa_spread": round(aa_ratio_spread(peer[0::2][: len(peer) // 2], peer[1::2]), 3),
        "limit": COPY_RATIO_LEAST,
        "met": median(ratios) >= COPY_RATIO_LEAST,
    }


class Server:
    """A cache server process with small chunks."""

    def __init__(self, folder: Path) -> None:
        self.geometry = ChunkGeometry(1, 32, 32, 1, 2, 2, 1, "rows")
        self.path = str(folder / "cache.sock")
        settings = {
            "socket_path": self.path,
            "chunk_tokens": self.geometry.chunk_tokens,
            "tiers": [{"type": "cpu", "capacity_bytes": 64 << 20}],
        }
        (folder / "cache.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "splitserve.kv_transfer.cache", str(folder / "cache.json")]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until = time.monotonic() + DEADLINE_S
        while not Path(self.path).exists():
            assert time.monotonic() < until, "the cache server does not start"
            time.sleep(0.05)

    def fill(self, keys: list[bytes]) -> None:
        """The server has these chunks."""
        import msgspec

        connection = packets.connect(self.path)
        connection.settimeout(DEADLINE_S)
        hello = Hello(
            version=PROTOCOL_VERSION, engine="bench", rank=0, ranks=1, model=MODEL,
            geometry=self.geometry,
        )  # fmt: skip
        packets.send(connection, hello)
        _, descriptor = packets.receive_with_descriptor(connection)
        assert descriptor is not None
        os.close(descriptor)
        until = time.monotonic() + DEADLINE_S
        left = list(keys)
        while left:
            assert time.monotonic() < until, "the cache server has no room"
            packets.send(connection, Reserve(save_id=len(left), parent=b"", keys=b"".join(left)))
            answer = msgspec.msgpack.decode(connection.recv(1 << 20), type=FromServer)
            assert isinstance(answer, Reserved)
            given = [n for n, offset in enumerate(answer.offsets) if offset >= 0]
            if given:
                written = tuple((n, bytes(8)) for n in given)
                packets.send(connection, Commit(save_id=len(left), written=written))
            left = [key for key, offset in zip(left, answer.offsets, strict=True) if offset == -2]
        self._filler = connection

    def stop(self) -> None:
        """The process has ended."""
        self._filler.close()
        self._process.terminate()
        self._process.wait(DEADLINE_S)


def lookups(rounds: int, times_each: int) -> dict[str, Any]:
    """Microseconds of look-ups of ``LOOKUP_CHUNKS`` chunks."""
    tokens = [random.Random(2).randrange(50_000) for _ in range(LOOKUP_CHUNKS * 32)]
    keys = chunk_keys(root_key(MODEL, NO_TENANT, "", ""), tokens, 32)
    assert len(keys) == LOOKUP_CHUNKS
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            server.fill(keys)
            client = LookupClient(server.path, "bench", 1, MODEL, server.geometry, limit_s=5.0)
            look_up(client, keys)  # Connects.
            per_round = []
            for _ in range(rounds):
                took = [look_up(client, keys) for _ in range(times_each)]
                per_round.append(median(took) * 1e6)
            client.close()
        finally:
            server.stop()
    return {
        "chunks": LOOKUP_CHUNKS,
        "us": summarise(per_round).as_dict(),
        "limit": LOOKUP_LIMIT_US,
        "met": median(per_round) <= LOOKUP_LIMIT_US,
    }


def look_up(client: LookupClient, keys: list[bytes]) -> float:
    """Seconds of one look-up, from the question to the answer in the scheduler's hands."""
    began = time.perf_counter()
    number = client.ask(keys)
    assert number is not None
    found = client.answer(number, 5.0)
    took = time.perf_counter() - began
    assert found is not None
    assert len(found.tiers) == len(keys), f"{len(found.tiers)} chunks found"
    return took


def hashing(rounds: int) -> list[dict[str, Any]]:
    """Millions of tokens per second of ours and of vLLM's block hasher."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    compile_keys()  # As an engine does when it starts.
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    rng = random.Random(3)
    tokens = [rng.randrange(49_152) for _ in range(HASHED_TOKENS)]
    root = root_key(MODEL, NO_TENANT, "", "")
    rows = []
    for size in TOKENS_PER_KEY:
        hasher = get_request_block_hasher(size, hash_function)
        request = Request(
            request_id="bench", prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1), pooling_params=None,
        )  # fmt: skip
        times: dict[str, list[float]] = {"ours": [], "vllm": []}
        for _ in range(rounds):
            for name, work in (
                ("ours", lambda s=size: chunk_keys(root, tokens, s)),
                ("vllm", lambda h=hasher, r=request: vllm_hashes(h, r)),
            ):
                best = min(timed(work, HASHED_TOKENS // size) for _ in range(5))
                times[name].append(HASHED_TOKENS / best / 1e6)
        ratios = [a / b for a, b in zip(times["ours"], times["vllm"], strict=True)]
        rows.append({
            "tokens_per_key": size,
            "mtokens_per_s": summarise(times["ours"]).as_dict(),
            "vllm_mtokens_per_s": summarise(times["vllm"]).as_dict(),
            "ratio": summarise(ratios).as_dict(),
            "limit": HASH_RATIO_LEAST,
            "met": median(ratios) >= HASH_RATIO_LEAST,
        })  # fmt: skip
    return rows


def vllm_hashes(hasher: Callable[[Any], list[Any]], request: Any) -> list[Any]:
    """All block hashes of the request, made anew."""
    request.block_hashes = []
    return hasher(request)


def timed(work: Callable[[], list[Any]], keys: int) -> float:
    """Seconds; the work makes so many keys."""
    began = time.perf_counter()
    made = work()
    took = time.perf_counter() - began
    assert len(made) == keys
    return took


def main() -> None:
    """Run all three and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", default="cache_host", help="name in benchmarks/results/")
    shape = parser.parse_args()
    found = {
        "copies": copies(shape.rounds),
        "lookup": lookups(shape.rounds, 200),
        "hashing": hashing(shape.rounds),
    }
    sections = [
        report.table(
            ("copy", "GB/s", "memmove GB/s", "ratio", "bar"),
            [
                (name, f"{row['gb_per_s']['median']:.2f}",
                 f"{row['memmove_gb_per_s']['median']:.2f}",
                 f"{row['ratio']['median']:.2f}", f"{row['limit']}")
                for name, row in found["copies"].items()
            ],
        ),
        f"Look-up of {LOOKUP_CHUNKS} chunks: {found['lookup']['us']['median']:.0f} "
        f"[{found['lookup']['us']['low']:.0f} to {found['lookup']['us']['high']:.0f}] us "
        f"(bar {LOOKUP_LIMIT_US:.0f})",
        report.table(
            ("tokens per key", "Mtok/s", "vLLM Mtok/s", "ratio", "bar"),
            [
                (str(row["tokens_per_key"]), f"{row['mtokens_per_s']['median']:.1f}",
                 f"{row['vllm_mtokens_per_s']['median']:.1f}",
                 f"{row['ratio']['median']:.2f}", f"{row['limit']}")
                for row in found["hashing"]
            ],
        ),
    ]  # fmt: skip
    print("\n\n".join(sections))
    report.write(shape.output, "The cache's costs on one host", found, sections)


if __name__ == "__main__":
    main()

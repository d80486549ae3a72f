"""What do the cache's codecs cost and bring, with the KV of a real model?

- *quality*: predictions behind cached chunks with and without each codec, on a text that none was
  made with; and two controls with a fault, which have to look bad.
- *speed*: coding, and loading coded chunks into pages (checksums and all), beside one plain copy of
  as many bytes and beside loading chunks as they are; in processor time of one thread, which other
  work on the machine disturbs least.
- *link*: chunks in a Redis behind a link of 1 Gbit/s, loaded into pages by the cache's own server
  and thread: time until all are there, beside chunks as they are. Needs root, `ip` and `tc`.
- *memory*: chunks in the arena, `codec: auto` beside `raw`; processor time of the engine's process.

Contestants take turns in every round, ratios are within a round, and before anything is timed each
has proven what its pages hold.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from harness import report
from harness.coded_cache import CacheUnderTest, Pages, real_chunks, slots_with
from harness.link import LinkError, ShapedLink
from harness.options import model_folder
from harness.stats import summarise
from harness.store_servers import redis_behind

from splitserve.kv_transfer.cache.chunk_coding import encode_chunk
from splitserve.kv_transfer.cache.codecs.names import CODED, LOSSLESS
from splitserve.kv_transfer.cache.page_copier import Copied, PageCopier
from splitserve.kv_transfer.cache.settings import TierSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.coded_cache import RealChunks

TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "prose.txt"
NAME = "codecs"
PARTS = ("quality", "speed", "link", "memory")
LIMITS = {
    "int8": {"kl": 5e-4, "ratio": 1.95},
    "int5z": {"kl": 5e-3, "ratio": 3.2},
    "bf16z": {"kl": 0.0, "ratio": 1.0},
}
LINK_SHARE_LIMIT = 0.45
MEMORY_SHARE_LIMIT = 1.03
LINK = "1gbit"


def quality(folder: Path, tokens: int) -> dict[str, Any]:
    """KL divergence and top-1 agreement of each codec and of the controls."""
    from splitserve.orchestrator.engines.transformers.controls import controls
    from splitserve.orchestrator.engines.transformers.quality import (
        KvKind,
        QualityMeter,
        codec_coder,
    )

    meter = QualityMeter(str(folder), KvKind(256, "bfloat16"))
    coders = {name: codec_coder(name) for name in CODED} | controls(meter.rope_theta)
    rows = []
    for found in meter.measure(TEXT.read_text(), coders, tokens=tokens):
        limit = LIMITS.get(found.codec)
        if limit is None:
            met = found.kl > LIMITS["int5z"]["kl"]
        else:
            met = found.kl <= limit["kl"] and found.ratio >= limit["ratio"]
        row = {
            "codec": found.codec, "kl": found.kl, "kl_p99": found.kl_p99, "top1": found.top1,
            "ratio": found.ratio, "tokens": found.tokens, "limit": limit, "met": met,
        }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    return {"rows": rows}


def speed(chunks: RealChunks, rounds: int) -> dict[str, Any]:
    """GB of KV, as it lies in pages, per second of processor time; shares are of a plain copy in
    the same round.
    """
    pages = Pages(chunks.geometry, chunks.count)
    copier = PageCopier(pages.layout, chunks.geometry)
    copier.coded.warm_up()
    arena, ready = slots_with(chunks)
    total = chunks.count * chunks.geometry.chunk_bytes
    source = np.random.default_rng(0).integers(0, 256, total, np.uint8)
    target = np.empty_like(source)

    def load(name: str) -> None:
        for number, chunk in enumerate(ready[name]):
            assert copier.load(arena.memory, chunk, 0, pages.ids(number)) is Copied.WHOLE

    def code(name: str) -> None:
        for chunk, body in zip(chunks.chunks, chunks.bodies, strict=True):
            assert encode_chunk(name, chunk, body, begins_prompt=False) is not None  # type: ignore[arg-type]

    for name in ready:
        load(name)
        chunks.check(pages, name)
    ways: dict[str, Callable[[], None]] = {"copy": lambda: np.copyto(target, source)}
    ways |= {f"load {name}": lambda name=name: load(name) for name in ready}  # type: ignore[misc]
    ways |= {f"code {name}": lambda name=name: code(name) for name in CODED}  # type: ignore[misc]
    took = _rounds(ways, rounds)
    arena.close()
    rows = []
    for name, seconds in took.items():
        shares = [c / s for c, s in zip(took["copy"], seconds, strict=True)]
        rows.append(
            {
                "what": name,
                "gb_per_s": summarise([total / s / 1e9 for s in seconds]).as_dict(),
                "share_of_copy": summarise(shares).as_dict(),
            }
        )
        print(rows[-1], flush=True)
    return {"chunks": chunks.count, "bytes": total, "rows": rows}


def link(chunks: RealChunks, rounds: int, rate: str) -> dict[str, Any]:
    """Seconds until every chunk is in its pages, from a store behind a shaped link."""
    names = ("raw", *CODED)
    with (
        ShapedLink(rate=rate) as shaped,
        redis_behind(shaped.prefill.wrap, shaped.prefill.data_address) as port,
        tempfile.TemporaryDirectory() as folder,
    ):
        url = f"redis://{shaped.prefill.data_address}:{port}"
        caches = {
            name: CacheUnderTest(
                Path(folder) / name,
                chunks,
                TierSettings(
                    type="redis",
                    url=url,
                    codec=name,  # type: ignore[arg-type]
                    options={"prefix": f"{name}:", "timeout_s": "60"},
                ),
                wrap=shaped.decode.wrap,
            )
            for name in names
        }
        try:
            for cache in caches.values():
                cache.fill()
            seconds = {name: [] for name in names}  # type: dict[str, list[float]]
            for number in range(rounds + 1):
                order = names[number % len(names) :] + names[: number % len(names)]
                for name in order:
                    caches[name].forget_arena()
                    took = caches[name].load()
                    if number:  # The first round has connected.
                        seconds[name].append(took)
                        continue
                    chunks.check(caches[name].pages, name)
        finally:
            for cache in caches.values():
                cache.stop()
    return _beside(seconds, chunks, {"int5z": LINK_SHARE_LIMIT}) | {"rate": rate}


def memory(chunks: RealChunks, rounds: int) -> dict[str, Any]:
    """Seconds of processor time until every chunk is in its pages, from the arena."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            name: CacheUnderTest(Path(folder) / name, chunks, None, cpu_codec=name)
            for name in ("raw", "auto")
        }
        try:
            for cache in caches.values():
                cache.fill()
                cache.load()
            for cache in caches.values():
                chunks.check(cache.pages, "raw")
            seconds = _rounds({name: cache.load for name, cache in caches.items()}, rounds)
        finally:
            for cache in caches.values():
                cache.stop()
    return _beside(seconds, chunks, {"auto": MEMORY_SHARE_LIMIT})


def _beside(
    seconds: dict[str, list[float]], chunks: RealChunks, limits: dict[str, float]
) -> dict[str, Any]:
    """Each contestant's times, and their shares of the raw ones."""
    rows = []
    for name, took in seconds.items():
        shares = [one / raw for one, raw in zip(took, seconds["raw"], strict=True)]
        row = {
            "codec": name,
            "seconds": summarise(took).as_dict(),
            "share_of_raw": summarise(shares).as_dict(),
            "limit": limits.get(name),
        }
        row["met"] = None if name not in limits else summarise(shares).median <= limits[name]
        rows.append(row)
        print(row, flush=True)
    total = chunks.count * chunks.geometry.chunk_bytes
    return {"chunks": chunks.count, "bytes": total, "rows": rows}


def _rounds(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    def timed(way: Callable[[], object]) -> float:
        began = time.process_time()
        way()
        return time.process_time() - began

    return _rounds_of({name: lambda way=way: timed(way) for name, way in ways.items()}, rounds)  # type: ignore[misc]


def _rounds_of(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each way took in every round; the first, which is not counted, touches memory."""
    names = list(ways)
    took: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found = ways[name]()
            if number:
                took[name].append(found)
    return took


def tables(parts: dict[str, Any]) -> list[str]:
    """The report."""
    found = []
    if "quality" in parts:
        rows = [
            [
                row["codec"], f"{row['kl']:.2g}", f"{row['kl_p99']:.2g}", f"{row['top1']:.1%}",
                f"{row['ratio']:.2f}", "yes" if row["met"] else "**no**",
            ]
            for row in parts["quality"]["rows"]
        ]  # fmt: skip
        head = ["codec", "KL per token", "99 % below", "same likeliest", "times fewer bytes", "met"]
        found += [f"## Quality\n\n{_about(parts['quality'])}", report.table(head, rows)]
    if "speed" in parts:
        rows = [
            [row["what"], _spread(row["gb_per_s"]), _spread(row["share_of_copy"])]
            for row in parts["speed"]["rows"]
        ]
        head = ["what", "GB of KV per s of processor time", "share of a plain copy"]
        found += [f"## Speed\n\n{_about(parts['speed'])}", report.table(head, rows)]
    for name, title in (("link", "Link of 1 Gbit/s"), ("memory", "Memory")):
        if name not in parts:
            continue
        rows = [
            [
                row["codec"], _spread(row["seconds"], 3), _spread(row["share_of_raw"], 3),
                "" if row["limit"] is None else f"{row['limit']:g}",
                {None: "", True: "yes", False: "**no**"}[row["met"]],
            ]
            for row in parts[name]["rows"]
        ]  # fmt: skip
        head = ["codec", "seconds", "share of raw", "limit", "met"]
        found += [f"## {title}\n\n{_about(parts[name])}", report.table(head, rows)]
    return found


def _about(part: dict[str, Any]) -> str:
    size = f"{part['chunks']} chunks, {part['bytes'] / 1e6:.1f} MB; " if "chunks" in part else ""
    return (
        f"{size}written {part['written']}, load average {part['load_before']:.1f} before and "
        f"{part['load_after']:.1f} after."
    )


def _spread(summary: dict[str, float], digits: int = 2) -> str:
    low, high = summary["low"], summary["high"]
    return f"{summary['median']:.{digits}f} [{low:.{digits}f} to {high:.{digits}f}]"


def main() -> None:
    """Measure the parts asked for; the others keep what an earlier run has found."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--model", default="smollm2-135m", help="prepared model name or folder")
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--tokens", type=int, default=4096, help="of the text, for quality")
    options.add_argument("--chunks", type=int, default=6, help="for speed, link and memory")
    options.add_argument("--kept", type=Path, help="a .npy file that keeps the KV between runs")
    options.add_argument("--rate", default=LINK)
    options.add_argument("--name", default=NAME)
    chosen = options.parse_args()
    path = report.RESULTS / f"{chosen.name}.json"
    parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    folder = model_folder(chosen.model)
    asked = chosen.parts.split(",")
    chunks = None
    if set(asked) - {"quality"}:
        chunks = real_chunks(folder, TEXT, chosen.chunks, chosen.kept)
    for part in asked:
        before = round(os.getloadavg()[0], 1)
        if part == "quality":
            found = quality(folder, chosen.tokens)
        else:
            assert chunks is not None
            try:
                found = (
                    link(chunks, chosen.rounds, chosen.rate)
                    if part == "link"
                    else {"speed": speed, "memory": memory}[part](chunks, chosen.rounds)
                )
            except LinkError as error:
                print(f"no link: {error}", flush=True)
                continue
        found["written"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        found["load_before"], found["load_after"] = before, round(os.getloadavg()[0], 1)
        found["rounds"] = chosen.rounds
        parts[part] = found
        ordered = {name: parts[name] for name in PARTS if name in parts}
        lossless = ", ".join(LOSSLESS)
        payload = {"model": chosen.model, "lossless": lossless, "parts": ordered}
        print(report.write(chosen.name, "Codecs of the cache", payload, tables(ordered)))


if __name__ == "__main__":
    main()

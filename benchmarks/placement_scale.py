"""How long does the router's core take to place a request among 1,000 nodes?

A prompt of 1,000 blocks arrives at the real core, and the CPU time until the orders for both legs
are there is taken (the router is one process: others on the core take turns, not part of a choice).
Between two arrivals a node reports, as nodes do, and an older request ends. Each row is a state of
the cluster, of which half prefills:

* *nobody has it*: the least busy nodes are looked for;
* *few have it*: three nodes of each pool have most of the prompt;
* *all have its beginning*: every node has the system prompt, a tenth of them more, in parts of
  different lengths;
* *host caches have it*: the same, and hosts of eight nodes share a cache;
* *full*: no decode node has room: the request waits, and what is timed is finding that out.

The peer is the plain search that looks at every node (``choose_decode``, ``choose_prefill``), in
the same core and the same states: both must choose the same nodes, request by request.

    python benchmarks/placement_scale.py
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from harness import report
from harness.stats import summarise

from splitserve.orchestrator.agent.messages import NodeDescription, NodeState
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core import pool
from splitserve.orchestrator.core.effects import EndRequest, StartPair
from splitserve.orchestrator.core.expected_hits import cache_source
from splitserve.orchestrator.core.limits import CoreLimits
from splitserve.orchestrator.core.placement import PlacementLimits
from splitserve.orchestrator.core.router_core import RouterCore
from splitserve.orchestrator.router.run import GC_THRESHOLD_OBJECTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.orchestrator.core.effects import Effect

NODES = 1_000
BLOCK_TOKENS, BLOCKS = 16, 5_000
PROMPT_BLOCKS = 1_000
PROMPT_BYTES = 4 * BLOCK_TOKENS * PROMPT_BLOCKS
MARKS = 40
"""A prompt of that many bytes has so many (``kv_transfer/prefix_marks.py``)."""
HOST_NODES = 8
SYSTEM_MARKS = 16
FEW = 3
OUT = 200
"""Requests that are out while one is placed."""
MEDIAN_BAR_US, P99_BAR_US = 250.0, 1_000.0


class WrongChoiceError(Exception):
    """The core has not chosen what the plain search chooses."""


@dataclass(frozen=True)
class Row:
    """One state of the cluster."""

    name: str
    prepare: Callable[[RouterCore, Random], None]
    is_full: bool = False
    uses_cache: bool = False


def mark(number: int) -> bytes:
    """Of the one prompt that everybody asks."""
    return number.to_bytes(8, "big")


PROMPT_MARKS = tuple(mark(number) for number in range(MARKS))


def description(role: str, number: int, *, uses_cache: bool) -> NodeDescription:
    """Half of a host's nodes prefill."""
    name = f"{role}-{number}"
    return NodeDescription(
        node=name,
        pool=role,
        incarnation=f"{name}-1",
        engine_url=f"http://127.0.0.1:1/{name}",
        engine_api_key="k",
        control_addresses=(f"tcp://{name}",),
        model="m",
        max_model_len=131_072,
        block_tokens=BLOCK_TOKENS,
        total_blocks=BLOCKS,
        tensor_parallel=1,
        transport="tcp",
        fingerprint={"weights": "w"},
        host=f"host-{number // (HOST_NODES // 2)}",
        uses_cache=uses_cache,
        reports_prefixes=True,
    )


def cluster(row: Row, random: Random) -> RouterCore:
    """A core whose nodes all have reported, in the row's state."""
    core = RouterCore(CoreLimits(placement=PlacementLimits(prefill_ahead_requests=8)))
    for role in ("prefill", "decode"):
        for number in range(NODES // 2):
            node = description(role, number, uses_cache=row.uses_cache)
            core.handle(ev.NodeJoined(node, role), 0.0)
            core.handle(report_of(node), 0.0)
    row.prepare(core, random)
    if row.is_full:
        fill(core)
    return core


def report_of(node: NodeDescription) -> ev.NodeReported:
    """What its agent says: all blocks are free, as far as its engine knows."""
    return ev.NodeReported(
        NodeState(
            node=node.node,
            incarnation=node.incarnation,
            phase="ready",
            free_blocks=BLOCKS,
            total_blocks=BLOCKS,
        )
    )


def fill(core: RouterCore) -> None:
    """As many requests come as the decode nodes have room for, and one more, which waits."""
    number = 0
    while not core.queue.size:
        number += 1
        core.handle(arrival(-number), 0.0)
        if not core.queue.size:
            core.handle(ev.PrefillAnswered(f"r{-number}", 1, 200), 0.0)
    core.handle(ev.ClientGone(f"r{-number}"), 0.0)


def held(core: RouterCore, node: str, marks: int) -> None:
    added = tuple((mark(n), 100 * n) for n in range(marks))
    core.handle(ev.NodePrefixesReported(node, f"{node}-1", False, added, ()), 0.0)


def nobody(core: RouterCore, random: Random) -> None:
    """No node has anything."""


def few(core: RouterCore, random: Random) -> None:
    for role in ("prefill", "decode"):
        for number in random.sample(range(NODES // 2), FEW):
            held(core, f"{role}-{number}", MARKS - 2)


def all_nodes(core: RouterCore, random: Random) -> None:
    for node in list(core.membership.nodes):
        more = random.randrange(MARKS - SYSTEM_MARKS) if random.random() < 0.1 else 0
        held(core, node, SYSTEM_MARKS + more)


def host_caches(core: RouterCore, random: Random) -> None:
    all_nodes(core, random)
    for host in {node.description.host for node in core.membership.nodes.values()}:
        count = random.randint(SYSTEM_MARKS, MARKS - 1)
        added = tuple((mark(n), 100 * n) for n in range(count))
        core.handle(ev.CachePrefixesReported(host, True, added, ()), 0.0)
        assert core.prefixes.size_of(cache_source(host)) == count


ROWS = (
    Row("nobody has it", nobody),
    Row("few have it", few),
    Row("all have its beginning", all_nodes),
    Row("host caches have it", host_caches, uses_cache=True),
    Row("full", all_nodes, is_full=True),
)


def arrival(number: int) -> ev.RequestArrived:
    return ev.RequestArrived(
        request_id=f"r{number}",
        endpoint="completions",
        prompt_tokens=PROMPT_BLOCKS * BLOCK_TOKENS,
        output_tokens=256,
        streaming=True,
        alone_because="",
        marks=PROMPT_MARKS,
        prompt_bytes=PROMPT_BYTES,
    )


def run(row: Row, requests: int, seed: int) -> tuple[list[float], list[tuple[str, str]]]:
    """(microseconds of each decision, the nodes chosen) for the row's requests."""
    random = Random(seed)
    core = cluster(row, random)
    nodes = list(core.membership.nodes.values())
    times: list[float] = []
    chosen: list[tuple[str, str]] = []
    for number in range(requests):
        core.handle(report_of(random.choice(nodes).description), 0.0)
        event = arrival(number)
        begun = time.thread_time()
        effects = core.handle(event, 0.0)
        times.append((time.thread_time() - begun) * 1e6)
        chosen.append(pair_of(effects))
        if row.is_full:
            core.handle(ev.ClientGone(event.request_id), 0.0)
        elif number >= OUT:
            end(core, f"r{number - OUT}")
    return times, chosen


def pair_of(effects: list[Effect]) -> tuple[str, str]:
    """The nodes of the request that starts; nothing when it waits."""
    for effect in effects:
        if isinstance(effect, StartPair):
            return effect.prefill.node, effect.decode.node
    return "", ""


def end(core: RouterCore, request_id: str) -> None:
    core.handle(ev.PrefillAnswered(request_id, 1, 200), 0.0)
    core.handle(ev.FirstDataArrived(request_id, 1), 0.0)
    effects = core.handle(ev.DecodeEnded(request_id, 1), 0.0)
    assert any(isinstance(effect, EndRequest) for effect in effects)


def plain(row: Row, requests: int, seed: int) -> tuple[list[float], list[tuple[str, str]]]:
    """``run`` with the search that looks at every node."""
    small, pool.SMALL_POOL_NODES = pool.SMALL_POOL_NODES, NODES
    try:
        return run(row, requests, seed)
    finally:
        pool.SMALL_POOL_NODES = small


def measure(row: Row, requests: int, rounds: int) -> dict[str, Any]:
    """Both ways, interleaved. Raises ``WrongChoiceError`` when they choose differently."""
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        times, chosen = run(row, requests, number)
        peer_times, peer_chosen = plain(row, requests, number)
        if chosen != peer_chosen:
            at = next(n for n, pair in enumerate(chosen) if pair != peer_chosen[n])
            raise WrongChoiceError(
                f"{row.name}, round {number}, request {at}: {chosen[at]}, not {peer_chosen[at]}"
            )
        ours += times[OUT:]
        theirs += peer_times[OUT:]
    result = {"us": figures(ours), "plain_us": figures(theirs)}
    result["ratio"] = round(result["plain_us"]["median"] / result["us"]["median"], 1)
    result["is_within_bars"] = (
        result["us"]["median"] <= MEDIAN_BAR_US and result["us"]["p99"] <= P99_BAR_US
    )
    return result


def figures(times: list[float]) -> dict[str, float]:
    """Median, spread and the slowest hundredth."""
    ordered = sorted(times)
    middle = summarise(times).as_dict()
    return middle | {"p99": round(ordered[int(len(ordered) * 0.99)], 1)}


def main() -> int:
    """Measure, write the report; 1 when a bar is missed."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--requests", type=int, default=1_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--name", default="placement-scale")
    chosen = options.parse_args()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD_OBJECTS, 20, 50)
    rows = {row.name: measure(row, chosen.requests, chosen.rounds) for row in ROWS}
    payload = {
        "nodes": NODES,
        "prompt_blocks": PROMPT_BLOCKS,
        "rounds": chosen.rounds,
        "decisions_per_row": chosen.rounds * (chosen.requests - OUT),
        "bars_us": {"median": MEDIAN_BAR_US, "p99": P99_BAR_US},
        "rows": rows,
    }
    lines = [
        [
            name,
            f"{found['us']['median']:.0f}",
            f"{found['us']['p99']:.0f}",
            f"{found['plain_us']['median']:.0f}",
            f"{found['plain_us']['p99']:.0f}",
            f"{found['ratio']:.1f}",
            "yes" if found["is_within_bars"] else "no",
        ]
        for name, found in rows.items()
    ]
    header = ["state", "median us", "p99 us", "all nodes: median us", "p99 us", "ratio", "in bars"]
    text = report.table(header, lines)
    note = (
        f"{NODES} nodes, a prompt of {PROMPT_BLOCKS} blocks; bars: median {MEDIAN_BAR_US:.0f} us, "
        f"p99 {P99_BAR_US:.0f} us. CPU time. Every choice equals that of the search that looks at "
        "all nodes."
    )
    path = report.write(chosen.name, "A placement among 1,000 nodes", payload, [note, text])
    print(path.read_text())
    return 0 if all(found["is_within_bars"] for found in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

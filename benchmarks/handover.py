"""How long is the hand-over from P to D, and what does writing layer by layer hide?

Hand-over gap: from P's own HTTP answer to D's first streamed token. It is negative when D's first
step, which needs only the KV, overtakes P's last MLP, sampling and HTTP. Every system runs on the
same two cores with the same flags, one request at a time, prompts of distinct random ids;
order rotates per round; each (round, length) is measured twice with different prompts, which gives
the A/A spread. All systems' engines stay loaded; the report says what an idle engine costs.

1. *peers*: ``plain``, ``pull``, ``push`` (vLLM's NIXL connectors, tuned) and ``splitserve``, on one
   host and over a shaped link.
2. *overlap*: ``splitserve`` against ``whole``, the same connector sending everything after the last
   layer. With the tail being the time from P's last layer to "delivered": efficiency = (serial -
   seen) / (serial - ideal), where serial is the tail of ``whole``, seen that of ``splitserve``, and
   ideal one layer's share of serial.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from harness import options, report
from harness.client import new_session
from harness.engine import EnginePark
from harness.link import ShapedLink
from harness.rounds import Row, Setting, cells, check, idle_cost, measure, spread, summaries, values
from harness.stats import summarise
from harness.systems import make_system

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

LENGTHS = (128, 512, 1024, 2048)
OVERLAP_OUTPUT_TOKENS = 4


async def run_group(
    arguments: argparse.Namespace, group: str, link_name: str, names: list[str], logs: Path
) -> tuple[list[Row], dict[str, Any]]:
    """Start the systems, check them, measure them, stop them."""
    flags = options.engine_flags(arguments)
    place = options.placement(arguments)
    with contextlib.ExitStack() as stack:
        if link_name != "host":
            place = replace(place, link=stack.enter_context(ShapedLink(rate=link_name)))
        park = stack.enter_context(EnginePark(logs / f"{group}-{link_name}"))
        systems = [
            make_system(name, flags, place, park.log_folder, arguments.transport) for name in names
        ]
        async with new_session() as session:
            begun = time.monotonic()
            for system in systems:
                await system.start(park)
                print(f"{group} {link_name}: {system.name} ready", flush=True)
            tokens = OVERLAP_OUTPUT_TOKENS if group == "overlap" else arguments.output_tokens
            setting = Setting(group, link_name, systems, session, tokens)
            facts = {"started_in_s": round(time.monotonic() - begun, 1)}
            await check(setting, arguments.lengths)
            facts |= await idle_cost(systems) | {"memory_bytes": park.memory_bytes()}
            return await measure(setting, arguments.lengths, arguments.rounds), facts


def verdicts(rows: list[Row], own: str = "splitserve") -> list[dict[str, Any]]:
    """The bars, per link and length: below both peers; at or below zero from 1,024 tokens within
    the A/A spread.
    """
    grouped = cells(rows)
    out = []
    for (group, link, system, length), members in grouped.items():
        if group != "peers" or system != own:
            continue
        gap = summarise(values(members, "gap_s")).median
        noise = spread(members, "gap_s")
        peers = {
            name: summarise(values(grouped["peers", link, name, length], "gap_s")).median
            for name in ("pull", "push")
            if ("peers", link, name, length) in grouped
        }
        out.append(
            {
                "link": link,
                "length": length,
                "gap_ms": round(gap, 2),
                "aa_spread_ms": round(noise, 2),
                "peers_ms": {name: round(value, 2) for name, value in peers.items()},
                "below_peers": all(gap < value for value in peers.values()) if peers else None,
                "at_most_zero": gap <= noise if length >= 1024 else None,
            }
        )
    return out


def overlap(rows: list[Row], layers: int) -> list[dict[str, Any]]:
    """Overlap efficiency per link and length, and whether streaming was slower than whole."""
    grouped = cells(rows)
    out = []
    for (group, link, system, length), seen_rows in grouped.items():
        if group != "overlap" or system != "splitserve":
            continue
        whole_rows = grouped["overlap", link, "whole", length]
        tails = [values(found, "tail_s") for found in (seen_rows, whole_rows)]
        seen, serial = (summarise(found).median if found else float("nan") for found in tails)
        ideal = serial / layers
        gaps = [summarise(values(found, "gap_s")).median for found in (seen_rows, whole_rows)]
        noise = max(spread(seen_rows, "gap_s"), spread(whole_rows, "gap_s"))
        out.append(
            {
                "link": link,
                "length": length,
                "serial_ms": round(serial, 3),
                "seen_ms": round(seen, 3),
                "ideal_ms": round(ideal, 3),
                "efficiency": round((serial - seen) / (serial - ideal), 3),
                "gap_streamed_ms": round(gaps[0], 2),
                "gap_whole_ms": round(gaps[1], 2),
                "aa_spread_ms": round(noise, 2),
                "not_slower": gaps[0] <= gaps[1] + noise,
            }
        )
    return out


def sections(results: dict[str, Any]) -> list[str]:
    """The Markdown report."""
    parts = [
        f"{results['rounds']} rounds x 2, {results['output_tokens']} output tokens, one request at "
        f"a time, transport `{results['transport']}`. Peers tuned: NIXL progress delay 1 ms, "
        "threads pinned again after start. Milliseconds: median [lowest to highest]; A/A: spread "
        "between two measurements of the same system.",
        f"Idle cost in cores and memory: `{results['facts']}`.",
    ]
    for group, link in dict.fromkeys((e["group"], e["link"]) for e in results["summaries"]):
        members = [e for e in results["summaries"] if (e["group"], e["link"]) == (group, link)]
        lines = [
            [
                e["system"],
                f"{e['length']:,}",
                *(_text(e.get(f"{q}_ms")) for q in ("gap", "ttft", "itl", "prefill_leg")),
                f"{e['gap_ms']['aa_spread']:.0f}" if "gap_ms" in e else "",
                f"{e['equal']}/{e['count']}",
            ]
            for e in sorted(members, key=lambda e: (e["length"], e["system"]))
        ]
        header = ["system", "tokens", "gap", "TTFT", "ITL", "P leg", "gap A/A", "equal"]
        parts += [f"## {group}, link: {link}", report.table(header, lines)]
    for title, key in (("Bars", "verdicts"), ("Overlap", "overlap")):
        if found := results[key]:
            lines = [[str(value) for value in entry.values()] for entry in found]
            parts += [f"## {title}", report.table(list(found[0]), lines)]
    return parts


def _text(summary: dict[str, float] | None) -> str:
    if summary is None:
        return ""
    return f"{summary['median']:.0f} [{summary['low']:.0f} to {summary['high']:.0f}]"


async def main(arguments: argparse.Namespace) -> int:
    """Run every group on every link and write the report; 1 when an answer was wrong."""
    logs = options.log_folder(arguments)
    print(f"engine logs: {logs}", flush=True)
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    for link in arguments.links:
        plan = {"peers": arguments.systems, "overlap": arguments.overlap_systems}
        for group, systems in plan.items():
            if systems:
                found, about = await run_group(arguments, group, link, systems, logs)
                rows += found
                facts[f"{group} {link}"] = about
    layers = options.model_layers(options.model_folder(arguments.model))
    results = {
        "rounds": arguments.rounds,
        "output_tokens": arguments.output_tokens,
        "transport": arguments.transport,
        "facts": facts,
        "summaries": summaries(rows),
        "verdicts": verdicts(rows),
        "overlap": overlap(rows, layers),
        "rows": [asdict(row) for row in rows],
    }
    path = report.write(arguments.name or "handover", "Hand-over gap", results, sections(results))
    print(path.read_text())
    return 0 if all(row.equal for row in rows) else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = options.parser("Hand-over gap of splitserve and its peers", rounds=5)
    parser.add_argument("--systems", type=options.names, default="plain,pull,push,splitserve")
    parser.add_argument("--overlap-systems", type=options.names, default="plain,splitserve,whole")
    parser.add_argument("--links", type=options.names, default="host,1gbit")
    parser.add_argument("--lengths", type=options.numbers, default=",".join(map(str, LENGTHS)))
    parser.add_argument("--output-tokens", type=int, default=32)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.lengths, arguments.output_tokens = 1, [128, 512], 8
    return arguments


if __name__ == "__main__":
    options.run(main(parse()))

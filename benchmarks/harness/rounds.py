"""Rounds of single requests over several systems, interleaved: the measurement behind hand-over and
TTFT.

One request at a time, prompts of distinct random token ids, the order of the systems rotates per
round, and each (round, length) is measured twice with different prompts: the two halves of one
system give its A/A spread. All engines stay loaded; ``idle_cost`` says what that costs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness import transfer_log
from harness.engine import SERVED_NAME
from harness.prompts import random_prompt
from harness.stats import aa_spread, summarise
from harness.systems import SplitserveSystem

if TYPE_CHECKING:
    import aiohttp

    from harness.systems import System

HALVES = (0, 1)
SETTLE_S = 0.2
"""Between two requests: block frees and notifications of the last one end."""
IDLE_S = 4.0


class UnequalAnswerError(Exception):
    """A system answers differently from the plain engine: its times mean nothing."""


@dataclass(frozen=True)
class Row:
    """One request."""

    group: str
    link: str
    system: str
    length: int
    round: int
    half: int
    ttft_s: float
    itl_s: float
    e2e_s: float
    equal: bool
    gap_s: float | None = None
    prefill_leg_s: float | None = None
    tail_s: float | None = None
    """Last layer to delivered, for systems with a transfer log."""


@dataclass(frozen=True)
class Setting:
    """What stays the same over a group of measurements."""

    group: str
    link: str
    systems: list[System]
    session: aiohttp.ClientSession
    output_tokens: int

    def body(self, prompt: list[int]) -> dict[str, Any]:
        """A greedy completion of a fixed number of tokens."""
        return {
            "model": SERVED_NAME,
            "prompt": prompt,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


async def check(setting: Setting, lengths: list[int]) -> None:
    """Each system has answered one prompt per length as the plain engine does; connections are
    made, memory is touched.

    Raises ``UnequalAnswerError``.
    """
    for length in lengths:
        texts = {}
        for system in setting.systems:
            body = setting.body(random_prompt(length, "check", setting.link, length))
            texts[system.name] = (await system.serve(setting.session, body)).streamed.text
            await asyncio.sleep(SETTLE_S)
        expected = texts.get("plain")
        for name, text in texts.items():
            if expected is not None and text != expected:
                raise UnequalAnswerError(f"{name}, {length} tokens: {text!r}, plain: {expected!r}")


async def measure(setting: Setting, lengths: list[int], rounds: int) -> list[Row]:
    """All rounds of a group, in rotated order."""
    rows: list[Row] = []
    systems = setting.systems
    for turn in range(rounds):
        for length in lengths:
            for half in HALVES:
                prompt = random_prompt(length, setting.group, setting.link, turn, length, half)
                order = [systems[(turn + half + i) % len(systems)] for i in range(len(systems))]
                measured = [await measure_one(setting, system, prompt) for system in order]
                expected = next((text for row, text in measured if row.system == "plain"), None)
                place: dict[str, Any] = {"length": length, "round": turn, "half": half}
                rows += [
                    replace(row, **place, equal=expected in (None, text)) for row, text in measured
                ]
            print(f"{setting.group} {setting.link} round {turn} length {length} done", flush=True)
    return rows


async def measure_one(setting: Setting, system: System, prompt: list[int]) -> tuple[Row, str]:
    """One request; round, length, half and equality are filled in by the caller."""
    served = await system.serve(setting.session, setting.body(prompt))
    tail = None
    if isinstance(system, SplitserveSystem):
        tail = (await transfer_log.wait_for(system.transfer_logs, served.transfer_id)).tail_s
    await asyncio.sleep(SETTLE_S)
    leg = served.prefill
    row = Row(
        setting.group,
        setting.link,
        system.name,
        length=0,
        round=0,
        half=0,
        ttft_s=served.ttft,
        itl_s=served.streamed.mean_itl,
        e2e_s=served.streamed.events[-1] - served.sent,
        equal=False,
        gap_s=served.hand_over,
        prefill_leg_s=leg.answered - leg.sent if leg else None,
        tail_s=tail,
    )
    return row, served.streamed.text


async def idle_cost(systems: list[System]) -> dict[str, Any]:
    """CPU share of each idle system's engines, in cores."""
    await asyncio.sleep(IDLE_S)
    before = {s.name: sum(engine.cpu_seconds() for engine in s.engines) for s in systems}
    await asyncio.sleep(IDLE_S)
    after = {s.name: sum(engine.cpu_seconds() for engine in s.engines) for s in systems}
    return {"idle_cores": {name: round((after[name] - before[name]) / IDLE_S, 3) for name in after}}


Cell = tuple[str, str, str, int]


def cells(rows: list[Row]) -> dict[Cell, list[Row]]:
    """Rows by (group, link, system, length)."""
    grouped: dict[Cell, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row.group, row.link, row.system, row.length].append(row)
    return grouped


def values(rows: list[Row], quantity: str) -> list[float]:
    """One quantity in milliseconds, in measured order, without the requests that lack it."""
    found = (getattr(row, quantity) for row in rows)
    return [value * 1e3 for value in found if value is not None]


def spread(rows: list[Row], quantity: str) -> float:
    """A/A spread of a quantity in milliseconds."""
    halves = ([row for row in rows if row.half == half] for half in HALVES)
    first, second = (values(half, quantity) for half in halves)
    return aa_spread(first, second)


QUANTITIES = ("gap_s", "ttft_s", "itl_s", "prefill_leg_s", "e2e_s", "tail_s")


def summaries(rows: list[Row]) -> list[dict[str, Any]]:
    """Median, extremes and A/A spread of every quantity in every cell, in milliseconds."""
    out = []
    for (group, link, system, length), members in cells(rows).items():
        entry: dict[str, Any] = {
            "group": group,
            "link": link,
            "system": system,
            "length": length,
            "equal": sum(row.equal for row in members),
            "count": len(members),
        }
        for quantity in QUANTITIES:
            if found := values(members, quantity):
                key = quantity.removesuffix("_s") + "_ms"
                entry[key] = summarise(found).as_dict()
                entry[key]["aa_spread"] = round(spread(members, quantity), 3)
        out.append(entry)
    return out

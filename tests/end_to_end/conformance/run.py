"""Asks both sides a row's requests, and judges the answers."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from end_to_end.conformance.compare import EVENTS, Reply, differences, texts, with_status
from end_to_end.conformance.rows_generation import ROWS as GENERATION
from end_to_end.conformance.rows_parsing import ROWS as PARSING
from end_to_end.conformance.rows_prompts import ROWS as PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from end_to_end.conformance.row import Form, Row

ROWS: list[Row] = [*PROMPTS, *GENERATION, *PARSING]
REAL = frozenset(
    {
        "prompts, completions: a list of texts",
        "prompts, completions: characters of several bytes",
        "several answers, chat: n 3, a seed",
        "logprobs and echo, completions: logprobs 5",
        "streams and usage, chat: include_usage true, twice",
        "length of the answer, chat: max_tokens 1",
        "where it stops, completions: stop strings, not constrained",
        "sampling, chat: greedy",
        "sampling, completions: a seed",
        "sampling, chat: frequency_penalty",
        "structured outputs, chat: json_schema",
        "structured outputs, completions: regex",
    }
)
"""Rows that are asked of the real model too."""
REAL_ROWS = [row for row in ROWS if row.key in REAL or row.scores_prompt]
TINY_ROWS = [row for row in ROWS if not row.scores_prompt]
TRIES = 2
"""How often a stream is asked for whose events were joined differently: an engine whose host is
busy sends tokens that are ready together as one event. After that all events together count.
"""
ROWS_LIMIT = 6
"""Rows that are asked at a time."""
TIMELINE_LIMIT_S = 20.0


class Asked(Protocol):
    """Both sides."""

    async def ask(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[Reply, Reply]:
        """The answers of cluster and plain engine."""

    async def timeline(self, request_id: str) -> dict[str, Any]:
        """What the router knows of a request; empty when it knows none."""


@dataclass
class Outcome:
    """What became of a row."""

    row: Row
    problems: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    """The X-Request-Id of each form's first try."""
    prompt_tokens: int | None = None
    statuses: Counter[int] = field(default_factory=Counter)
    joined: int = 0
    """Forms whose events were joined differently each time."""


async def run(sides: Asked, rows: Iterable[Row], limit: int = ROWS_LIMIT) -> dict[str, Outcome]:
    """The outcome of every row, by its key; ``limit`` of them are asked at a time."""
    gate = asyncio.Semaphore(limit)
    numbers = itertools.count()

    async def one(row: Row) -> Outcome:
        async with gate:
            outcome = Outcome(row)
            try:
                await _ask_row(sides, outcome, f"row{next(numbers)}")
            except Exception as error:  # One row's failure is not another's.
                outcome.problems.append(f"{type(error).__name__}: {error}")
            return outcome

    rows = list(rows)
    outcomes = await asyncio.gather(*(one(row) for row in rows if not row.by_itself))
    outcomes += [await one(row) for row in rows if row.by_itself]
    return {outcome.row.key: outcome for outcome in outcomes}


async def _ask_row(sides: Asked, outcome: Outcome, name: str) -> None:
    said: dict[Form, Any] = {}
    for number, form in enumerate(outcome.row.forms):
        found, right = await _ask_form(sides, outcome, form, f"{name}-{number}")
        if found.status == right.status == 200 and not outcome.problems:
            _note_usage(outcome, found)
            said[form] = texts(found)
            if said.get("whole", said[form]) != said[form] and texts(right) == said["whole"]:
                outcome.problems.append(f"streamed {said[form]}, but not streamed {said['whole']}")


async def _ask_form(sides: Asked, outcome: Outcome, form: Form, name: str) -> tuple[Reply, Reply]:
    row = outcome.row
    for attempt in range(TRIES):
        request_id = f"{name}-{attempt}-x"
        found, right = await sides.ask(row.path, row.body(form), {"X-Request-Id": request_id})
        if attempt == 0:
            outcome.request_ids.append(request_id)
            outcome.problems += await _wrong_decision(sides, row, request_id)
        problems = differences(found, right)
        if not problems or not all(problem.startswith(EVENTS) for problem in problems):
            break
    else:
        outcome.joined += 1
        problems = []
    outcome.problems += [f"{form}: {problem}" for problem in problems]
    outcome.statuses[found.status] += 1
    expected = row.status_of(form)
    if (status := with_status(right).status) != expected:
        outcome.problems.append(f"{form}: the plain engine says {status}, not {expected}: "
                                f"{right.raw[:400]!r}")  # fmt: skip
    return found, right


async def _wrong_decision(sides: Asked, row: Row, request_id: str) -> list[str]:
    """What is wrong about how the router served the request."""
    if row.by_router:
        return ["it reached a node"] if await sides.timeline(request_id) else []
    end = asyncio.get_running_loop().time() + TIMELINE_LIMIT_S
    while not (timeline := await sides.timeline(request_id)):
        if asyncio.get_running_loop().time() > end:
            return ["the router knows nothing of it"]
        await asyncio.sleep(0.01)
    expected = "alone_not_splittable" if row.alone else "split"
    found = timeline["decision"]
    return [] if found == expected else [f"the router's decision is {found}, not {expected}"]


def _note_usage(outcome: Outcome, reply: Reply) -> None:
    bodies = reply.chunks if reply.is_stream else [reply.body]
    for body in bodies:
        if body.get("usage"):
            outcome.prompt_tokens = body["usage"]["prompt_tokens"]


def transfer_problems(outcome: Outcome, transfers: list[dict[str, Any]], block: int) -> list[str]:
    """What speaks against pages having travelled for the row's first request; ``transfers`` is what
    the decode node has received.
    """
    row = outcome.row
    if not outcome.request_ids:
        return ["it was not asked"]
    mine = [t for t in transfers if outcome.request_ids[0] in t["request_id"]]
    is_split = not (row.alone or row.by_router) and row.status_of(row.forms[0]) == 200
    if not is_split or outcome.prompt_tokens == 1:
        refused = row.status != 200
        return [f"pages travelled: {mine}"] if mine and not refused else []
    if [t["outcome"] for t in mine] != ["landed"]:
        return [f"no transfer has landed: {mine}"]
    (transfer,) = mine
    if outcome.prompt_tokens not in (None, transfer["prompt_tokens"]):
        return [f"the prompt has {outcome.prompt_tokens} tokens, but {transfer} travelled"]
    blocks = -(-transfer["prompt_tokens"] // block)
    whole = transfer["pages"] % blocks == 0 and transfer["pages"] > 0
    return (
        [] if whole and transfer["first_block"] == 0 else [f"not all pages travelled: {transfer}"]
    )


def counted(outcomes: Iterable[Outcome]) -> str:
    """One line for people."""
    outcomes = list(outcomes)
    requests = sum(sum(outcome.statuses.values()) for outcome in outcomes)
    refused = sum(o.statuses.total() - o.statuses[200] for o in outcomes)
    alone = sum(bool(outcome.row.alone) for outcome in outcomes)
    equal = sum(not outcome.problems for outcome in outcomes)
    return (
        f"{equal} of {len(outcomes)} rows equal in {requests} requests ({refused} refused); "
        f"{alone} rows answered by a decode node alone, "
        f"{sum(o.joined for o in outcomes)} streams with other events, the same together"
    )

"""Every row of the tables, with the tiny model: the cluster's answer is that of one engine. One in
three rows is for `make test-all`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from end_to_end.conformance.row import CHAT, COMPLETIONS, Row
from end_to_end.conformance.run import ROWS, TINY_ROWS, Outcome, counted, run, transfer_problems
from end_to_end.conformance.sides import BLOCK, Sides
from support.bank_client import LONG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outcomes(
    sides: Sides, request: pytest.FixtureRequest
) -> AsyncIterator[dict[str, Outcome]]:
    """What became of the rows that were selected, several of which are asked at a time."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    rows = [call.params.get("row") for call in calls if call is not None]
    yield await run(sides, [row for row in rows if isinstance(row, Row)])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=LONG) if number % 3 == 2 else row
        for number, row in enumerate(TINY_ROWS)
    ],
    ids=lambda row: row.key,
)
async def test_the_answer_is_that_of_one_engine(
    outcomes: dict[str, Outcome], sides: Sides, row: Row
) -> None:
    """Status, body and every event, streamed and not; split where it is to be split, and then with
    all pages of the prompt received.
    """
    outcome = outcomes[row.key]
    assert not outcome.problems, "\n".join(outcome.problems)
    assert not transfer_problems(outcome, sides.split.transfers("receive"), BLOCK)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", "application/json"),
        (b'{"model": "m", "prompt": "x"', "application/json"),
        (b'["m"]', "application/json"),
        (b'"m"', "application/json"),
        (b'{"model": "m", "prompt": "x"}', "text/plain"),
    ],
)
async def test_what_the_router_refuses_an_engine_does_too(
    sides: Sides, path: str, body: bytes, content_type: str
) -> None:
    """In other words, but with the same status and the same fields."""
    found, right = await sides.ask(path, body, {"Content-Type": content_type})
    assert found.status == right.status == 400
    ours, theirs = found.body["error"], right.body["error"]
    assert ours.keys() == theirs.keys()
    assert ours["code"] == theirs["code"]
    assert ours["message"]


async def test_what_would_end_the_engines_is_refused(sides: Sides) -> None:
    """Logprobs of the prompt, where adapters are loaded on CPU: vLLM 0.32 dies of them."""
    for row in ROWS:
        if row.scores_prompt and row.status == 200:
            reply = await sides.ask_split(row.path, row.body("whole"))
            assert reply.status == 400, row.key
            assert "enable_lora" in reply.body["error"]["message"]


async def test_the_engines_have_lived_and_hold_nothing(
    outcomes: dict[str, Outcome], sides: Sides, summary: Callable[[str], None]
) -> None:
    """No row has ended an engine, and nothing of any row is left."""
    summary(f"conformance, tiny model: {counted(outcomes.values())}")
    await sides.split.wait_until_idle()
    lives = {name: node["incarnation"] for name, node in (await sides.split.nodes()).items()}
    assert lives == sides.lives

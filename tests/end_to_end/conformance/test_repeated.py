"""The same request again and again: the same answer, alone and among others."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from end_to_end.conformance.compare import texts
from end_to_end.conformance.row import COMPLETIONS
from end_to_end.conformance.rows_prompts import text

if TYPE_CHECKING:
    from end_to_end.conformance.sides import Sides

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

REPEATS = 20
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.8, "seed": 1234}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_the_same_again(sides: Sides, sampling: dict[str, Any]) -> None:
    """Twenty times one after the other, then twenty times together with as many others: all are
    what the plain engine says, though after the first the decode node knows the prompt.
    """
    body = {"model": "m", "prompt": text(90, 9001), "max_tokens": 8, **sampling}
    right = texts(await sides.ask_plain(COMPLETIONS, body))
    for _ in range(REPEATS):
        assert texts(await sides.ask_split(COMPLETIONS, body)) == right
    others = [{**body, "prompt": text(60 + n, 100 + n)} for n in range(REPEATS)]
    asked = [one for other in others for one in (body, other)]
    answers = await asyncio.gather(*(sides.ask_split(COMPLETIONS, one) for one in asked))
    assert all(texts(answer) == right for answer in answers[::2])


async def test_many_with_one_name(sides: Sides) -> None:
    """A hundred different prompts at a time with one X-Request-Id: each gets its own answer."""
    prompts = [text(20 + n, 500 + n) for n in range(100)]
    bodies = [{"model": "m", "prompt": prompt, "max_tokens": 4, **GREEDY} for prompt in prompts]
    headers = {"X-Request-Id": "everybody"}
    answers = await asyncio.gather(
        *(sides.ask_split(COMPLETIONS, body, headers) for body in bodies)
    )
    batch = {"model": "m", "prompt": prompts, "max_tokens": 4, **GREEDY}
    right = texts(await sides.ask_plain(COMPLETIONS, json.dumps(batch).encode()))
    assert [texts(answer)[0] for answer in answers] == [right[n] for n in range(100)]

"""Chaos on a cluster of mock engines, for a minute, and for two without and with a shared cache:
every kind of fault at least once, and the bars of `make chaos`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chaos.cache_faults import CACHE_KINDS
from chaos.cluster import Bounds, Shape
from chaos.faults import KINDS, LAST_KIND
from chaos.run import Plan, explain, torment
from chaos.verdict import Outcome
from support.bank_client import LONG

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 100.0
REQUESTS_PER_S = 5
PATIENT = Shape(bounds=Bounds(first_token_deadline_s=14.0, request_deadline_s=35.0))
"""What no fault touches is answered in time, though the machine may have stood still meanwhile."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [50.0, pytest.param(SECONDS, marks=LONG)])
async def test_a_minute_or_two_of_chaos(tmp_path: Path, seconds: float) -> None:
    """No hang, no wrong text, nothing left behind, every failure an OpenAI error, and the share of
    saved requests; a failure prints the seed and the stories.
    """
    plan = Plan(seed=20_26, seconds=seconds, round_s=seconds, shape=PATIENT, each_kind=True)
    result = await torment(plan, tmp_path)
    assert not result.verdict.violations, explain(result)
    assert {fault.kind for fault in result.faults} == {*KINDS, LAST_KIND}
    outcomes = [one.outcome for one in result.verdict.judged]
    assert outcomes.count(Outcome.OK) > REQUESTS_PER_S * seconds
    assert Outcome.LEFT in outcomes


@pytest.mark.parametrize("seconds", [pytest.param(SECONDS, marks=LONG)])
async def test_two_minutes_of_chaos_with_a_cache(tmp_path: Path, seconds: float) -> None:
    """The cache's server and its stores are killed, stopped, filled, emptied and spoilt too: that
    excuses no failure, every tier is read from, and in the end the cache holds nothing for anybody.
    """
    plan = Plan(
        seed=2_026,
        seconds=seconds,
        in_flight=24,
        shape=PATIENT,
        round_s=seconds,
        kinds=CACHE_KINDS,
        ends_an_agent=False,
        with_cache=True,
        each_kind=True,
    )
    result = await torment(plan, tmp_path)
    assert not result.verdict.violations, explain(result)
    assert {fault.kind for fault in result.faults} >= {*CACHE_KINDS} - {"fill disk"}
    assert [one.outcome for one in result.verdict.judged].count(
        Outcome.OK
    ) > REQUESTS_PER_S * seconds

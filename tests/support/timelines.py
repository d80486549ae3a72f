"""A request's timeline as the router tells it, and what must be true of one that is whole."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

WAIT_LIMIT_S = 20.0
SPLIT_PARTS = ["queue", "reserve", "prefill", "transfer_exposed", "first_step", "decode"]
IN_ORDER = (
    ("dispatched_ms", "prefill_started_ms", "prefill_ended_ms", "landed_ms", "first_data_ms"),
    ("dispatched_ms", "reserved_ms", "granted_ms", "delivered_ms", "landed_ms", "first_data_ms"),
    ("first_data_ms", "last_data_ms"),
)
"""Moments of the two sides, each in the order in which they happen."""


async def streamed_record(url: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    """The record of a completion that was streamed to its end."""
    request_id = f"streamed-{uuid4()}"
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True}
    async with (
        aiohttp.ClientSession(headers={"X-Request-Id": request_id}) as session,
        session.post(f"{url}/v1/completions", json=body | {"ignore_eos": True}) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
        assert "[DONE]" in text
    return await complete_record(url, request_id)


async def complete_record(url: str, request_id: str) -> dict[str, Any]:
    """The record of a split request, once both of its nodes have told of the transfer."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(WAIT_LIMIT_S):
        while True:
            async with session.get(f"{url}/internal/timeline/{request_id}") as answer:
                record: dict[str, Any] = await answer.json()
                if answer.status == 200 and record["delivered_ms"] is not None:
                    return record
            await asyncio.sleep(0.01)


def assert_whole_timeline(
    record: dict[str, Any], *, layers: int, pages: int, page_bytes: int
) -> None:
    """Of a streamed split request: all moments in order, parts that add up, every page counted."""
    for names in IN_ORDER:
        times = [record[name] for name in names]
        assert times == sorted(times), dict(zip(names, times, strict=True))
    parts = record["parts"]
    assert list(parts) == SPLIT_PARTS
    assert sum(parts.values()) == pytest.approx(record["last_data_ms"], abs=1)
    until_first = sum(parts.values()) - parts["decode"]
    assert until_first == pytest.approx(record["first_data_ms"], abs=1)
    assert record["transfer_exposed_ms"] == pytest.approx(parts["transfer_exposed"], abs=1)
    assert record["transfer_hidden_ms"] + record["transfer_exposed_ms"] > 0
    writes = record["layer_writes"]
    assert 0 < len(writes) <= 64
    assert {n for w in writes for n in range(w["layers"][0], w["layers"][1] + 1)} == set(
        range(layers)
    )
    assert [w["ms"] for w in writes] == sorted(w["ms"] for w in writes)
    assert record["prefill_started_ms"] <= writes[0]["ms"]
    assert writes[-1]["ms"] <= record["delivered_ms"]
    assert record["transfer_pages"] == sum(w["pages"] for w in writes) == pages
    assert record["transfer_bytes"] == sum(w["bytes"] for w in writes) == pages * page_bytes

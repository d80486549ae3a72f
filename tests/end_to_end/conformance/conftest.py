"""Who is asked: a split cluster of real vLLM engines, and one vLLM with the same settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest_asyncio
from end_to_end.conformance.sides import REQUEST_LIMIT_S, START_LIMIT_S, Sides, start_sides

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def sides(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sides]:
    """The cluster and the plain engine, with the tiny model; shared by all tests of this folder."""
    limit = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit) as session:
        sides = start_sides(tiny_model, tmp_path_factory.mktemp("conformance"), session)
        try:
            await sides.wait_until_ready(START_LIMIT_S)
            yield sides
        except BaseException:
            sides.kill()
            raise
        sides.stop()

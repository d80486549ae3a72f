"""The clusters of the bug bank: one per configuration for all its tests, each looked at before and
after every test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from support.bank_client import LONG
from support.idle_check import IdleCheck
from support.mock_cluster import Cluster, running_cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

COMMON = """
engine: mock
model: {path: mock}
router: {port: 0, node_silence_limit_s: 3, first_token_deadline_s: 15, request_deadline_s: 30}
supervision:
  restart_delay_s: 0.1
  restart_delay_limit_s: 0.2
  restart_limit: 1000
  drain_timeout_s: 5
  stop_timeout_s: 3
"""

PAIR = (
    COMMON
    + """
name: bank-pair
prefill:
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: &transfer
    {transport: tcp, stream_min_bytes: 4096, lease_s: 300, deadline_s: 5, retarget_wait_s: 2}
decode:
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 512, enable_faults: true}
  transfer: *transfer
"""
)
"""The decode node takes shorter prompts than the prefill node, and a lease that is left to run out
is one that a test misses.
"""

QUAD = (
    COMMON
    + """
name: bank-quad
prefill: &pool
  replicas: 2
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024, enable_faults: true}
  transfer: {transport: TRANSPORT, stream_min_bytes: 4096, lease_s: 5, deadline_s: 10}
decode: *pool
"""
)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def pair_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path_factory.mktemp("pair"), PAIR) as cluster:
        yield cluster


@pytest_asyncio.fixture(
    scope="package", loop_scope="session", params=["local", pytest.param("nixl", marks=LONG)]
)
async def quad_cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    text = QUAD.replace("TRANSPORT", request.param)
    async with running_cluster(tmp_path_factory.mktemp("quad"), text) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def pair(pair_cluster: Cluster) -> AsyncIterator[Cluster]:
    """One prefill and one decode node over ``tcp``; idle before the test and after it."""
    check = await IdleCheck.begin(pair_cluster)
    yield pair_cluster
    await check.end()


@pytest_asyncio.fixture(loop_scope="session")
async def quad(quad_cluster: Cluster) -> AsyncIterator[Cluster]:
    """Two prefill and two decode nodes over ``local``, or ``nixl``; idle before the test and after
    it.
    """
    check = await IdleCheck.begin(quad_cluster)
    yield quad_cluster
    await check.end()

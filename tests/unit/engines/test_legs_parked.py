"""A prefill leg that is aborted while it waits for the host's cache: the engine hears of one end,
not of two.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.kv_transfer.cache.engine_cache import PromptIdentity
from splitserve.kv_transfer.engine_endpoint import EngineDescription
from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.engines.legs import Computed, EngineLoad, Legs
from splitserve.orchestrator.engines.vllm.scheduler_half import SchedulerHalf

SECRET = bytes(range(32))
REQUEST = "r"


class Cache:
    """As far as legs ask it here."""

    is_busy = True

    def arrived(self, *arguments: Any) -> None: ...

    def finished(self, *arguments: Any) -> None: ...

    def status(self) -> dict[str, float]:
        return {}

    def step_reported(self, *arguments: Any) -> None: ...

    def is_loading(self, request_id: str) -> bool:
        return self.is_busy


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def legs(cache: Any) -> Legs:
    """With a prefill leg that has arrived."""
    description = EngineDescription(
        incarnation="e",
        fingerprint={},
        control_addresses=(),
        block_tokens=16,
        total_blocks=100,
        max_model_len=1_000,
        tensor_parallel=1,
        transport="tcp",
    )
    legs = Legs(
        SECRET, "tcp://127.0.0.1:1", description, lambda: EngineLoad(0, 0, 100), None, cache
    )
    params = TransferParams(transfer_id="t", role="prefill", peer_incarnation="p")
    legs.arrived(REQUEST, seal(params, SECRET), range(64), PromptIdentity())
    return legs


def _abort(legs: Legs) -> bool:
    return legs.finished(REQUEST, aborted=True, blocks=4, computed=Computed(0, (), ()))


def test_a_parked_leg_is_not_kept_for_its_peer(legs: Legs) -> None:
    """Its load's report frees its blocks; the engine is not told that it was sent, and the leg is
    forgotten when the transfer's end is known.
    """
    assert not _abort(legs)
    (close,) = legs.take_orders().closes
    assert close.aborted
    assert legs.settled((), (REQUEST,)) == frozenset()
    assert legs.settled((REQUEST,), ()) == {REQUEST}
    assert legs.settled((REQUEST,), ()) == frozenset()
    assert legs.status().leased_blocks == 0


def test_a_leg_whose_load_is_over_is_kept(legs: Legs, cache: Cache) -> None:
    """As without a cache: its blocks stay until it is reported as sent."""
    cache.is_busy = False
    assert _abort(legs)
    assert legs.settled((REQUEST,), ()) == frozenset()


def test_vllm_acts_on_what_is_left(legs: Legs) -> None:
    """The report that vLLM goes through afterwards names the request as received only."""
    assert not _abort(legs)
    half = object.__new__(SchedulerHalf)
    half._legs = legs
    output = SimpleNamespace(
        finished_sending={REQUEST, "other"},
        finished_recving={REQUEST},
        kv_connector_worker_meta=None,
    )
    half.step_reported(output)  # type: ignore[arg-type]
    assert output.finished_sending == {"other"}
    assert output.finished_recving == {REQUEST}

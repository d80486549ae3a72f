"""Legs whose prompt comes from the host's cache, from a prefill node, or from both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from splitserve.kv_transfer.cache.engine_cache import PromptIdentity
from splitserve.kv_transfer.cache.keys import NO_TENANT
from splitserve.kv_transfer.engine_endpoint import EngineDescription
from splitserve.kv_transfer.transfer_params import TransferParams, seal
from splitserve.orchestrator.engines.legs import Computed, EngineLoad, Legs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SECRET = bytes(32)
BLOCK = 4
PROMPT = list(range(30))
IDS = list(range(100, 120))
TENANT = "0123456789abcdef"


class Cache:
    """Has so many tokens of every prompt, from its beginning."""

    has_orders = False

    def __init__(self) -> None:
        self.tokens: int | None = 0
        self.arrivals: list[tuple[str, bytes]] = []
        self.allocations: list[int] = []
        self.ends: list[int] = []

    def arrived(
        self, name: str, prompt: Sequence[int], identity: object, tenant: bytes, marks: object
    ) -> None:
        self.arrivals.append((name, tenant))

    def hit_tokens(self, name: str, computed: int) -> int | None:
        return self.tokens if self.tokens is None else max(0, self.tokens - computed)

    def allocated(self, name: str, block_ids: Sequence[int], tokens: int) -> int:
        self.allocations.append(tokens)
        return min(self.tokens or 0, tokens)

    def finished(self, name: str, computed: int, tokens: object, block_ids: object) -> None:
        self.ends.append(computed)

    def stop(self) -> None:
        """Nothing."""


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def legs(cache: Cache) -> Iterator[Legs]:
    description = EngineDescription(
        incarnation="i", fingerprint={}, control_addresses=(), block_tokens=BLOCK, total_blocks=50,
        max_model_len=100, tensor_parallel=1, transport="tcp",
    )  # fmt: skip
    made = Legs(
        SECRET, "tcp://127.0.0.1:1", description, lambda: EngineLoad(0, 0, 0), None,
        cache,  # type: ignore[arg-type]
    )  # fmt: skip
    yield made
    made.stop()


def leg(role: Any = "decode", **fields: Any) -> dict[str, Any]:
    params = TransferParams(
        transfer_id="t", role=role, peer_incarnation="p", peer_addresses=("a",), **fields
    )
    return seal(params, SECRET)


def arrive(legs: Legs, params: dict[str, Any] | None, **identity: Any) -> None:
    legs.arrived("r", params, PROMPT, PromptIdentity(**identity))


@pytest.mark.parametrize(
    ("cached", "wanted", "receives_from"),
    [(0, 30, 0), (16, 30, 4), (28, 30, 7), (29, 29, None), (30, 30, None)],
)
def test_what_the_cache_lacks_comes_from_the_prefill_node(
    legs: Legs, cache: Cache, cached: int, wanted: int, receives_from: int | None
) -> None:
    """From the block on that the cache does not bring; nothing when only the last token is left,
    and the prefill node is told so.
    """
    arrive(legs, leg())
    cache.tokens = cached
    assert legs.wanted_tokens("r", 0) == wanted
    legs.allocated("r", IDS, wanted)
    orders = legs.take_orders()
    if receives_from is None:
        assert not orders.receives
        assert len(orders.declines) == 1
    else:
        (receive,) = orders.receives
        assert receive.first_block == receives_from
        assert receive.block_ids == tuple(IDS[receives_from:8])


def test_an_answer_that_is_not_known_yet(legs: Legs, cache: Cache) -> None:
    """The scheduler is asked to come again; nothing is reserved meanwhile."""
    arrive(legs, leg())
    cache.tokens = None
    assert legs.wanted_tokens("r", 0) is None
    assert not legs.take_orders().receives


def test_a_request_that_is_no_leg_uses_the_cache_too(legs: Legs, cache: Cache) -> None:
    """Under no tenant, since nobody vouches for one."""
    arrive(legs, None)
    cache.tokens = 16
    assert legs.wanted_tokens("r", 0) == 16
    legs.allocated("r", IDS, 16)
    assert cache.arrivals == [("r", NO_TENANT)]
    assert not legs.take_orders().receives


@pytest.mark.parametrize(
    ("tag", "tenant"),
    [(TENANT, bytes.fromhex(TENANT)), ("", NO_TENANT), ("xyz", NO_TENANT), ("01", NO_TENANT)],
)
def test_the_tenant_comes_with_the_leg(legs: Legs, cache: Cache, tag: str, tenant: bytes) -> None:
    """Sealed, so no client can choose it; a wrong one is none."""
    arrive(legs, leg("prefill", tenant=tag))
    assert cache.arrivals == [("r", tenant)]


def test_a_prompt_that_nobody_can_name_is_not_cached(legs: Legs, cache: Cache) -> None:
    """Embeddings, say: the leg works without the cache."""
    arrive(legs, leg(), is_known=False)
    assert cache.arrivals == []
    assert legs.wanted_tokens("r", 0) == 30


def test_the_cache_hears_of_the_end(legs: Legs, cache: Cache) -> None:
    """With what is computed; once."""
    arrive(legs, None)
    legs.finished("r", aborted=False, blocks=8, computed=Computed(25, PROMPT, IDS))
    assert cache.ends == [25]

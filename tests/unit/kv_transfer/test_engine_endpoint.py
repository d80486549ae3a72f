"""The endpoint between the agent and an engine's connector, over its real socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from router_stubs.cluster import until

from splitserve.kv_transfer import engine_endpoint
from splitserve.kv_transfer.channel import dial, tcp_address
from splitserve.kv_transfer.engine_endpoint import (
    REPORT_LIMIT_TRANSFERS,
    EngineDescription,
    EngineEndpoint,
    EngineEndpointClient,
    EngineStatus,
)
from splitserve.kv_transfer.held_prefixes import NOTHING_HELD, PrefixReport
from splitserve.kv_transfer.orders import Retarget
from splitserve.kv_transfer.transfer_facts import UNTAKEN_LIMIT_TRANSFERS, ReceiveFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = b"0123456789abcdef"
DESCRIPTION = EngineDescription(
    incarnation="P",
    fingerprint={"weights": "w"},
    control_addresses=("tcp://127.0.0.1:1",),
    block_tokens=16,
    total_blocks=100,
    max_model_len=1000,
    tensor_parallel=1,
    transport="tcp",
)


@pytest.fixture
def address(free_port: Callable[[], int]) -> str:
    """A loopback address nobody listens on."""
    return tcp_address("127.0.0.1", free_port())


@pytest.fixture
def endpoint(address: str) -> Iterator[EngineEndpoint]:
    """A running endpoint that reports three running requests."""
    server = EngineEndpoint(address, SECRET, DESCRIPTION, lambda: EngineStatus(running=3))
    server.start()
    yield server
    server.stop()


async def test_questions_are_answered(endpoint: EngineEndpoint, address: str) -> None:
    """Description and status come as they were published."""
    client = EngineEndpointClient(address, SECRET)
    assert await client.describe() == DESCRIPTION
    assert await client.status() == EngineStatus(running=3)
    client.close()


async def test_prefixes_are_asked_for_from_the_start_or_what_is_new(address: str) -> None:
    """What the engine's scheduler gives; one that gives nothing says so."""
    asked: list[bool] = []

    def prefixes(from_start: bool) -> PrefixReport:
        asked.append(from_start)
        return PrefixReport(is_first=from_start, added=b"12345678", tokens=(7,))

    server = EngineEndpoint(address, SECRET, DESCRIPTION, EngineStatus, prefixes)
    server.start()
    client = EngineEndpointClient(address, SECRET)
    first = await client.prefixes(from_start=True)
    assert first == PrefixReport(is_first=True, added=b"12345678", tokens=(7,))
    assert not (await client.prefixes(from_start=False)).is_first
    assert asked == [True, False]
    client.close()
    server.stop()


async def test_an_engine_may_have_no_prefixes_to_tell(
    endpoint: EngineEndpoint, address: str
) -> None:
    """Then the answer is empty."""
    client = EngineEndpointClient(address, SECRET)
    assert await client.prefixes(from_start=True) == NOTHING_HELD
    client.close()


async def test_orders_are_queued_for_the_next_step(endpoint: EngineEndpoint, address: str) -> None:
    """Each order is taken once, in the order given."""
    client = EngineEndpointClient(address, SECRET)
    assert not endpoint.has_orders
    await client.fail_transfer("t", "refused")
    await client.peer_died("Q")
    await client.fail_transfer("u", "gone")
    order = Retarget("v", 2, "R", ("tcp://r",), "P is gone")
    await client.retarget(order)
    assert endpoint.has_orders
    assert endpoint.take_orders() == ((("t", "refused"), ("u", "gone")), ("Q",), (order,))
    assert endpoint.take_orders() == ((), (), ())
    client.close()


async def test_an_engine_that_takes_no_steps_refuses_orders(
    endpoint: EngineEndpoint, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound drops nothing that was accepted: the one too many is refused."""
    monkeypatch.setattr(engine_endpoint, "ORDER_LIMIT", 1)
    client = EngineEndpointClient(address, SECRET)
    await client.peer_died("Q")
    with pytest.raises(OSError, match="1 orders wait"):
        await client.peer_died("R")
    assert endpoint.take_orders() == ((), ("Q",), ())
    await client.peer_died("R")
    assert endpoint.take_orders() == ((), ("R",), ())
    client.close()


async def test_nobody_there_is_a_timeout(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a call that waits behind another one."""
    monkeypatch.setattr(engine_endpoint, "ANSWER_DEADLINE_S", 0.05)
    client = EngineEndpointClient(address, SECRET)
    with pytest.raises(TimeoutError):
        await client.status()
    async with client._line._lock:
        with pytest.raises(TimeoutError):
            await client.status()
    client.close()


async def test_another_secret_is_not_answered(
    endpoint: EngineEndpoint, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that does not know the secret gets nothing and harms nothing."""
    stranger = EngineEndpointClient(address, b"another secret!!")
    with monkeypatch.context() as patch:
        patch.setattr(engine_endpoint, "ANSWER_DEADLINE_S", 0.1)
        with pytest.raises(TimeoutError):
            await stranger.peer_died("P")
    client = EngineEndpointClient(address, SECRET)
    assert (await client.status()).running == 3
    assert not endpoint.has_orders
    for each in (stranger, client):
        each.close()


async def test_malformed_questions_are_dropped(endpoint: EngineEndpoint, address: str) -> None:
    """Bytes that are no question change nothing."""
    context: zmq.Context[Any] = zmq.Context()
    dealer = dial(context, address, SECRET)
    for frames in ([b""], [b"n", b"\xc1"], [b"n", b"\x80"], [b"a", b"b", b"c"]):
        dealer.send_multipart(frames)
    client = EngineEndpointClient(address, SECRET)
    assert (await client.status()).running == 3
    assert not dealer.poll(0)
    client.close()
    context.destroy(0)


def test_an_address_in_use_raises(endpoint: EngineEndpoint, address: str) -> None:
    """An engine that its agent could not reach does not start."""
    second = EngineEndpoint(address, SECRET, DESCRIPTION, EngineStatus)
    with pytest.raises(OSError, match="cannot listen"):
        second.start()
    second.stop()


def ended(transfer_id: str) -> ReceiveFacts:
    """The facts of one transfer."""
    return ReceiveFacts(
        transfer_id=transfer_id, attempt=1, rank=0, ranks=1, outcome="landed", ended=5.0
    )


async def test_ended_transfers_are_told_at_once(endpoint: EngineEndpoint, address: str) -> None:
    """The question is held while there are none, and other questions are answered meanwhile."""
    client = EngineEndpointClient(address, SECRET)
    asking = asyncio.create_task(client.ended_transfers())
    await until(lambda: endpoint._held is not None)
    assert (await client.status()).running == 3
    assert not asking.done()
    endpoint.transfers_ended([ended("t"), ended("u")])
    assert await asking == (ended("t"), ended("u"))
    endpoint.transfers_ended(ended(f"t{n}") for n in range(REPORT_LIMIT_TRANSFERS + 1))
    assert len(await client.ended_transfers()) == REPORT_LIMIT_TRANSFERS
    assert await client.ended_transfers() == (ended(f"t{REPORT_LIMIT_TRANSFERS}"),)
    client.close()


async def test_the_latest_question_for_transfers_is_held(
    endpoint: EngineEndpoint, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that has come anew gets what ends; without news the answer is empty in the end."""
    clients = [EngineEndpointClient(address, SECRET) for _ in range(2)]
    first = asyncio.create_task(clients[0].ended_transfers())
    await until(lambda: endpoint._held is not None)
    second = asyncio.create_task(clients[1].ended_transfers())
    assert await first == ()
    endpoint.transfers_ended([ended("t")])
    assert await second == (ended("t"),)
    monkeypatch.setattr(engine_endpoint, "HELD_ANSWER_S", 0.0)
    assert await clients[1].ended_transfers() == ()
    for client in clients:
        client.close()


def test_untaken_transfers_are_bounded(endpoint: EngineEndpoint) -> None:
    """Where nobody asks, the oldest are forgotten."""
    endpoint.transfers_ended(ended(str(n)) for n in range(UNTAKEN_LIMIT_TRANSFERS + 5))
    assert len(endpoint._ended) == UNTAKEN_LIMIT_TRANSFERS
    assert endpoint._ended[0].transfer_id == "5"

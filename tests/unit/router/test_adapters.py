"""LoRA adapters: a request for one goes only where it is loaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import StubCluster, completion, stub_cluster, until

from splitserve.orchestrator.agent.messages import AdapterDescription

if TYPE_CHECKING:
    from router_stubs.engine import Asked


def adapter(content: str = "w1") -> AdapterDescription:
    return AdapterDescription(path="/adapters/a", content=content)


async def add(cluster: StubCluster, name: str, **adapters: str) -> None:
    """A node with these adapters, by name, and what is in them."""
    described = {name: adapter(content) for name, content in adapters.items()}
    await cluster.add_node(name, adapters=described)


async def serve(cluster: StubCluster, model: str, **changes: Any) -> tuple[str, ...]:
    """The nodes that a request for this model reaches; none when it is refused."""
    for engine in cluster.engines.values():
        engine.asked.clear()
    response = await cluster.post(json=completion(model=model, **changes))
    await response.read()
    await cluster.idle()
    return tuple(name for name, engine in cluster.engines.items() if engine.asked)


async def names(cluster: StubCluster) -> list[str]:
    models = await (await cluster.session.get(f"{cluster.url}/v1/models")).json()
    return [model["id"] for model in models["data"]]


async def test_it_is_split_between_nodes_that_both_have_it() -> None:
    """The same adapter, by its content; the model itself goes anywhere."""
    async with stub_cluster() as cluster:
        await add(cluster, "p0", a="w1")
        await add(cluster, "p1", a="w2")
        await add(cluster, "p2")
        await add(cluster, "d0", a="w1")
        assert await names(cluster) == ["m", "a"]
        for _ in range(3):
            assert await serve(cluster, "a") == ("p0", "d0")
        assert len({await serve(cluster, "m") for _ in range(3)}) == 3


async def test_a_decode_node_with_a_partner_is_preferred() -> None:
    """Over one that would have to compute the prompt itself."""
    async with stub_cluster() as cluster:
        await add(cluster, "p0", a="w2")
        await add(cluster, "d0", a="w1")
        await add(cluster, "d1", a="w2")
        for _ in range(3):
            assert await serve(cluster, "a") == ("p0", "d1")


@pytest.mark.parametrize("on_prefill", [{}, {"a": "w2"}, {"b": "w1"}])
async def test_it_is_alone_where_only_decode_has_it(on_prefill: dict[str, str]) -> None:
    """Or has another one under its name."""
    async with stub_cluster() as cluster:
        await add(cluster, "p0", **on_prefill)
        await add(cluster, "d0", a="w1")
        await add(cluster, "d1")
        for _ in range(3):
            assert await serve(cluster, "a") == ("d0",)


async def test_one_that_no_decode_node_has_is_404() -> None:
    """As vLLM words it; what a prefill node has counts for nothing, and is not listed."""
    async with stub_cluster() as cluster:
        await add(cluster, "p0", a="w1")
        await add(cluster, "d0")
        assert await names(cluster) == ["m"]
        response = await cluster.post(json=completion(model="a"))
        assert response.status == 404
        error = (await response.json())["error"]
        assert error["message"] == "The model `a` does not exist. Valid aliases: m."
        assert (error["type"], error["param"]) == ("NotFoundError", "model")


async def test_one_whose_node_is_away_is_503() -> None:
    """An adapter of the YAML, before its node is ready or while it takes no work."""
    modules = ["a=/adapters/a"]
    async with stub_cluster(decode_args={"lora_modules": modules}) as cluster:
        await add(cluster, "p0", a="w1")
        await add(cluster, "d0")
        response = await cluster.post(json=completion(model="a"))
        assert response.status == 503
        assert "no decode node with the adapter `a`" in (await response.json())["error"]["message"]
        await add(cluster, "d1", a="w1")
        assert await serve(cluster, "a") == ("p0", "d1")
        node = cluster.router.core.membership.nodes["d1"]
        await cluster.agents["d1"].socket.close()
        await until(lambda: not node.is_connected)
        assert (await cluster.post(json=completion(model="a"))).status == 503


async def test_others_do_not_wait_behind_it() -> None:
    """A request whose one node is full lets those pass that can go elsewhere."""
    async with stub_cluster(prefill_batch_tokens=0) as cluster:
        await add(cluster, "p0", a="w1")
        await add(cluster, "d0")
        await cluster.add_node("d1", adapters={"a": adapter()}, total_blocks=4)

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        cluster.engines["d1"].answer = hang
        body = completion(model="a", max_tokens=60)
        held = [asyncio.ensure_future(cluster.post(json=body)) for _ in range(2)]
        await until(lambda: len(cluster.router.core.queue) == 1)
        response = await cluster.post(json=completion(max_tokens=60))
        assert response.status == 200
        assert cluster.engines["d0"].asked
        for posting in held:
            posting.cancel()
        await response.read()
        await cluster.idle()


async def test_a_failed_decode_node_is_replaced_by_one_that_has_it() -> None:
    """Never by one that has not."""
    async with stub_cluster() as cluster:
        await add(cluster, "p0", a="w1")
        for name in ("d0", "d1"):
            await add(cluster, name, a="w1")
        await add(cluster, "d2")
        await cluster.engines["d0"].stop()
        for _ in range(3):
            assert "d1" in await serve(cluster, "a")
            assert not cluster.engines["d2"].asked
        await cluster.engines["d1"].stop()
        response = await cluster.post(json=completion(model="a"))
        assert response.status in (502, 503)
        await cluster.idle()
        assert not cluster.engines["d2"].asked


async def test_forwarded_requests_follow_the_adapter() -> None:
    """Tokens may differ with it; a model that nobody knows is for any engine to refuse."""
    async with stub_cluster() as cluster:
        await add(cluster, "d0")
        await add(cluster, "d1", a="w1")
        for _ in range(3):
            body = {"model": "a", "prompt": "x"}
            assert (await cluster.session.post(f"{cluster.url}/tokenize", json=body)).status == 200
        assert len(cluster.engines["d1"].asked) == 3
        body = {"model": "other", "prompt": "x"}
        assert (await cluster.session.post(f"{cluster.url}/tokenize", json=body)).status == 200

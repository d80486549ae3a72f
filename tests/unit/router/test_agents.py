"""Agents at the router: who is let in, what they are told, and what their end means."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from router_stubs.cluster import stub_cluster, until
from router_stubs.core_story import description
from router_stubs.engine import DONE, SSE

from splitserve.orchestrator.agent.auth import HOST_HEADER, agent_token
from splitserve.orchestrator.agent.messages import (
    AgentHello,
    EngineDied,
    LoadingProgress,
    NodeState,
    OtherRouter,
    OtherRouters,
    PeerDied,
    RefuseNode,
    RouterLoad,
    TellLoad,
    Welcome,
)
from splitserve.orchestrator.core.membership import Drain


@pytest.mark.parametrize("token", [None, "Bearer x", f"Bearer {agent_token(b'another secret..')}"])
async def test_an_agent_needs_the_clusters_token(token: str | None) -> None:
    """401 before any frame."""
    async with stub_cluster() as cluster:
        headers = {"Authorization": token} if token else {}
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await cluster.session.ws_connect(f"{cluster.url}/internal/agents", headers=headers)
        assert caught.value.status == 401


async def test_a_node_is_welcomed_and_one_that_differs_is_refused() -> None:
    """The refusal names both values and appears in the status."""
    async with stub_cluster("p0", "d0") as cluster:
        await until(
            lambda: cluster.agents["p0"].frames == [Welcome(router=cluster.router.driver.name)]
        )
        agent = cluster.agents["d0"]
        changes = {"engine_url": "http://127.0.0.1:1", "fingerprint": {"weights": "w2"}}
        other = description("d0", incarnation="d0-2", transport="local", **changes)
        await agent.say(AgentHello(description=other, role="decode"))
        await until(lambda: any(isinstance(frame, RefuseNode) for frame in agent.frames))
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert "p0 has tcp" in status["refused"]["d0"]
        assert "d0 has local" in status["refused"]["d0"]
        assert list(status["nodes"]) == ["p0"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": "0.0.1"}, "far.example has splitserve 0.0.1, the router has"),
        ({"engine_url": "https://10.0.0.9:1"}, "give both the same security.tls"),
        ({"engine_url": "10.0.0.9:1"}, "engine_url must look like"),
    ],
)
async def test_a_node_that_speaks_otherwise_is_refused(
    changes: dict[str, str], expected: str
) -> None:
    """The reason names its machine and what to do, and is in the status until it comes back
    well.
    """
    async with stub_cluster("p0", "d0") as cluster:
        agent = cluster.agents["d0"]
        told = {"incarnation": "d0-2", "host": "far.example"}
        other = description("d1", **(told | changes))
        await agent.say(AgentHello(description=other, role="decode"))
        await until(lambda: any(isinstance(frame, RefuseNode) for frame in agent.frames))
        (reason,) = [frame.reason for frame in agent.frames if isinstance(frame, RefuseNode)]
        assert expected in reason
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert status["refused"] == {"d1": reason}
        await cluster.add_node("d1")
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert status["refused"] == {}


async def test_clocks_that_differ_and_agents_with_another_secret_are_told() -> None:
    """Each as one incident that names the machine; the node is used all the same."""
    async with stub_cluster("p0", "d0") as cluster:
        for host in ("lost.example", "lost.example"):
            headers = {"Authorization": "Bearer wrong", HOST_HEADER: host}
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await cluster.session.ws_connect(f"{cluster.url}/internal/agents", headers=headers)
        told = description("d1", host="late.example", engine_url="http://127.0.0.1:1")
        hello = AgentHello(description=told, role="decode", unix_s=time.time() - 3600)
        await cluster.agents["d0"].say(hello)
        await until(lambda: "d1" in cluster.router.core.membership.nodes)
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        texts = {found["kind"]: found["text"] for found in status["incidents"]}
        assert "late.example is 3600.0 s behind the router's; run NTP" in texts["clock_skew"]
        strangers = [f for f in status["incidents"] if f["kind"] == "refused"]
        assert [found["count"] for found in strangers] == [1]
        assert "lost.example has another cluster secret" in strangers[0]["text"]


async def test_a_death_is_announced_to_all_agents() -> None:
    """And the node is gone from placement."""
    async with stub_cluster("p0", "d0") as cluster:
        death = EngineDied(
            node="p0", incarnation="p0-1", exit_status=-9, likely_cause="killed", last_lines=()
        )
        await cluster.agents["p0"].say(death)
        told = PeerDied(incarnation="p0-1")
        await until(lambda: all(told in agent.frames for agent in cluster.agents.values()))
        response = await cluster.post()
        assert await response.read() == b"".join(SSE) + DONE
        assert "kv_transfer_params" not in cluster.engines["d0"].asked[0].body


async def test_an_agent_that_leaves_takes_its_node_out_and_brings_it_back() -> None:
    """Requests go to other nodes meanwhile."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        await cluster.agents["d0"].socket.close()
        nodes = cluster.router.core.membership.nodes
        await until(lambda: not nodes["d0"].is_usable)
        for _ in range(2):
            await (await cluster.post()).read()
        assert not cluster.engines["d0"].asked
        await cluster.engines["d0"].stop()
        await cluster.add_node("d0")
        assert nodes["d0"].is_usable


@pytest.mark.parametrize("frame", ["not json", '{"type":"unknown"}', '{"type":"state"}', "[]"])
async def test_a_frame_that_cannot_be_read_ends_the_connection(frame: str) -> None:
    """The node is out until its agent is back; the router serves on."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        agent = cluster.agents["d1"]
        await agent.socket.send_str(frame)
        async with asyncio.timeout(20):
            await agent.reading
        assert (await cluster.post()).status == 200


async def test_a_useless_engine_url_is_refused() -> None:
    """The agent is told what is wrong."""
    async with stub_cluster("p0") as cluster:
        agent = cluster.agents["p0"]
        other = description("p0", engine_url="unix:/tmp/x")
        await agent.say(AgentHello(description=other, role="prefill"))
        await until(lambda: any(isinstance(frame, RefuseNode) for frame in agent.frames))


async def test_loading_is_shown_until_the_node_is_there() -> None:
    """In the status, by node."""
    async with stub_cluster("p0") as cluster:
        await cluster.agents["p0"].say(LoadingProgress(node="d7", stage="weights", elapsed_s=2.0))
        await until(lambda: "d7" in cluster.router.agents.loading)
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert status["loading"]["d7"]["stage"] == "weights"
        await cluster.add_node("d7")
        assert not cluster.router.agents.loading


async def test_what_a_router_has_placed_is_told_to_those_that_are_there() -> None:
    """By the agent of each node that has told of others; what those have placed is in the
    status.
    """
    async with stub_cluster("p0", "d0", "d1") as cluster:
        agent = cluster.agents["d0"]
        core = cluster.router.core
        theirs = RouterLoad(decode_legs=2, committed_blocks=50, waiting_tokens=48)
        other = OtherRouter(name="other", index=1, load=theirs)

        async def hear(seen: RouterLoad) -> None:
            await agent.say(OtherRouters(node="d0", incarnation="d0-1", others=(other,), seen=seen))

        await hear(RouterLoad())
        await until(lambda: core.membership.nodes["d0"].foreign_blocks == 50)
        status = await (await cluster.session.get(cluster.url + "/internal/status")).json()
        assert status["nodes"]["d0"]["others"]["1"]["committed_blocks"] == 50
        assert status["nodes"]["d1"]["others"] == {}
        for _ in range(2):
            await (await cluster.post()).read()
        await cluster.idle()
        told = [frame for frame in agent.frames if isinstance(frame, TellLoad)]
        assert told == []
        core.membership.nodes["d1"].drain = Drain(restarts=False, due=0.0)
        core.membership.changed()
        await (await cluster.post()).read()
        await until(lambda: any(isinstance(frame, TellLoad) for frame in agent.frames))
        (first,) = (frame for frame in agent.frames if isinstance(frame, TellLoad))
        assert (first.incarnation, first.load.decode_legs) == ("d0-1", 1)
        await cluster.idle()
        await hear(first.load)
        await until(lambda: isinstance(agent.frames[-1], TellLoad) and agent.frames[-1] != first)
        assert agent.frames[-1].load == RouterLoad()


async def test_a_role_that_another_router_gave_is_an_incident() -> None:
    """And new work goes accordingly."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        await cluster.agents["d1"].say(
            NodeState(
                node="d1",
                incarnation="d1-1",
                phase="ready",
                role="prefill",
                role_epoch=1,
                free_blocks=10_000,
                total_blocks=10_000,
            )
        )
        await until(lambda: cluster.router.core.membership.nodes["d1"].role == "prefill")
        (incident,) = (i for i in cluster.router.incidents.shown() if i["kind"] == "flipped")
        assert incident["node"] == "d1"
        assert incident["text"] == "another router has made it a prefill node"

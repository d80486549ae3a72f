"""What the router remembers of what has happened to its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import SECRET, StubCluster, stub_cluster, until
from router_stubs.core_story import description

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.agent.messages import AgentHello, EngineDied, NodeState
from splitserve.orchestrator.router.incidents import (
    COMPARED_INCIDENTS,
    KEPT_INCIDENTS,
    REPEAT_S,
    TEXT_LIMIT_CHARACTERS,
    Incident,
    Incidents,
)

if TYPE_CHECKING:
    from splitserve.orchestrator.router.incidents import Kind

OPERATOR = {"Authorization": f"Bearer {operator_token(SECRET)}"}


class Clock:
    """A wall clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_the_latest_are_kept() -> None:
    """A bounded number, with bounded texts, each with an id of its own."""
    incidents = Incidents(Clock())
    for number in range(KEPT_INCIDENTS + 50):
        incidents.note("died", f"node-{number}", "x" * 2 * TEXT_LIMIT_CHARACTERS)
    shown = incidents.shown()
    assert len(shown) == KEPT_INCIDENTS
    assert shown[-1]["node"] == f"node-{KEPT_INCIDENTS + 49}"
    assert {len(incident["text"]) for incident in shown} == {TEXT_LIMIT_CHARACTERS}
    assert len({incident["id"] for incident in shown}) == KEPT_INCIDENTS


def test_what_happens_again_is_counted() -> None:
    """Within a minute, among the latest ones, and with nothing else of that node between; whoever
    listens is told each time.
    """
    clock, heard = Clock(), list[tuple[str, int]]()
    incidents = Incidents(clock)

    def hear(incident: Incident) -> None:
        heard.append((incident.node, incident.count))

    incidents.on_incident = hear
    for node in ("a", "b", "a"):
        incidents.note("refused", node, "differs")
    clock.now += REPEAT_S
    incidents.note("refused", "a", "differs")
    assert heard == [("a", 1), ("b", 1), ("a", 2), ("a", 1)]
    for number in range(COMPARED_INCIDENTS):
        incidents.note("refused", f"other {number}", "differs")
    incidents.note("refused", "a", "differs")
    assert heard[-1] == ("a", 1)
    for kind in ("joined", "died", "joined", "joined"):
        incidents.note(kind, "a", "so it is")  # type: ignore[arg-type]
    assert [count for _, count in heard[-4:]] == [1, 1, 1, 2]


async def incidents_of(cluster: StubCluster) -> list[dict[str, Any]]:
    """As the status shows them, without the times."""
    answer = await cluster.session.get(f"{cluster.url}/internal/status", headers=OPERATOR)
    return (await answer.json())["incidents"]


def kinds_of(cluster: StubCluster, node: str) -> list[Kind]:
    return [i["kind"] for i in cluster.router.incidents.shown() if i["node"] == node]


async def test_what_becomes_of_nodes_is_noted() -> None:
    """Joining, drains, flips, refusals, deaths, breakers, lost connections; in order, with the
    reasons.
    """
    async with stub_cluster("p0", "d0", "d1", policy={"breaker": {"failures": 1}}) as cluster:
        first, *joined = await incidents_of(cluster)
        assert first["kind"] == "router_started"
        assert [(i["kind"], i["node"]) for i in joined] == [
            ("joined", "p0"),
            ("joined", "d0"),
            ("joined", "d1"),
        ]
        nodes = f"{cluster.url}/internal/nodes"
        flip = {"json": {"role": "prefill"}, "headers": OPERATOR}
        assert [(await cluster.session.post(f"{nodes}/d1/flip", **flip)).ok for _ in "ab"] == [
            True
        ] * 2
        drain = await cluster.session.post(f"{nodes}/d1/drain", json={}, headers=OPERATOR)
        assert drain.ok
        await cluster.agents["d1"].say(
            EngineDied(
                node="d1",
                incarnation="d1-1",
                exit_status=0,
                likely_cause="it was told to end",
                last_lines=(),
                was_ordered=True,
            )
        )
        await until(lambda: "left" in kinds_of(cluster, "d1"))
        assert kinds_of(cluster, "d1") == ["joined", "flipped", "draining", "left"]
        other = description("d1", incarnation="d1-2", transport="local", engine_url="http://h:1")
        await cluster.agents["d1"].say(AgentHello(description=other, role="decode"))
        await until(lambda: "refused" in kinds_of(cluster, "d1"))
        await cluster.engines["p0"].stop()
        await (await cluster.post()).read()
        await until(lambda: "breaker_open" in kinds_of(cluster, "p0"))
        await cluster.agents["d0"].socket.close()
        await until(lambda: "disconnected" in kinds_of(cluster, "d0"))
        last = (await incidents_of(cluster))[-1]
        assert (last["kind"], last["node"], last["count"]) == ("disconnected", "d0", 1)


async def test_silence_is_noted_once_and_so_is_its_end() -> None:
    """Although the core says again and again that a node is silent."""
    async with stub_cluster("p0", "d0", node_silence_limit_s=0.2) as cluster:
        await until(lambda: "silent" in kinds_of(cluster, "p0"))
        nodes = cluster.router.core.membership.nodes
        await until(lambda: nodes["d0"].is_silent)
        state = NodeState(node="p0", incarnation="p0-1", phase="ready", total_blocks=1)
        await cluster.agents["p0"].say(state)
        await until(lambda: "heard_again" in kinds_of(cluster, "p0"))
        assert kinds_of(cluster, "p0")[:3] == ["joined", "silent", "heard_again"]
        (silent,) = (
            i
            for i in cluster.router.incidents.shown()
            if i["node"] == "d0" and i["kind"] == "silent"
        )
        assert silent["count"] == 1


@pytest.mark.parametrize("texts", [("one", "two")])
def test_different_reasons_are_different_incidents(texts: tuple[str, str]) -> None:
    """Of the same node at the same time."""
    incidents = Incidents(Clock())
    for text in texts:
        incidents.note("died", "d0", text)
    assert [i["text"] for i in incidents.shown()] == list(texts)

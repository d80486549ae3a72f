"""In a large pool a few candidates are enough: the choice is what a look at all nodes gives."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.core_story import Driver

from splitserve.orchestrator.agent.messages import OtherRouter, OtherRouters, RouterLoad
from splitserve.orchestrator.core import events as ev
from splitserve.orchestrator.core import pool
from splitserve.orchestrator.core.breaker import BreakerLimits
from splitserve.orchestrator.core.effects import EndRequest, StartAlone, StartPair

if TYPE_CHECKING:
    from collections.abc import Callable

MARKS = [number.to_bytes(8, "big") for number in range(12)]
"""Of a prompt of 6,144 bytes."""
STEPS = 150
HOSTS = 3
"""Fewer nodes share one than the ties that are looked at."""
PLACEMENT = {"prefill_ahead_requests": 2, "prefill_batch_tokens": 300, "min_uncached_tokens": 40}


class Cluster(Driver):
    """Nodes of both roles, some of which differ in size, use their host's cache, or say nothing of
    their prefixes.
    """

    def __init__(self, nodes: list[tuple[str, int, bool]]) -> None:
        breaker = BreakerLimits(failures=2, open_s=1.0)
        super().__init__(placement=PLACEMENT, breaker=breaker, queue_limit_requests=4)
        self.lives = dict.fromkeys((name for name, _, _ in nodes), 1)
        self.settings = {
            name: {
                "total_blocks": blocks,
                "max_model_len": 100_000,
                "host": f"h{number % HOSTS}",
                "uses_cache": uses_cache,
                "reports_prefixes": True,
            }
            for number, (name, blocks, uses_cache) in enumerate(nodes)
        }
        for name in self.lives:
            self.begin(name)

    def begin(self, name: str) -> None:
        self.join(name, incarnation=self.life(name), **self.settings[name])
        self.say(name)

    def life(self, name: str) -> str:
        return f"{name}-{self.lives[name]}"

    def say(self, name: str, used: int = 0, **more: Any) -> None:
        total = self.settings[name]["total_blocks"]
        free = max(0, total - used)
        self.report(name, incarnation=self.life(name), free_blocks=free, total_blocks=total, **more)

    def hold(self, source: str, marks: int) -> None:
        """It has the first so many marks, and none of the others."""
        added = tuple((mark, 60 * (n + 1)) for n, mark in enumerate(MARKS[:marks]))
        if source in self.lives:
            self.do(ev.NodePrefixesReported(source, self.life(source), True, added, ()))
        else:
            self.do(ev.CachePrefixesReported(source, True, added, ()))


class Twins:
    """The same facts for two clusters: one looks at all nodes, the other at candidates."""

    def __init__(self, nodes: list[tuple[str, int, bool]]) -> None:
        self.plain, self.ranked = Cluster(nodes), Cluster(nodes)

    def both(self, act: Any) -> list[tuple[str, ...]]:
        """What follows, which must be the same."""
        outcomes = []
        for cluster, small in ((self.plain, 10_000), (self.ranked, 0)):
            pool.SMALL_POOL_NODES = small
            outcomes.append([seen(effect) for effect in act(cluster) or []])
        assert outcomes[0] == outcomes[1]
        return [each for each in outcomes[0] if each[0] != "other"]


def seen(effect: Any) -> tuple[str, ...]:
    """Where a request went, or that it ended."""
    if isinstance(effect, StartPair):
        return "pair", effect.request_id, effect.prefill.node, effect.decode.node
    if isinstance(effect, StartAlone):
        return "alone", effect.request_id, effect.decode.node
    if isinstance(effect, EndRequest):
        return "end", effect.timeline.request_id, effect.timeline.outcome
    return "other", type(effect).__name__


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SMALL_POOL_NODES", pool.SMALL_POOL_NODES)


@pytest.mark.parametrize("seed", range(60))
def test_candidates_are_enough(seed: int) -> None:
    """Requests come, are answered, fail and are cancelled, nodes report, restart and change their
    roles, prefixes and other routers come and go: both clusters give the same orders.
    """
    random = Random(seed)
    nodes = [("p0", 120, False), ("d0", 120, False)]
    for number in range(1, random.randint(2, 30)):
        blocks = random.choice([120] if seed % 2 else [40, 120, 400])
        nodes.append((f"{random.choice('pd')}{number}", blocks, random.random() < 0.4))
    twins = Twins(nodes)
    names = [name for name, _, _ in nodes]
    assert sum(step(twins, names, f"r{number}", random) for number in range(STEPS))


def step(twins: Twins, names: list[str], new: str, random: Random) -> int:
    """Something happens; returns how many requests are placed."""
    kind = random.choice(["ask"] * 7 + ["hold"] * 3 + ["leg"] * 5 + sorted(ACTS))
    if kind == "ask":
        asked = {
            "prompt_tokens": random.choice([20, 200, 900, 3_000]),
            "output_tokens": random.choice([1, 64]),
            "marks": tuple(MARKS[: random.randint(0, len(MARKS))]),
            "prompt_bytes": 6_144,
            "alone_because": random.choice(["", "", "", "n"]),
        }
        found = twins.both(lambda cluster: cluster.request(new, **asked))
    elif kind == "hold":
        source = random.choice([*names, *(f"h{n}" for n in range(HOSTS))])
        marks = random.randint(0, len(MARKS))
        found = twins.both(lambda cluster: cluster.hold(source, marks))
    elif kind == "leg":
        found = [each for event in leg_over(twins, random) for each in twins.both(telling(event))]
    else:
        name, amount = random.choice(names), random.randint(0, 60)
        found = twins.both(lambda cluster: ACTS[kind](cluster, name, amount))
    return sum(what[0] in ("pair", "alone") for what in found)


def telling(event: ev.Event) -> Callable[[Cluster], list[Any]]:
    return lambda cluster: cluster.do(event)


def leg_over(twins: Twins, random: Random) -> list[ev.Event]:
    """What may become of one of the legs that are out."""
    requests = [r for r in twins.plain.core.requests.values() if r.has_decode_leg]
    if not requests:
        return []
    request = random.choice(requests)
    name, decode = request.id, request.decode_attempt
    events: list[list[ev.Event]] = [
        [ev.ClientGone(name)],
        [ev.DecodeFailed(name, decode, "broken")],
    ]
    if request.has_prefill_leg:
        prefill = request.prefill_attempt
        answered = ev.PrefillAnswered(name, prefill, 200)
        events += [[answered], [answered], [ev.PrefillFailed(name, prefill, "broken")]]
    elif request.timeline.first_data is None:
        events += [[ev.FirstDataArrived(name, decode)]] * 3
    else:
        events += [[ev.DecodeEnded(name, decode)]] * 3
    return random.choice(events)


def _restart(cluster: Cluster, name: str, _: int) -> list[Any]:
    effects = cluster.do(ev.NodeDied(name, cluster.life(name), "killed"))
    cluster.lives[name] += 1
    cluster.begin(name)
    return effects


def _flip(cluster: Cluster, name: str, _: int) -> list[Any]:
    role = "decode" if cluster.node(name).role == "prefill" else "prefill"
    return cluster.do(ev.FlipRequested(0, name, role))


def _others(cluster: Cluster, name: str, amount: int) -> list[Any]:
    """Another router has something there, or has gone."""
    load = RouterLoad(
        prefill_legs=amount % 3,
        prefill_tokens=amount % 3 * 200,
        decode_legs=amount % 4,
        committed_blocks=amount,
        waiting_tokens=400 if amount % 5 == 0 else 0,
    )
    others = (OtherRouter(name="other", index=1, load=load),) if amount % 4 else ()
    told = OtherRouters(node=name, incarnation=cluster.life(name), others=others, seen=RouterLoad())
    return cluster.do(ev.OtherRoutersReported(told))


ACTS = {
    "others": _others,
    "report": lambda cluster, name, amount: cluster.say(name, used=amount),
    "busy": lambda cluster, name, amount: cluster.say(name, used=amount, running=amount),
    "time": lambda cluster, _, amount: cluster.pass_time(amount / 40),
    "restart": _restart,
    "flip": _flip,
}


def test_an_idle_cluster_takes_turns() -> None:
    """Nodes that are equally busy and have nothing are chosen in turns, as in a small pool."""
    nodes = [(f"{role}{n}", 400, False) for role in "pd" for n in range(40)]
    twins = Twins(nodes)
    orders = [
        twins.both(lambda cluster, n=n: cluster.request(f"r{n}", prompt_tokens=100))[0]
        for n in range(80)
    ]
    assert {order[3] for order in orders} == {f"d{n}" for n in range(40)}
    assert [order[2:] for order in orders[:40]] == [order[2:] for order in orders[40:]]

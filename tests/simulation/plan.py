"""What one run consists of, as data: the cluster, what clients ask and when, and the faults.

A seed gives a plan; a failing plan, made smaller, is a scenario file.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from simulation.memory import BLOCK_TOKENS, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable

ROUTER = "router"
LOAD_S = 4.0
"""Requests arrive and faults begin within this time."""
LONGEST_FAULT_S = 15.0
READY_S = 1.0
"""The router knows every node then, if nothing goes wrong."""
SLOW_WRITE_S = 3.0
"""A writer that runs may need longer for its fence than the shortest ``fence_timeout_s``."""
HEAVY = "heavy"
"""The tenant that has twice the usual share."""
REQUESTS = (10, 18)
FAULTS = (4, 9)
FLIPS_LIMIT = 6


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client's request."""

    number: int
    at: float
    prompt_tokens: int
    max_tokens: int
    streaming: bool = True
    is_misfit: bool = False
    """The prefill node's tokenizer makes other tokens of its prompt."""
    can_continue: bool = False
    """Another node may go on in the middle of the answer."""
    tenant: str = ""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something goes wrong. What the fields mean for each kind: ``faults.py``."""

    at: float
    kind: str
    node: str = ""
    other: str = ""
    seconds: float = 0.0
    strength: float = 0.0
    request: int = 0
    """Number of an ``Ask``."""


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run. The seed gives the delays, and every choice that is not made here."""

    seed: int
    prefill_blocks: tuple[int, ...]
    """Of each prefill node."""
    decode_blocks: tuple[int, ...]
    write_s: float
    """Longest time that a page takes to land."""
    can_revoke: bool
    """The transport's bytes are placed by the receiver."""
    is_one_host: bool
    """Engines watch each other's processes."""
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    step_s: float = 0.002
    """What each step of an engine takes beside its tokens."""
    queue_limit_requests: int = 8
    fence_timeout_s: float = 12.0
    deadline_s: float = 12.0
    """Of a request; it waits and looks for its first token a part of that."""
    has_prefixes: bool = False
    """Engines say what their prefix caches have, and most prompts have marks."""

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes."""
        prefill = [f"prefill-{n}" for n in range(len(self.prefill_blocks))]
        return prefill + [f"decode-{n}" for n in range(len(self.decode_blocks))]


def random_plan(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(f"plan {seed}")
    prefill = tuple(random.randint(12, 40) for _ in range(random.randint(1, 3)))
    decode = tuple(random.randint(12, 40) for _ in range(random.randint(1, 3)))
    can_revoke = random.random() < 0.3
    write_s = random.choice([0.002, 0.05, 0.5, SLOW_WRITE_S])
    worst = random.random() * LOAD_S
    asks = tuple(
        random_ask(random, number, min(prefill + decode), _moment(random, worst))
        for number in range(random.randint(*REQUESTS))
    )
    empty = Plan(
        seed=seed,
        prefill_blocks=prefill,
        decode_blocks=decode,
        write_s=write_s,
        can_revoke=can_revoke,
        is_one_host=not can_revoke and random.random() < 0.4,
        asks=asks,
        faults=(),
        step_s=random.choice([0.002, 0.002, 0.05]),
        queue_limit_requests=random.choice([2, 8, 256]),
        fence_timeout_s=12.0 if write_s == SLOW_WRITE_S else random.choice([1.0, 12.0]),
        has_prefixes=bool(seed % 2),
    )
    count = random.randint(*FAULTS)
    faults = tuple(random_fault(random, empty, _moment(random, worst)) for _ in range(count))
    flips = _flips(seed, empty, lambda random: _moment(random, worst))
    return msgspec.structs.replace(empty, faults=(*faults, *flips))


def drain_plan(seed: int) -> Plan:
    """Nodes that all are ready restart by order, also the last of a pool, and change their roles,
    while others are slow and preempt: nothing that fails a request.
    """
    random = Random(f"drains {seed}")
    prefill = tuple(random.randint(12, 40) for _ in range(random.randint(1, 2)))
    decode = tuple(random.randint(12, 40) for _ in range(random.randint(1, 2)))
    asks = tuple(
        random_ask(random, number, min(prefill + decode), READY_S + random.random() * LOAD_S)
        for number in range(random.randint(*REQUESTS))
    )
    empty = Plan(
        seed=seed,
        prefill_blocks=prefill,
        decode_blocks=decode,
        write_s=random.choice([0.002, 0.05, 0.5]),
        can_revoke=random.random() < 0.3,
        is_one_host=False,
        asks=asks,
        faults=(),
        step_s=random.choice([0.002, 0.002, 0.05]),
        queue_limit_requests=256,
        deadline_s=60.0,
        has_prefixes=bool(seed % 2),
    )
    faults = tuple(
        random.choice(_HARMLESS)(random, empty, READY_S + random.random() * LOAD_S)
        for _ in range(random.randint(*FAULTS))
    )
    flips = _flips(seed, empty, lambda random: READY_S + random.random() * LOAD_S)
    return msgspec.structs.replace(empty, faults=(*faults, *flips))


def _flips(seed: int, plan: Plan, moment: Callable[[Random], float]) -> list[Fault]:
    """Changes of roles, in every second run. They are drawn by themselves, so that a seed's other
    faults are what they were before there were flips.
    """
    if seed % 4 in (1, 2):
        return []
    random = Random(f"flips {seed}")
    return [
        Fault(
            moment(random),
            "flip",
            node=random.choice(plan.nodes),
            strength=random.choice([0.0, 1.0]),
        )
        for _ in range(random.randint(1, FLIPS_LIMIT))
    ]


def _moment(random: Random, worst: float) -> float:
    """Half of what happens comes at about the same time."""
    if random.random() < 0.5:
        return random.random() * LOAD_S
    return worst + random.expovariate(1 / 0.1)


def random_ask(random: Random, number: int, smallest_blocks: int, at: float) -> Ask:
    """A request that fits on every node."""
    most = smallest_blocks * BLOCK_TOKENS // 2
    tokens = min(most, random.choice([1, 3, 4, 5, 8, 9, random.randint(1, most)]))
    room = smallest_blocks * BLOCK_TOKENS - tokens
    answer = random.choice([random.randint(1, 6), random.randint(1, min(40, room))])
    assert blocks_for(tokens + answer) <= smallest_blocks
    streaming = random.random() < 0.8
    return Ask(
        number,
        at,
        tokens,
        answer,
        streaming=streaming,
        is_misfit=random.random() < 0.05,
        can_continue=streaming and random.random() < 0.8,
        tenant=random.choice(["", "light", HEAVY, HEAVY]),
    )


def random_fault(random: Random, plan: Plan, at: float) -> Fault:
    """Any fault."""
    kind = random.choices(list(_DRAWN), [weight for weight, _ in _DRAWN.values()])[0]
    return _DRAWN[kind][1](random, plan, at)


def _seconds(random: Random) -> float:
    return min(LONGEST_FAULT_S, random.expovariate(1 / 3))


def _on_node(kind: str, strengths: tuple[float, ...] = (0.0,)) -> Callable[..., Fault]:
    def draw(random: Random, plan: Plan, at: float) -> Fault:
        return Fault(
            at,
            kind,
            node=random.choice(plan.nodes),
            seconds=_seconds(random),
            strength=random.choice(strengths),
        )

    return draw


def _everywhere(kind: str, strengths: tuple[float, ...] = (0.0,)) -> Callable[..., Fault]:
    def draw(random: Random, plan: Plan, at: float) -> Fault:
        return Fault(at, kind, seconds=_seconds(random), strength=random.choice(strengths))

    return draw


def _partition(random: Random, plan: Plan, at: float) -> Fault:
    node, other = random.sample([ROUTER, *plan.nodes], 2)
    return Fault(at, "partition", node=node, other=other, seconds=_seconds(random))


def _on_request(kind: str) -> Callable[..., Fault]:
    def draw(random: Random, plan: Plan, at: float) -> Fault:
        number = random.randrange(len(plan.asks))
        soon = plan.asks[number].at + random.expovariate(1 / 0.05)
        return Fault(soon, kind, request=number)

    return draw


def _stream_struck(random: Random, plan: Plan, at: float) -> Fault:
    ask = random.choice(plan.asks)
    soon = ask.at + random.expovariate(1 / (0.05 + 10 * plan.step_s))
    return Fault(
        soon,
        "stream struck",
        request=ask.number,
        seconds=_seconds(random),
        strength=random.choice([0.0, 1.0]),
    )


def _hang(random: Random, plan: Plan, at: float) -> Fault:
    return Fault(at, "hang", seconds=LONGEST_FAULT_S)


def _drain(*patience_s: float) -> Callable[..., Fault]:
    def draw(random: Random, plan: Plan, at: float) -> Fault:
        node = random.choice(plan.nodes)
        return Fault(at, "drain", node=node, seconds=random.choice(patience_s))

    return draw


def _router_killed(random: Random, plan: Plan, at: float) -> Fault:
    return Fault(at, "router killed", seconds=random.uniform(0.2, 3.0))


_DRAWN: dict[str, tuple[int, Callable[[Random, Plan, float], Fault]]] = {
    "kill": (4, _on_node("kill")),
    "pause": (4, _on_node("pause")),
    "slow": (3, _on_node("slow", (3.0, 20.0, 200.0))),
    "partition": (4, _partition),
    "drop": (2, _everywhere("drop", (0.1, 0.5))),
    "duplicate": (2, _everywhere("duplicate", (0.3,))),
    "reorder": (2, _everywhere("reorder", (0.3,))),
    "delay": (2, _everywhere("delay", (0.01, 0.5))),
    "leave": (4, _on_request("leave")),
    "prefill leg broken": (3, _on_request("prefill leg broken")),
    "decode leg broken": (3, _on_request("decode leg broken")),
    "preempt": (5, _on_node("preempt")),
    "agent reconnects": (2, _on_node("agent reconnects")),
    "stream struck": (3, _stream_struck),
    "hang": (2, _hang),
    "drain": (3, _drain(0.0, 1.0, 10.0)),
    "router killed": (1, _router_killed),
}
"""Per kind how often it is drawn, and how."""
_HARMLESS = (_drain(0.0), _drain(0.0), _on_node("slow", (3.0, 20.0)), _on_node("preempt"))

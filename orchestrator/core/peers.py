"""Other routers of the same nodes: what they have placed there, and how much room this one leaves
them. They speak through the nodes' agents only, so what is known of them is some milliseconds old.

Decode engines stay the arbiters of their pages: where two routers have promised the same pages, the
later request waits in the engine. That the promises fit nearly always is the purpose of the rules
here:

* What others have placed counts as if this router had placed it.
* Of the free room, a router takes at most its part until the others have heard of it.
* A router that has requests waiting and holds less than another one goes first; the others leave
  it what its first request needs, so that it does not starve beside one that fills every gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.orchestrator.agent.messages import RouterLoad
from splitserve.orchestrator.core.effects import TellLoad

if TYPE_CHECKING:
    from collections.abc import Iterable

    from splitserve.orchestrator.agent.messages import OtherRouter
    from splitserve.orchestrator.core.effects import Effect
    from splitserve.orchestrator.core.membership import Node

NO_LOAD = RouterLoad()
SMALL_SHARE = 1 / 32
"""Of a node's blocks: a change of less, which nobody waits for, is told with the next report."""


@dataclass(slots=True)
class Others:
    """What one node's agent has told of the other routers, of which there is at least one."""

    routers: tuple[OtherRouter, ...]
    own_index: int
    seen: RouterLoad
    """What they know of this router."""
    prefill_legs: int = 0
    prefill_tokens: int = 0
    decode_legs: int = 0
    own_prompt_tokens: int = 0
    blocks: int = 0
    least_legs: tuple[int, int] | None = None
    """Of those with requests waiting, the one with the fewest prefill legs: (legs, index)."""
    least_blocks: tuple[int, int, int] | None = None
    """The same by committed blocks: (blocks, index, tokens of the request that waits)."""

    def __post_init__(self) -> None:
        for router in self.routers:
            load = router.load
            self.prefill_legs += load.prefill_legs
            self.prefill_tokens += load.prefill_tokens
            self.decode_legs += load.decode_legs
            self.own_prompt_tokens += load.own_prompt_tokens
            self.blocks += load.committed_blocks
        waiting = [(router.load, router.index) for router in self.routers]
        waiting = [(load, index) for load, index in waiting if load.waiting_tokens]
        self.least_legs = min(((load.prefill_legs, i) for load, i in waiting), default=None)
        self.least_blocks = min(
            ((load.committed_blocks, i, load.waiting_tokens) for load, i in waiting), default=None
        )

    def is_first_for_slot(self, prefill_legs: int) -> bool:
        """Whether this router, with so many prefill legs there, need not leave a slot for
        another.
        """
        return self.least_legs is None or (prefill_legs, self.own_index) < self.least_legs

    def left_tokens(self, committed_blocks: int) -> int:
        """Tokens of the request for which this router, with so many blocks there, leaves room."""
        least = self.least_blocks
        if least is None or (committed_blocks, self.own_index) < least:
            return 0
        return least[2]

    def is_part(self, blocks: int, free_blocks: int, committed_blocks: int) -> bool:
        """Whether ``blocks``, with what the others have not heard of yet, are at most this router's
        part of what was free before. A single request may be more.
        """
        unseen = committed_blocks - self.seen.committed_blocks
        if unseen <= 0:
            return True
        return (unseen + blocks) * (1 + len(self.routers)) <= free_blocks + unseen


class Peers:
    """What this router knows of the others, and what they have been told of it."""

    def __init__(self) -> None:
        self.index = 0
        """This router's number."""
        self._told: dict[Node, RouterLoad] = {}
        """By node that has others: the load that its agent was told last."""
        self._touched: dict[Node, bool] = {}
        """Nodes whose load may have to be told, and whether a small change has to be."""

    def hear(self, node: Node, routers: tuple[OtherRouter, ...], seen: RouterLoad) -> None:
        """The node's agent has said who else is there."""
        if not routers:
            self.forget(node)
            node.note_others(None)
            return
        node.note_others(Others(routers, self.index, seen))
        self._told.setdefault(node, seen)
        self._touched.setdefault(node, False)

    def touch(self, node: Node, *, is_due: bool = False) -> None:
        """Something was placed on the node or given back; ``is_due``: it has reported."""
        if node.others is not None:
            self._touched[node] = is_due or self._touched.get(node, False)

    def forget(self, node: Node) -> None:
        """Nobody need be told of the node."""
        self._told.pop(node, None)
        self._touched.pop(node, None)

    def orders(self, waiting_tokens: int) -> list[Effect]:
        """What the others have to hear now, ``waiting_tokens`` being those of the first request
        that waits. One order at a time is under way to each node: what has
        changed meanwhile is told with the next one.
        """
        effects: list[Effect] = []
        for node, is_due in list(self._touched.items()):
            told = self._told[node]
            assert node.others is not None
            if node.others.seen != told:
                continue  # Its answer will touch the node again
            del self._touched[node]
            load = RouterLoad(
                prefill_legs=node.prefill_legs,
                prefill_tokens=node.prefill_tokens,
                decode_legs=node.decode_legs,
                own_prompt_tokens=node.own_prompt_tokens,
                committed_blocks=node.committed_blocks,
                waiting_tokens=waiting_tokens,
            )
            if load != told and (is_due or _matters(load, told, node)):
                self._told[node] = load
                effects.append(TellLoad(node.name, node.description.incarnation, load))
        return effects

    @property
    def has_news(self) -> bool:
        """Whether there may be orders."""
        return bool(self._touched)

    def is_lowest(self, nodes: Iterable[Node]) -> bool:
        """Whether no router with a lower number is there, as far as nodes say."""
        return all(
            self.index <= router.index
            for node in nodes
            if node.others is not None
            for router in node.others.routers
        )

    @staticmethod
    def count(nodes: Iterable[Node]) -> int:
        """How many routers there are, this one included."""
        return 1 + max((len(n.others.routers) for n in nodes if n.others is not None), default=0)


def _matters(load: RouterLoad, told: RouterLoad, node: Node) -> bool:
    """Whether the others should hear at once of a change: of slots, of many blocks, and of any
    while requests wait somewhere.
    """
    assert node.others is not None
    waits = load.waiting_tokens or told.waiting_tokens or node.others.least_blocks is not None
    blocks = abs(load.committed_blocks - told.committed_blocks)
    return (
        bool(waits)
        or load.prefill_legs != told.prefill_legs
        or load.own_prompt_tokens != told.own_prompt_tokens
        or blocks >= SMALL_SHARE * node.description.total_blocks
    )

"""What engines have in their prefix caches, and what the router is told of it.

A modelled cache saves no work, it only says what it holds: where a prompt goes depends on it, and
nothing else may.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from simulation.memory import BLOCK_TOKENS
from splitserve.kv_transfer.prefix_marks import MARK_OFFSETS, split_digests
from splitserve.orchestrator.core import events as ev

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.cluster import Cluster, Node

TOPICS = 4
"""Prompts of a topic have all marks in common; those of the first have none."""
MARKS = 4
CACHE_LIMIT_BLOCKS = 16


def marks_of(number: int) -> tuple[bytes, int]:
    """(digests, bytes) of the prompt of a request with that number."""
    topic = number % TOPICS
    if not topic:
        return b"", 0
    digests = (f"mark{topic:02}{mark:02}".encode() for mark in range(MARKS))
    return b"".join(digests), MARK_OFFSETS[MARKS - 1]


class PrefixCache:
    """Full blocks of the prompts that one engine computed last."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def has(self, block: bytes) -> bool:
        """Whether it is there."""
        return block in self._blocks

    def take(self, prompt: Sequence[int]) -> list[bytes]:
        """The prompt's full blocks, which are there now; older ones are not. The end of a prompt
        goes before its beginning.
        """
        blocks = [
            repr(prompt[: (number + 1) * BLOCK_TOKENS]).encode()
            for number in range(len(prompt) // BLOCK_TOKENS)
        ]
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > CACHE_LIMIT_BLOCKS:
            self._blocks.popitem(last=False)
        return blocks


def report(cluster: Cluster, node: Node) -> None:
    """The agent asks its engine and tells the router, as ``PrefixReports`` does."""
    engine = node.engine
    if engine is None or not (node.router_life and node.is_welcome):
        return
    found = engine.legs._prefixes(node.begins_anew)
    told = ev.NodePrefixesReported(
        node.name,
        engine.incarnation,
        found.is_first,
        tuple(zip(split_digests(found.added), found.tokens, strict=True)),
        tuple(split_digests(found.removed)),
    )
    node.begins_anew = False
    if (told.is_first or told.added or told.removed) and not cluster.tell(node, told):
        node.begins_anew = True


def differences(cluster: Cluster) -> list[str]:
    """What the router knows and engines do not have, or the other way round, once all is told."""
    core = cluster.router.core
    known = {source: set(marks) for source, marks in core.prefixes._marks.items()}
    found = []
    for name, member in core.membership.nodes.items():
        engine = cluster.nodes[name].engine
        life = member.description.incarnation
        marks = known.pop(life, set())
        if engine is None or engine.incarnation != life or engine.legs._held is None:
            continue
        held = set(engine.legs._held._held)
        if marks != held:
            found.append(f"{life} holds {sorted(held)}, not {sorted(marks)}")
    return found + [f"marks of {source} are left" for source in known]

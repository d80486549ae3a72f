"""What a run is worth. Pure: stories and faults in, bars out.

A fault touches a request when it lasts, after-effects included, at some moment of the request's
life, and hits the router, a node that the request was on, or, when it was tried more than once or
the router has forgotten it, any node (the router remembers only the last attempt's). A request that
never had a place is touched when at some moment of its life no node of one pool was whole.

Faults of anything but the router and the nodes, the cache and its stores above all, touch no
request: they excuse nothing.

It is touched *late* when such a fault began after its first token, whatever happened before, and
*early* when all of them had begun before it. A *spare* is another node of the touched node's pool
without any fault in the request's life; the router has none.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chaos.faults import Fault
    from chaos.load import Story

ROUTER = "router"
EARLY_SUCCESS_SHARE = 0.95
_GIVES_RETRY_AFTER = (429, 503)


class Outcome(Enum):
    """How a request ended, as its client saw it."""

    OK = "ok"
    LEFT = "left by the client"
    REFUSED = "refused (429, 503)"
    ERROR = "error status"
    BROKEN = "error event in the stream"
    RESET = "connection reset"
    HANG = "hang"
    WRONG = "wrong text"
    UGLY = "no OpenAI error"


class Touch(Enum):
    """What the faults had to do with it."""

    NONE = "untouched"
    EARLY_SPARED = "before its first token, with a spare node"
    EARLY = "before its first token, without a spare node"
    LATE = "after its first token"
    ROUTER = "by a fault of the router"


@dataclass(frozen=True)
class Judged:
    """One request and what was found."""

    story: Story
    outcome: Outcome
    touch: Touch
    faults: tuple[Fault, ...]
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """The bars. ``violations`` is empty when the run passed."""

    judged: list[Judged]
    violations: list[str]
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Requests by touch and outcome."""
    early_success_share: float = 1.0


def outcome_of(story: Story) -> tuple[Outcome, str]:
    """How it ended, and what is wrong with that."""
    text_is_right = story.right.startswith(story.text)
    if not text_is_right:
        return Outcome.WRONG, f"{story.text!r} instead of {story.right!r}"
    if story.end == "deadline":
        return Outcome.HANG, "nothing ended it"
    if story.end == "left":
        return Outcome.LEFT, ""
    if story.end == "reset":
        return Outcome.RESET, story.detail
    if story.end == "unreadable":
        return Outcome.UGLY, story.detail
    if story.error is not None:
        return _failure(story)
    if not story.said_done:
        return Outcome.UGLY, "the stream ended without an error and without [DONE]"
    if story.text != story.right:
        return Outcome.WRONG, f"only {story.text!r} of {story.right!r}"
    return Outcome.OK, ""


def is_openai_error(value: Any) -> bool:
    """``{"error": {message, type, code}}`` with a code that is an HTTP status."""
    error = value.get("error") if isinstance(value, dict) else None
    return (
        isinstance(error, dict)
        and isinstance(error.get("message"), str)
        and bool(error["message"])
        and isinstance(error.get("type"), str)
        and isinstance(error.get("code"), int)
        and 400 <= error["code"] <= 599
    )


def _failure(story: Story) -> tuple[Outcome, str]:
    if not is_openai_error(story.error):
        return Outcome.UGLY, story.detail
    message = story.error["error"]["message"]
    if story.status == 200:
        return Outcome.BROKEN, message
    if story.status != story.error["error"]["code"]:
        return Outcome.UGLY, f"status {story.status} with code {story.error['error']['code']}"
    if story.status in _GIVES_RETRY_AFTER:
        if not re.fullmatch(r"[0-9]+", story.retry_after or ""):
            return Outcome.UGLY, f"status {story.status} without Retry-After: {message}"
        return Outcome.REFUSED, message
    return Outcome.ERROR, message


def touch_of(
    story: Story, faults: Sequence[Fault], nodes: Sequence[str]
) -> tuple[Touch, tuple[Fault, ...]]:
    """What the faults had to do with a request, and which of them."""
    during = [f for f in faults if f.began <= story.ended and _end(f) >= story.started]
    of_router = tuple(fault for fault in during if fault.node == ROUTER)
    if of_router:
        return Touch.ROUTER, of_router
    first = story.first_data if story.first_data is not None else story.ended
    if story.timeline and not story.nodes:
        hit = {fault.node for fault in during}
        pools = {_pool(node) for node in nodes}
        bare = [p for p in pools if all(n in hit for n in nodes if _pool(n) == p)]
        return (Touch.EARLY, tuple(during)) if bare else (Touch.NONE, ())
    was_moved = not story.timeline or story.timeline.get("attempts", 1) > 1
    touching = tuple(fault for fault in during if was_moved or fault.node in story.nodes)
    if not touching:
        return Touch.NONE, ()
    if any(fault.began > first for fault in touching):
        return Touch.LATE, touching
    hit = {fault.node for fault in during}
    for fault in touching:
        others = [n for n in nodes if _pool(n) == _pool(fault.node) and n != fault.node]
        if all(other in hit for other in others):
            return Touch.EARLY, touching
    return Touch.EARLY_SPARED, touching


def judge(
    stories: Iterable[Story],
    faults: Sequence[Fault],
    nodes: Sequence[str],
    found_afterwards: Sequence[str] = (),
) -> Verdict:
    """The whole run. ``found_afterwards``: what was not idle, did not end, or was in a log."""
    judged = []
    excusing = [fault for fault in faults if fault.node in (ROUTER, *nodes)]
    for story in stories:
        touch, by = touch_of(story, excusing, nodes)
        outcome, why = outcome_of(story)
        judged.append(Judged(story, outcome, touch, by, why))
    violations = [text for one in judged if (text := _violation(one))]
    violations += [f"{f.node} did not come back after: {f.kind}" for f in faults if f.is_lost]
    violations += found_afterwards
    share = _early_success_share(judged)
    if share < EARLY_SUCCESS_SHARE:
        violations.append(
            f"only {share:.1%} of those touched before their first token with a spare node succeed"
        )
    counts: dict[str, Counter[str]] = {}
    for one in judged:
        counts.setdefault(one.touch.value, Counter())[one.outcome.value] += 1
    return Verdict(judged, violations, {k: dict(v) for k, v in counts.items()}, share)


def _violation(one: Judged) -> str:
    """What this request proves to be wrong, whatever the others did; empty when nothing."""
    name = f"{one.story.id} ({one.touch.value})"
    if one.outcome in (Outcome.WRONG, Outcome.HANG, Outcome.UGLY):
        return f"{name}: {one.outcome.value}: {one.why}"
    if one.outcome is Outcome.RESET and one.touch is not Touch.ROUTER:
        return f"{name}: {one.outcome.value}: {one.why}"
    if one.touch is Touch.NONE and one.outcome not in (Outcome.OK, Outcome.LEFT):
        return f"{name}: {one.outcome.value}: {one.why}"
    return ""


def _early_success_share(judged: Iterable[Judged]) -> float:
    outcomes = [
        one.outcome
        for one in judged
        if one.touch is Touch.EARLY_SPARED and one.outcome is not Outcome.LEFT
    ]
    return outcomes.count(Outcome.OK) / len(outcomes) if outcomes else 1.0


def _end(fault: Fault) -> float:
    return float("inf") if fault.ended is None else fault.ended


def _pool(node: str) -> str:
    return node.partition("-")[0]

"""Orders that the core gives, in the imperative; the shell performs them in the list's order."""

from __future__ import annotations

from typing import Literal

import msgspec

from splitserve.orchestrator.agent.messages import NodeDescription, RouterLoad

Leg = Literal["prefill", "decode"]
DrainVerdict = Literal["draining", "unknown_node", "last_decode_node"]
FlipVerdict = Literal[
    "flipped",
    "same_role",
    "unknown_node",
    "leaving",
    "last_decode_node",
    "last_prefill_node",
    "not_flippable",
]

ForgetVerdict = Literal["forgotten", "takes_part"]


class AcceptNode(msgspec.Struct, frozen=True):
    """Tell the agent that its node takes part."""

    node: str


class RefuseNode(msgspec.Struct, frozen=True):
    """Tell the agent why its node does not take part."""

    node: str
    reason: str


class DrainNode(msgspec.Struct, frozen=True):
    """Tell the agent that its node gets no new work."""

    node: str
    incarnation: str
    restarts: bool


class DismissNode(msgspec.Struct, frozen=True):
    """Tell the agent that the router has nothing out on its node: its engine ends when it owes no
    peer anything, or ``at_once``.
    """

    node: str
    incarnation: str
    at_once: bool = False


class AnswerDrain(msgspec.Struct, frozen=True):
    """Tell the operator what became of the request to drain a node."""

    ticket: int
    verdict: DrainVerdict
    message: str


class TellLoad(msgspec.Struct, frozen=True):
    """Tell the other routers, by the node's agent, what this one has placed there."""

    node: str
    incarnation: str
    load: RouterLoad


class LearnRole(msgspec.Struct, frozen=True):
    """For people: another router has ordered the node to take that role."""

    node: str
    role: str


class SetRole(msgspec.Struct, frozen=True):
    """Tell the agent what new work of its node is for from now on, also in its engine's next
    lives.
    """

    node: str
    role: str
    epoch: int
    """Number of the order; an agent that has obeyed one with the same number or a higher one does
    not obey it.
    """


class AnswerFlip(msgspec.Struct, frozen=True):
    """Tell who asked what became of the request to change a node's role."""

    ticket: int
    verdict: FlipVerdict
    message: str


class AnswerForget(msgspec.Struct, frozen=True):
    """Tell the operator whether the node is forgotten."""

    ticket: int
    verdict: ForgetVerdict
    message: str


class StartPair(msgspec.Struct, frozen=True):
    """Send both legs at once."""

    request_id: str
    attempt: int
    transfer_id: str
    prefill: NodeDescription
    decode: NodeDescription


class StartAlone(msgspec.Struct, frozen=True):
    """Send the whole request to the decode node."""

    request_id: str
    attempt: int
    decode: NodeDescription


class CancelLeg(msgspec.Struct, frozen=True):
    """Close the leg's connection; the engine aborts the request."""

    request_id: str
    attempt: int
    leg: Leg


class DoubtLeg(msgspec.Struct, frozen=True):
    """The leg's node is silent: the leg has failed if nothing came on it for so long."""

    request_id: str
    attempt: int
    silence_limit_s: float


class StartPrefill(msgspec.Struct, frozen=True):
    """Send the prefill leg again, to another node; the decode leg stays where it is."""

    request_id: str
    attempt: int
    transfer_id: str
    prefill: NodeDescription
    decode: NodeDescription


class StartDecode(msgspec.Struct, frozen=True):
    """Send the decode leg again, to another node; the prefill leg, or what it left, stays."""

    request_id: str
    attempt: int
    transfer_id: str
    prefill: NodeDescription
    decode: NodeDescription


class RetargetTransfer(msgspec.Struct, frozen=True):
    """Tell the decode node's connector that another prefill node will deliver this transfer."""

    node: str
    transfer_id: str
    attempt: int
    prefill: NodeDescription
    reason: str


class FailTransfer(msgspec.Struct, frozen=True):
    """Tell the decode node's connector to stop waiting for this transfer and to compute the prompt
    itself.
    """

    node: str
    transfer_id: str
    reason: str


class AnnounceDeath(msgspec.Struct, frozen=True):
    """Tell agents that nothing of this incarnation can write any more."""

    incarnation: str
    node: str = ""
    """The one node to tell, which may have missed it; empty for all."""


class EndEngine(msgspec.Struct, frozen=True):
    """Tell the node's agent to kill the engine of that incarnation; its death is reported like any
    other.
    """

    node: str
    incarnation: str
    reason: str


class ReportBreaker(msgspec.Struct, frozen=True):
    """Tell people that a node's circuit breaker has changed, and after which fault."""

    node: str
    leg: Leg
    state: str
    reason: str


class AnswerError(msgspec.Struct, frozen=True):
    """End the client's answer with an error: a status when nothing was sent yet, else an error
    event.
    """

    request_id: str
    status: int
    message: str
    retry_after_s: int | None = None


class PassRefusal(msgspec.Struct, frozen=True):
    """Hand the decode engine's error answer to the client unchanged."""

    request_id: str
    attempt: int


class EndRequest(msgspec.Struct, frozen=True):
    """Nothing of this request is left: write its timeline and forget it."""

    timeline: Timeline


class Timeline(msgspec.Struct, kw_only=True, array_like=True):
    """What happened to one request, times in seconds of the core's clock; None for what did not
    happen.
    """

    request_id: str
    endpoint: str
    tenant: str
    streaming: bool
    prompt_tokens: int
    received: float
    decision: str = ""
    """``split``, or ``alone_`` and the reason: label of a counter, so one of a few names."""
    prefill_node: str = ""
    decode_node: str = ""
    expected_cached_tokens: int = 0
    """Tokens of the prompt that the node which computes it was expected to have, in its own count.
    """
    attempts: int = 0
    continuations: int = 0
    """How often another decode node went on in the middle of the answer."""
    queued: float | None = None
    """When it was put into the router's queue."""
    first_dispatched: float | None = None
    """When legs left for the first time."""
    dispatched: float | None = None
    """When those of the latest placement left."""
    redispatched: float | None = None
    """When the latest leg before the first data left that replaced a failed one."""
    prefill_answered: float | None = None
    prefill_status: int | None = None
    first_data: float | None = None
    last_data: float | None = None
    status: int = 0
    """What the client was told; 499 when it left before."""
    outcome: str = ""
    """``ok``, ``refused``, ``error`` or ``cancelled``."""
    reason: str = ""


Effect = (
    AcceptNode
    | RefuseNode
    | DrainNode
    | DismissNode
    | AnswerDrain
    | SetRole
    | LearnRole
    | TellLoad
    | AnswerFlip
    | AnswerForget
    | StartPair
    | StartAlone
    | StartPrefill
    | StartDecode
    | CancelLeg
    | DoubtLeg
    | RetargetTransfer
    | FailTransfer
    | AnnounceDeath
    | EndEngine
    | ReportBreaker
    | AnswerError
    | PassRefusal
    | EndRequest
)

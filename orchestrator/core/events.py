"""Facts that reach the core, in the past tense.

Events about one leg carry the attempt they belong to; the core ignores those of an attempt that it
has given up.
"""

from __future__ import annotations

import msgspec

from splitserve.orchestrator.agent.messages import NodeDescription, NodeState, OtherRouters


class NodeJoined(msgspec.Struct, frozen=True):
    """An agent said hello: first contact, a reconnect, or a restarted engine (new incarnation)."""

    description: NodeDescription
    role: str
    role_epoch: int = 0
    """Number of the order that gave it this role; 0 for none."""


class NodeReported(msgspec.Struct, frozen=True):
    """An agent sent the state of its engine."""

    state: NodeState


class NodeDisconnected(msgspec.Struct, frozen=True):
    """The agent's connection is gone; its engine may still be working."""

    node: str
    incarnation: str


class NodeDied(msgspec.Struct, frozen=True):
    """An engine's processes are proven gone."""

    node: str
    incarnation: str
    cause: str
    owed_nothing: bool = False
    """It was drained: nobody needs anything that it had."""


class NodePrefixesReported(msgspec.Struct, frozen=True):
    """An agent said which beginnings of prompts its engine's prefix cache has."""

    node: str
    incarnation: str
    is_first: bool
    """All that was said before is void."""
    added: tuple[tuple[bytes, int], ...]
    """(mark, tokens before it)."""
    removed: tuple[bytes, ...]


class OtherRoutersReported(msgspec.Struct, frozen=True):
    """An agent said what the other routers have placed on its node."""

    told: OtherRouters


class CachePrefixesReported(msgspec.Struct, frozen=True):
    """The cache of a host said which beginnings of prompts it has."""

    host: str
    is_first: bool
    added: tuple[tuple[bytes, int], ...]
    removed: tuple[bytes, ...]


class CacheLost(msgspec.Struct, frozen=True):
    """There is no connection to the cache of a host: what it has is not known."""

    host: str


class DrainRequested(msgspec.Struct, frozen=True):
    """An operator wants a node to take no new work, and to go when it owes nothing."""

    ticket: int
    """Names the operator's request in ``AnswerDrain``."""
    node: str
    restarts: bool
    """It comes back as a new incarnation; otherwise it leaves."""
    is_forced: bool = False
    """Also when no other decode node is usable."""
    timeout_s: float | None = None
    """Then it goes whatever it owes; None: as long as a request may take."""


class FlipRequested(msgspec.Struct, frozen=True):
    """A node is to take new work of another role, and none of its present one."""

    ticket: int
    """Names the request in ``AnswerFlip``."""
    node: str
    role: str
    is_forced: bool = False
    """Also when no other prefill node is usable."""


class ForgetRequested(msgspec.Struct, frozen=True):
    """An operator says that a node is no part of the cluster any more."""

    ticket: int
    """Names the request in ``AnswerForget``."""
    node: str


class Pinned(msgspec.Struct, frozen=True):
    """The nodes that a probe measures (``probing``)."""

    decode: str
    """Computes the answer, and the prompt too when there is no other node; of either role."""
    prefill: str = ""


class RequestArrived(msgspec.Struct, frozen=True):
    """A request that passed authentication and validation wants a place."""

    request_id: str
    endpoint: str
    prompt_tokens: int
    """Estimate, unless the prompt came as token ids."""
    output_tokens: int | None
    """What the client allowed, None when it named no limit."""
    streaming: bool
    alone_because: str
    """Why the request must not be split; empty when it may be."""
    tenant: str = ""
    can_continue: bool = False
    """Whether another node may go on in the middle of the answer: the result is exact."""
    marks: tuple[bytes, ...] = ()
    """Of the prompt (``kv_transfer/prefix_marks.py``)."""
    prompt_bytes: int = 0
    """What the places of the marks relate to."""
    pinned: Pinned | None = None
    """Where it goes, and nowhere else."""
    adapter: str = ""
    """The LoRA adapter that it asks for; empty for the model itself."""
    bound_to: str = ""
    """Incarnation of the one decode node that can answer it; empty when any can."""
    needs_kv: bool = True
    """False for what generates nothing: it is placed at once, whatever waits."""


class PrefillAnswered(msgspec.Struct, frozen=True):
    """The prefill engine answered its leg with this HTTP status."""

    request_id: str
    attempt: int
    status: int


class PrefillFailed(msgspec.Struct, frozen=True):
    """The prefill leg broke before an answer."""

    request_id: str
    attempt: int
    reason: str
    is_engine_fault: bool = True
    """False when the router itself could not send it."""


class FirstDataArrived(msgspec.Struct, frozen=True):
    """The decode engine's first data event (or its whole unstreamed answer) is here."""

    request_id: str
    attempt: int


class DecodeRefused(msgspec.Struct, frozen=True):
    """The decode engine answered with an error status before any data."""

    request_id: str
    attempt: int
    status: int


class DecodeFailed(msgspec.Struct, frozen=True):
    """The decode leg broke: no connection, closed too early, malformed answer."""

    request_id: str
    attempt: int
    reason: str
    is_engine_fault: bool = True
    """False when the router itself could not send it."""


class DecodeEnded(msgspec.Struct, frozen=True):
    """The decode engine's answer is complete."""

    request_id: str
    attempt: int


class ClientGone(msgspec.Struct, frozen=True):
    """The client closed its connection before the answer was complete."""

    request_id: str


class TimePassed(msgspec.Struct, frozen=True):
    """The moment that ``next_deadline`` named has come."""


class RouterDraining(msgspec.Struct, frozen=True):
    """No new requests from now on; those that run or wait may finish."""


class RouterStopping(msgspec.Struct, frozen=True):
    """No new requests from now on; those that run are ended."""


Event = (
    NodeJoined
    | NodeReported
    | NodeDisconnected
    | NodeDied
    | NodePrefixesReported
    | OtherRoutersReported
    | CachePrefixesReported
    | CacheLost
    | DrainRequested
    | FlipRequested
    | ForgetRequested
    | RequestArrived
    | PrefillAnswered
    | PrefillFailed
    | FirstDataArrived
    | DecodeRefused
    | DecodeFailed
    | DecodeEnded
    | ClientGone
    | TimePassed
    | RouterDraining
    | RouterStopping
)

"""What an agent and the router say to each other: JSON text frames on one WebSocket, one tagged
union per direction.
"""

from __future__ import annotations

import msgspec

from splitserve.kv_transfer.holdings import Holding
from splitserve.kv_transfer.prefix_marks import MARK_BYTES
from splitserve.kv_transfer.transfer_facts import Seconds, TransferFacts

Role = str
"""``prefill`` or ``decode``; what new work of a node is for."""


class AdapterDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that an engine has loaded."""

    path: str
    """As the engine names it."""
    content: str
    """Follows from the adapter's files: under one name, nodes may have different ones."""


class NodeDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while an engine process lives."""

    node: str
    pool: str
    """The YAML pool: ``prefill`` or ``decode``."""
    incarnation: str
    """New for every start of the engine; sessions and leases belong to it, never to an address."""
    engine_url: str
    """Base URL of the engine's OpenAI server, without a trailing slash, e.g.
    ``http://127.0.0.1:8101``.
    """
    engine_api_key: str
    """The key the engine asks for; only the router and the agent know it."""
    control_addresses: tuple[str, ...]
    """Control endpoint of each tensor-parallel rank's transfer thread, ``tcp://host:port``, in rank
    order.
    """
    model: str
    """The name clients use (``served-model-name``)."""
    max_model_len: int
    block_tokens: int
    total_blocks: int
    tensor_parallel: int
    transport: str
    fingerprint: dict[str, str]
    """Everything that must be equal for KV to be usable; nodes that differ are not paired."""
    host: str = ""
    """Name of the machine; its nodes share one cache."""
    version: str = ""
    """Of splitserve there; empty when it does not say."""
    reports_prefixes: bool = False
    """It says which beginnings of prompts its prefix cache has."""
    reports_transfers: bool = False
    """It says when what happened to its transfers."""
    uses_cache: bool = False
    """It loads what its host's cache has."""
    step_limit_tokens: int = 0
    """Tokens that a step computes at most; 0 in this and what follows: not known."""
    running_limit_requests: int = 0
    kv_bytes_per_token: int = 0
    vocabulary_tokens: int = 0
    engine: str = ""
    """Name and version."""
    hardware: str = ""
    """What it computes on, for people."""
    flip_obstacle: str = ""
    """Why the node cannot change its role; empty when it can."""
    adapters: dict[str, AdapterDescription] = {}
    """What its engine serves beside the model, by the name that clients use."""


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First frame of a connection, and again after each restart of the engine."""

    description: NodeDescription
    role: Role
    role_epoch: int = 0
    """Number of the order that gave it this role; 0: it has had none."""
    unix_s: float = 0.0
    """The machine's clock when this was sent; 0 when it does not say."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Twice a second, and at once when ``phase`` changes."""

    node: str
    incarnation: str
    phase: str
    """``loading``, ``ready``, ``draining`` or ``dead``."""
    role: Role = ""
    """What the agent takes its node's role to be; empty when it does not say."""
    role_epoch: int = 0
    """Number of the order that gave it this role."""
    restarts: bool = False
    """While ``draining``: another engine follows."""
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    open_transfers: int = 0
    leased_blocks: int = 0
    """Blocks that a finished request still holds for a peer."""
    quarantined_transfers: int = 0
    quarantined_blocks: int = 0
    """Blocks of cancelled receives whose writer has neither fenced nor died."""
    holdings: tuple[Holding, ...] = ()
    """What the engine holds for its peers, up to a bound."""
    holdings_left_out: int = 0
    overdue_writers: tuple[str, ...] = ()
    """Incarnations that owe this engine a fence for too long: their processes have to end."""
    counters: dict[str, float] = {}
    """Monotonic counters of the connector (pages and bytes sent and received, refused grants,
    recomputed tokens, ...).
    """


class NodePrefixes(msgspec.Struct, frozen=True, kw_only=True, tag="prefixes"):
    """Which beginnings of prompts the engine's prefix cache has, what has come and gone."""

    node: str
    incarnation: str
    is_first: bool = False
    """All that was said before is void."""
    added: bytes = b""
    """Concatenated digests of marks."""
    tokens: tuple[int, ...] = ()
    """Tokens before each of them."""
    removed: bytes = b""
    """Concatenated digests; they go before the others come."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what is no report."""
        if len(self.added) != MARK_BYTES * len(self.tokens) or len(self.removed) % MARK_BYTES:
            raise ValueError("marks and their tokens do not fit")


class NodeTransfers(msgspec.Struct, frozen=True, kw_only=True, tag="transfers"):
    """Transfers that have ended on the node, for the timelines of their requests."""

    node: str
    incarnation: str
    clock: str
    """Names the clock that the times are of; equal on processes that share one."""
    sent: Seconds
    """When this was sent, in seconds of that clock."""
    ended: tuple[TransferFacts, ...]


class LoadingProgress(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """What an engine that is still loading does, for people to read."""

    node: str
    stage: str
    elapsed_s: float


class RouterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one router has placed on a node and not taken back."""

    prefill_legs: int = 0
    prefill_tokens: int = 0
    """Estimated prompt tokens of those legs that have to be computed."""
    decode_legs: int = 0
    own_prompt_tokens: int = 0
    """Estimated prompt tokens that its decode legs compute on the node themselves."""
    committed_blocks: int = 0
    waiting_tokens: int = 0
    """Tokens, prompt and answer, of the request that has waited longest there for room on nodes; 0
    when none waits.
    """


class OtherRouter(msgspec.Struct, frozen=True, kw_only=True):
    """Another router, as an agent knows it."""

    name: str
    index: int
    load: RouterLoad


class OtherRouters(msgspec.Struct, frozen=True, kw_only=True, tag="other_routers"):
    """What the other routers that are connected have placed on the node. Said when a router comes
    or goes, and when one has told its load; that one hears it too, as an answer.
    """

    node: str
    incarnation: str
    others: tuple[OtherRouter, ...]
    seen: RouterLoad
    """What the router that reads this has told last."""


class EngineDied(msgspec.Struct, frozen=True, kw_only=True, tag="died"):
    """The engine's processes are proven gone: nothing of that incarnation can write any more."""

    node: str
    incarnation: str
    exit_status: int
    likely_cause: str
    last_lines: tuple[str, ...]
    was_ordered: bool = False
    """It ended because its node was drained."""
    owed_nothing: bool = False
    """And nobody needed anything that it had."""


FromAgent = (
    AgentHello
    | NodeState
    | NodePrefixes
    | NodeTransfers
    | LoadingProgress
    | OtherRouters
    | EngineDied
)


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The router accepted the node."""

    router: str
    """Its name: ids of its requests have it in them. Another one for each start of a router."""
    index: int = 0
    """Its number among the routers of the cluster."""


class RefuseNode(msgspec.Struct, frozen=True, kw_only=True, tag="refuse_node"):
    """The router will not use this node; the reason names both values that differ."""

    reason: str


class SetRole(msgspec.Struct, frozen=True, kw_only=True, tag="set_role"):
    """New work of this node is of another role from now on, unless the agent has obeyed an order
    with the same or a higher number before: then another router was faster, and its order stands.
    """

    role: Role
    epoch: int
    """One more than that of the order whose role this one changes."""


def is_of(request_id: str, router: str) -> bool:
    """Whether the router of that name gave the id, of a request or a transfer."""
    return f"{router}-" in request_id


class TellLoad(msgspec.Struct, frozen=True, kw_only=True, tag="tell_load"):
    """For the other routers: what this one has placed on the node; answered with
    ``OtherRouters``.
    """

    incarnation: str
    load: RouterLoad


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """The node gets no new work. Its engine runs on until the node is dismissed."""

    incarnation: str
    restarts: bool
    """When dismissed, the engine ends and another one is started; else the node leaves."""


class Dismiss(msgspec.Struct, frozen=True, kw_only=True, tag="dismiss"):
    """The router has nothing out on a draining node: its engine ends as soon as it owes no peer
    anything, or ``at_once``.
    """

    incarnation: str
    at_once: bool


class FailTransfer(msgspec.Struct, frozen=True, kw_only=True, tag="fail_transfer"):
    """The prefill leg of this transfer will not deliver (refused, lost): stop waiting for it."""

    transfer_id: str
    reason: str


class RetargetTransfer(msgspec.Struct, frozen=True, kw_only=True, tag="retarget_transfer"):
    """Another prefill node computes the prompt of this transfer: what was reserved for it is
    granted to that one, as a new attempt.
    """

    transfer_id: str
    attempt: int
    peer_incarnation: str
    peer_addresses: tuple[str, ...]
    reason: str


class PeerDied(msgspec.Struct, frozen=True, kw_only=True, tag="peer_died"):
    """An engine's processes are proven gone: what it could still have written is over."""

    incarnation: str


class EndEngine(msgspec.Struct, frozen=True, kw_only=True, tag="end_engine"):
    """Kill the engine of this incarnation, all of its processes; the next one is started as after
    any other death.
    """

    incarnation: str
    reason: str


ToAgent = (
    Welcome
    | RefuseNode
    | SetRole
    | TellLoad
    | Drain
    | Dismiss
    | FailTransfer
    | RetargetTransfer
    | PeerDied
    | EndEngine
)

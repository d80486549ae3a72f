"""The ``policy`` section: what the router decides by."""

from __future__ import annotations

from pydantic import Field

from splitserve.orchestrator.config.autotune_schema import AutotuneConfig
from splitserve.orchestrator.config.fields import Seconds, Section


class ConditionalConfig(Section):
    """When a request is not split."""

    min_uncached_tokens: int = Field(default=0, ge=0)
    """Prompts of which fewer tokens have to be computed are computed by the decode node alone; 0
    splits every request that can be split. Counted exactly for token ids, else estimated from the
    text's length, less what the decode node is expected to have cached.
    """


class BreakerConfig(Section):
    """When the router stops sending work to a node whose legs fail. Only an engine's own faults
    count: broken connections, malformed answers, 5xx other than 501, no first token in time; never
    4xx, clients that left or cancelled legs.
    """

    failures: int = Field(default=5, ge=1)
    """Faults in a row after which a node's breaker opens; so many within `window_s` open it too,
    when at least half of the legs that ended in that time failed. An open node gets no work while
    another node of its pool can be used.
    """

    window_s: Seconds = 10.0
    """Seconds for which a fault counts towards that share."""

    open_s: Seconds = 1.0
    """Seconds after which one request tries an open node; doubled after each try that fails. Also
    how long a node is the last choice after a single fault, and how often a node without any
    alternative is tried while it is open.
    """

    open_limit_s: Seconds = 30.0
    """Longest time in seconds between two tries."""


class PolicyConfig(Section):
    """Decisions of the router."""

    conditional: ConditionalConfig = ConditionalConfig()
    """When a request is not split."""

    breaker: BreakerConfig = BreakerConfig()
    """When a failing node gets no work."""

    autotune: AutotuneConfig = AutotuneConfig()
    """How nodes change roles when the load changes."""

    prefix_routing: bool = True
    """A prompt goes to the node that has its beginning in its cache, unless that node is busier
    than another by more tokens than this saves. Off: where beginnings are cached does not matter.
    """

    own_prompt_limit_tokens: int = Field(default=16_384, ge=0)
    """Prompt tokens that a decode node computes at a time for want of a usable prefill node; more
    would drown its streams. One prompt it always may. Others wait in the router's queue; a request
    whose prefill nodes have failed gets status 503.
    """

    max_attempts: int = Field(default=2, ge=1)
    """Nodes of each pool that one request is tried on. After the last prefill node the decode node
    computes the prompt itself; after the last decode node, also of a stream that was continued, the
    client gets an error.
    """

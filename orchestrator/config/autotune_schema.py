"""The section ``policy.autotune`` of the cluster YAML. What its keys must agree on is in
``autotune_checks.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from splitserve.orchestrator.config.fields import Seconds, Section


def _as_word(value: object) -> object:
    """YAML reads a bare ``on`` or ``off`` as a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Mode = Annotated[Literal["off", "advise", "on"], BeforeValidator(_as_word)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class AutotuneConfig(Section):
    """Whether the router keeps the ratio of prefill to decode nodes right while the load changes.
    Only nodes that may change roles (`splitserve flip`) take part, and each role keeps one.
    """

    mode: Mode = "off"
    """`advise`: the router watches and says in its log and in `splitserve status` which node should
    change its role, and why; `on`: it also does it.
    """

    profile: str | None = Field(default=None, min_length=1)
    """File that `splitserve profile` has written; by default the cluster's last one."""

    ttft_ms: Milliseconds | None = None
    """Target in milliseconds: a first token within so much. Needed unless `itl_ms` is given."""

    itl_ms: Milliseconds | None = None
    """Target in milliseconds: the tokens of an answer follow each other within so much, on average.
    """

    window_s: Seconds = 30.0
    """Seconds over which arrivals and lengths are counted together; also between two decisions.
    Shorter windows follow faster and err more: some dozen requests in each are enough.
    """

    change_interval_s: Seconds = 300.0
    """Least seconds between two changes; also how far the forecast looks ahead."""

    missed_interval_s: Seconds = 120.0
    """The same while more than a tenth of the requests miss a target."""

    warm_up_s: Seconds = 120.0
    """Seconds that a router watches after its start before it decides anything."""

    least_gain: float = Field(default=0.05, ge=0, le=1, allow_inf_nan=False)
    """Share of all requests that a change must bring within the targets, beyond what it costs."""

"""The sections ``ray`` and ``prefill.placement`` of the cluster YAML. Their keys are named like
Ray's own options, where Ray has one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from splitserve.orchestrator.config.fields import Seconds, Section

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SAME_HOST = "host"
"""The value of ``ray.pair_by`` that means Ray's own label of each host."""


class PlacementConfig(Section):
    """On which hosts of a Ray cluster the pool's nodes run, and what each of them takes there."""

    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """`SPREAD`: as many hosts as possible, `PACK`: as few as possible; `STRICT_SPREAD`: each node
    on a host of its own, `STRICT_PACK`: all of them on one. Not used with `ray.pair_by`.
    """

    num_cpus: int = Field(default=1, ge=1)
    """CPUs of each node, which Ray counts and the engine is started with; takes the place of
    `cpus`. The node is pinned where its host has no more CPUs than that.
    """

    num_gpus: int = Field(default=0, ge=0)
    """GPUs of each node, chosen by Ray; takes the place of `gpus` and needs `experimental_cuda:
    true`. 0: the engine computes on CPUs.
    """

    resources: dict[str, Amount] = Field(default={})
    """Custom resources of Ray that each node takes, by name: those that hosts were started with
    (`ray start --resources`).
    """

    label_selector: dict[str, str] = Field(default={})
    """Labels that the hosts of the pool must have (`ray start --labels`), as Ray writes conditions:
    `a`, `!a`, `in(a, b)`, `!in(a, b)`.
    """


class RayRouterConfig(Section):
    """On which hosts of the Ray cluster routers run, each on another one while there are enough."""

    label_selector: dict[str, str] = Field(default={})
    """Labels that the host must have. The first router runs on the host on which `up` is run, or on
    Ray's head where that is no host of the Ray cluster, if that host has them.
    """

    resources: dict[str, Amount] = Field(default={})
    """Custom resources of Ray that a router takes, by name."""


class RayConfig(Section):
    """How `launcher: ray` uses a Ray cluster. Every host needs `pip install
    'splitserve[ray]'`.
    """

    address: str = Field(default="auto", min_length=1)
    """Where Ray is: `auto` (the Ray cluster of this host, or what `RAY_ADDRESS` says), `HOST:PORT`
    of its head, or `ray://HOST:10001` from a machine that is no host of it (needs `pip install
    'ray[client]'`).
    """

    namespace: str = Field(default="", max_length=200, pattern=r"^[A-Za-z0-9_.-]*$")
    """Ray's namespace of the cluster's actors; empty: the cluster's name."""

    pair_by: str = ""
    """Keeps prefill and decode nodes together: prefill node i and decode node i share a host
    (`host`), or hosts with one value of a label of Ray (its key, such as `rack`). What the larger
    pool has more is dealt out to the pairs. Empty: pools are placed each by itself.
    """

    router: RayRouterConfig = RayRouterConfig()
    """Where routers run."""

    placement_timeout_s: Seconds = 60.0
    """Seconds that `up` waits for room that the Ray cluster has but others use at the moment."""

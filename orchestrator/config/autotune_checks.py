"""What the keys of ``policy.autotune`` must agree on, with each other and with the pools. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.config.flips import flip_obstacle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config.schema import ClusterConfig

_SECTION = "policy.autotune"


def autotune_problems(config: ClusterConfig) -> Iterator[str]:
    """One sentence per contradiction, each naming the key and what to change."""
    autotune = config.policy.autotune
    if autotune.mode == "off":
        return
    if autotune.ttft_ms is None and autotune.itl_ms is None:
        yield (
            f"{_SECTION}: give ttft_ms, itl_ms or both: without a target no ratio is better than "
            "another"
        )
    if autotune.missed_interval_s > autotune.change_interval_s:
        yield (
            f"{_SECTION}.missed_interval_s is {autotune.missed_interval_s:g}, longer than "
            f"change_interval_s {autotune.change_interval_s:g}: a missed target is no reason to "
            "wait longer"
        )
    if autotune.window_s > autotune.change_interval_s:
        yield (
            f"{_SECTION}.window_s is {autotune.window_s:g}, longer than change_interval_s "
            f"{autotune.change_interval_s:g}: there is one decision per window; shorten it"
        )
    nodes = config.prefill.replicas + config.decode.replicas
    if nodes < 3:
        yield (
            f"{_SECTION}.mode is {autotune.mode}, but with {nodes} nodes each is the last of its "
            "role and none can change it: raise prefill.replicas or decode.replicas, or remove it"
        )
    obstacle = flip_obstacle(config)
    if autotune.mode == "on" and obstacle:
        yield f"{_SECTION}.mode is on, but {obstacle}; use `advise`, or make the pools alike"

"""What ``launcher: ray`` and the rest of the YAML must agree on. Pure: Ray is not asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.config.nodes import LOOPBACK, POOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config.schema import ClusterConfig

WILDCARDS = ("0.0.0.0", "::")
_RESERVED = ("CPU", "GPU", "memory", "object_store_memory")


def ray_problems(config: ClusterConfig) -> list[str]:
    """One sentence per contradiction, each naming the key and what to change."""
    if config.launcher != "ray":
        return list(_keys_of_ray(config))
    return [*_keys_of_one_machine(config), *_placements(config)]


def _keys_of_ray(config: ClusterConfig) -> Iterator[str]:
    """Without Ray they would mean nothing."""
    used = ["ray"] if config.ray is not None else []
    used += [f"{pool}.placement" for pool in POOLS if config.pool(pool).placement is not None]
    for key in used:
        yield f"{key}: only used with `launcher: ray`; set it, or remove the section"


def _keys_of_one_machine(config: ClusterConfig) -> Iterator[str]:
    """What Ray decides cannot be written down beforehand."""
    for key, host in (
        ("router.host", config.router.host),
        *((f"{pool}.host", config.pool(pool).host) for pool in POOLS),
    ):
        if host not in (LOOPBACK, *WILDCARDS):
            yield (
                f"{key}: {host}, but with `launcher: ray` each process listens on the address of "
                "its host in the Ray cluster; leave it out, or use 0.0.0.0 for all addresses"
            )
    router = config.router
    if router.hosts is not None:
        yield (
            "router.hosts: Ray decides on which hosts routers run; choose them with "
            "ray.router.label_selector"
        )
    if router.replicas > 1 and router.advertise_host:
        yield (
            f"router.advertise_host: one address for router.replicas: {router.replicas}, and with "
            "`launcher: ray` each is found at the address of its host; leave it out"
        )
    for pool in POOLS:
        settings = config.pool(pool)
        for key, instead in (
            ("cpus", f"give their number as {pool}.placement.num_cpus"),
            ("gpus", f"give their number as {pool}.placement.num_gpus"),
            ("hosts", f"choose hosts with {pool}.placement.label_selector"),
        ):
            if getattr(settings, key) is not None:
                yield f"{pool}.{key}: Ray decides on which hosts nodes run; {instead}"
        if settings.transfer.transport == "local":
            yield (
                f"{pool}.transfer.transport: local copies within one host, and Ray may place the "
                "nodes of a pool on several; use nixl or tcp"
            )


def _placements(config: ClusterConfig) -> Iterator[str]:
    for pool in POOLS:
        settings = config.pool(pool)
        placement = settings.placement
        if placement is None:
            continue
        ranks = settings.engine_args.tensor_parallel_size
        for key, count in (("num_cpus", placement.num_cpus), ("num_gpus", placement.num_gpus)):
            if count % ranks:
                yield (
                    f"{pool}.placement.{key}: {count} do not split over tensor_parallel_size "
                    f"{ranks}; give a multiple"
                )
        if placement.num_gpus and not config.experimental_cuda:
            yield (
                f"{pool}.placement.num_gpus: CUDA nodes have not been shown to give equal answers "
                "yet; use num_cpus alone, or set `experimental_cuda: true` to accept that"
            )
        for name in placement.resources:
            if name in _RESERVED:
                yield (
                    f"{pool}.placement.resources.{name}: Ray has an option of its own for it; use "
                    "num_cpus or num_gpus"
                )
        if "strategy" in placement.model_fields_set and config.ray and config.ray.pair_by:
            yield (
                f"{pool}.placement.strategy: ray.pair_by places nodes in pairs; leave one of them "
                "out"
            )

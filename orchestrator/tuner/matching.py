"""Whether a profile is of the cluster that it is used for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.engines.versions import TESTED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.tuner.profile import Profile

BLOCKS_TOLERANCE = 0.02
"""An engine may keep a few blocks for itself."""


def mismatch(profile: Profile, config: ClusterConfig) -> str:
    """What the profile says otherwise than the cluster's YAML: the first such key, with both
    values; empty when there is none.
    """
    engine = measured = config.engine_of("prefill")
    if engine == "vllm":
        engine, measured = f"vllm {TESTED['vllm'].version}", profile.engine
    else:  # no version of the others changes how long things take
        measured = profile.engine.split(" ")[0]
    pairs: list[tuple[str, object, object]] = [
        ("model", profile.model, config.model.name),
        ("engine", measured, engine),
    ]
    limits = profile.limits
    for pool in ("prefill", "decode"):
        args = config.pool(pool).engine_args
        for name, ours, theirs in (
            ("block_size", limits.block_tokens, args.block_size),
            ("max_model_len", limits.max_model_len, args.max_model_len),
            ("max_num_seqs", limits.sequences, args.max_num_seqs),
            ("max_num_batched_tokens", limits.step_tokens, args.max_num_batched_tokens),
        ):
            if theirs is not None:
                pairs.append((f"{pool}.engine_args.{name}", ours, theirs))
        if "dtype" in profile.fingerprint and args.dtype != "auto":
            pairs.append((f"{pool}.engine_args.dtype", profile.fingerprint["dtype"], args.dtype))
    for key, found, said in pairs:
        if found != said:
            return f"it was measured with {key} {found}, and the cluster has {said}"
    return _other_memory(profile, config)


def foreign_node(profile: Profile, nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """What a running node's engine has in its fingerprint that the measured ones had otherwise,
    with both values; empty when there is none. ``nodes`` is the router's status of each.
    """
    for name, node in sorted(nodes.items()):
        running = node.get("fingerprint") or {}
        for key in sorted(profile.fingerprint.keys() & running.keys()):
            if profile.fingerprint[key] != running[key]:
                return (
                    f"it was measured with {key} {profile.fingerprint[key]}, and {name} has "
                    f"{running[key]}"
                )
    return ""


def foreign_hardware(profile: Profile, nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """What running nodes compute on that was not measured, in words; empty when there is none."""
    measured = {kind.partition(" on ")[2] for kind in profile.hardware.split("; ")} - {""}
    running = {str(node.get("hardware") or "unknown") for node in nodes.values()}
    if not measured or running <= measured:
        return ""
    return f"measured on {_listed(measured)}, and nodes run on {_listed(running - measured)}"


def _other_memory(profile: Profile, config: ClusterConfig) -> str:
    """The smaller pool's KV counts, as in the profile."""
    measured = profile.limits.total_blocks
    block_bytes = profile.limits.block_tokens * profile.kv_bytes_per_token
    sizes = {}
    for pool in ("prefill", "decode"):
        settings = config.pool(pool)
        ranks = settings.engine_args.tensor_parallel_size
        sizes[pool] = settings.kv_cache_bytes * ranks // block_bytes
    pool = min(sizes, key=lambda name: sizes[name])
    if abs(sizes[pool] - measured) <= max(1, BLOCKS_TOLERANCE * measured):
        return ""
    return (
        f"it was measured with {measured} blocks of KV per node, and {pool}.kv_cache_bytes "
        f"holds {sizes[pool]}"
    )


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names))

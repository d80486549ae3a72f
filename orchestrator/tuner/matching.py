"""Whether a profile is of the cluster that it is used for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.orchestrator.engines.versions import TESTED

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig
    from splitserve.orchestrator.tuner.profile import Profile


def mismatch(profile: Profile, config: ClusterConfig) -> str:
    """What the profile says otherwise than the cluster's YAML: the first such key, with both
    values; empty when there is none.
    """
    engine = f"vllm {TESTED['vllm'].version}" if config.engine == "vllm" else config.engine
    # A mock engine has no version that could matter
    measured = profile.engine if config.engine == "vllm" else profile.engine.split(" ")[0]
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
    for key, found, said in pairs:
        if found != said:
            return f"it was measured with {key} {found}, and the cluster has {said}"
    return ""

"""Puts a profile together: what the router says of its nodes, and what was measured on them. Pure.

All nodes of a profile are taken to be alike. Where they differ the tightest limit counts, and their
times are those of their mixture.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from msgspec import structs

from splitserve.orchestrator.tuner.fitting import FitError
from splitserve.orchestrator.tuner.probing import ProbeError
from splitserve.orchestrator.tuner.profile import EngineLimits, Profile
from splitserve.orchestrator.tuner.profile_fit import (
    fit_decode,
    fit_neighbour,
    fit_prefill,
    fit_sending,
    fit_transfers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from splitserve.orchestrator.tuner.probing import Measured

    Nodes = Mapping[str, Mapping[str, Any]]
    """The router's status of each node, by name."""

LIMITS = {
    "step_limit_tokens": "max_num_batched_tokens",
    "running_limit_requests": "max_num_seqs",
    "kv_bytes_per_token": "the size of their KV",
}


def nodes_to_measure(nodes: Nodes) -> tuple[list[str], list[str]]:
    """(prefill nodes, decode nodes) that take work. Raises ``ProbeError`` when a role has none, or
    engines do not say what bounds them.
    """
    found = {
        role: [
            name for name, node in sorted(nodes.items()) if node["role"] == role and _is_free(node)
        ]
        for role in ("prefill", "decode")
    }
    for role, names in found.items():
        if not names:
            there = ", ".join(f"{name} ({_state(node)})" for name, node in sorted(nodes.items()))
            raise ProbeError(
                f"no {role} node takes work, and a profile needs one of each role;"
                f" the router has: {there or 'no node'}. `splitserve status` says more"
            )
    for name in (*found["prefill"], *found["decode"]):
        unknown = [words for key, words in LIMITS.items() if not nodes[name].get(key)]
        if unknown:
            raise ProbeError(
                f"the engine of {name} does not say {' and '.join(unknown)}: it was started by "
                "another version; restart it with `splitserve restart`"
            )
    return found["prefill"], found["decode"]


def limits_of(nodes: Nodes, names: Sequence[str]) -> EngineLimits:
    """What bounds each of those nodes."""
    chosen = [nodes[name] for name in names]
    return EngineLimits(
        step_tokens=min(node["step_limit_tokens"] for node in chosen),
        sequences=min(node["running_limit_requests"] for node in chosen),
        block_tokens=max(node["block_tokens"] for node in chosen),
        total_blocks=min(node["total_blocks"] for node in chosen),
        max_model_len=min(node["max_model_len"] for node in chosen),
    )


def neighbours_of(nodes: Nodes, names: Sequence[str]) -> dict[str, list[str]]:
    """Which of the others run on the same host, for each of those nodes; none of a host that does
    not say its name.
    """
    hosts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        hosts[nodes[name]["host"]].append(name)
    return {
        name: [other for other in hosts[nodes[name]["host"]] if other != name]
        if nodes[name]["host"]
        else []
        for name in names
    }


def build_profile(
    measured: Measured, nodes: Nodes, names: Sequence[str], *, now_unix_s: float
) -> Profile:
    """The profile of those nodes. Raises ``ProbeError`` when too little was measured."""
    limits = limits_of(nodes, names)
    some = nodes[names[0]]
    kv_bytes = int(some["kv_bytes_per_token"])
    try:
        decode = fit_decode(measured.decode)
        prefill, request = fit_prefill(measured.prefill, decode, limits)
    except FitError as error:
        raise ProbeError(_too_little(measured, str(error))) from error
    if not measured.transfer:
        raise ProbeError(_too_little(measured, "no transfer was measured"))
    transfers = fit_transfers(
        measured.transfer,
        prefill,
        decode,
        request_s=request.value,
        bytes_per_token=kv_bytes,
        limits=limits,
    )
    sending = fit_sending(
        measured.split,
        transfers[0],
        decode,
        request_s=request.value,
        bytes_per_token=kv_bytes,
    )
    prefill = structs.replace(prefill, sending_s=sending)
    if measured.prefill_beside:
        slowed = fit_neighbour(measured.prefill_beside, request.value)
        prefill = structs.replace(prefill, neighbour=slowed)
    if measured.decode_beside:
        decode = structs.replace(decode, neighbour=fit_neighbour(measured.decode_beside, 0.0))
    return Profile(
        model=some["model"],
        engine=some["engine"],
        hardware=hardware_of(nodes, names),
        fingerprint=dict(some["fingerprint"]),
        limits=limits,
        kv_bytes_per_token=kv_bytes,
        prefill=prefill,
        decode=decode,
        transfers=transfers,
        request_s=request.value,
        nodes_per_host=1 + max(map(len, neighbours_of(nodes, names).values())),
        measured_unix_s=round(now_unix_s, 3),
        probes=measured.count,
    )


def hardware_of(nodes: Nodes, names: Sequence[str]) -> str:
    """``2 prefill and 1 decode on THIS``, for each kind."""
    kinds: dict[str, Counter[str]] = {}
    for name in names:
        node = nodes[name]
        kinds.setdefault(node["hardware"] or "unknown", Counter())[node["role"]] += 1
    return "; ".join(
        f"{' and '.join(f'{count} {role}' for role, count in roles.items())} on {hardware}"
        for hardware, roles in kinds.items()
    )


def _too_little(measured: Measured, problem: str) -> str:
    text = f"too little was measured for a profile ({problem}); nothing was written"
    if measured.left_out:
        reasons = Counter(reason.partition(": ")[2] for reason in measured.left_out)
        often = reasons.most_common(1)[0][0]
        text += f". {len(measured.left_out)} probes were left out, most because {often}"
        text += ": measure when there is less to do, or give more --minutes"
    return text


def _is_free(node: Mapping[str, Any]) -> bool:
    return bool(node["is_usable"]) and not node.get("is_flipping", False)


def _state(node: Mapping[str, Any]) -> str:
    state = "usable" if node["is_usable"] else node["phase"]
    return f"{node['role']}, {state}"

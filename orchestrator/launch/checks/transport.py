"""How fast pages really travel between each pair of nodes, by what, and beside a plain copy on this
machine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.checks.model import kv_item_bytes
from splitserve.orchestrator.launch.checks.transport_trial import TrialError, try_pair
from splitserve.orchestrator.launch.finding import Finding, failure, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config import NodeConfig
    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.checks.transport_trial import PairResult
    from splitserve.orchestrator.launch.finding import Problem

PAIRS_LIMIT = 4
BUDGET_S = 30.0
"""No further pair is begun after this time."""
DEFAULT_PAGE_BYTES = 128 << 10
"""Where the model does not say."""
LEAST_SHARE = {"local": 0.1, "nixl": 0.1, "tcp": 0.03, "ucx": 0.01}
"""Of a plain copy's speed, below which a transport is slower than this machine explains: about a
quarter of what was measured on an idle one.
"""
SETUP_LIMIT_MS = 1000.0
LATENCY_LIMIT_US = 20_000.0
SLOW_LANE = "tcp"
COPY_LANE = "cma"
_UCX = frozenset({"nixl", "ucx"})


def transport(subject: Subject) -> Finding:
    """Each pair of nodes can write to each other, as fast as this machine should."""
    check = "transport"
    if subject.running is not None:
        return Finding(check, "not measured beside a running cluster")
    pairs = _pairs(subject)
    results: list[PairResult] = []
    problems: list[Problem] = []
    end = time.monotonic() + BUDGET_S
    for writer, reader in pairs[:PAIRS_LIMIT]:
        if results and time.monotonic() > end:
            break
        try:
            result = try_pair(writer, reader, page_bytes(subject), subject.environ)
        except TrialError as error:
            problems.append(_failed(subject, writer, reader, error))
            break
        results.append(result)
        problems += _slow(subject, writer, result)
    left = len(pairs) - len(results)
    parts = [_in_words(result) for result in results]
    if left and not problems:
        parts.append(f"{left} more pairs are not measured")
    detail = "; ".join(parts) or "not measured"
    return Finding(check, detail, tuple(problems), {"pairs": [r.as_dict() for r in results]})


def page_bytes(subject: Subject) -> int:
    """One layer's bytes of one block in a rank of a prefill node."""
    facts, settings = subject.model_facts, subject.config.prefill
    if facts is None or facts.layers is None:
        return DEFAULT_PAGE_BYTES
    per_token = facts.kv_bytes_per_token(kv_item_bytes(settings, facts))
    if per_token is None:
        return DEFAULT_PAGE_BYTES
    args = settings.engine_args
    return max(1, per_token * args.block_size // facts.layers // args.tensor_parallel_size)


def _pairs(subject: Subject) -> list[tuple[NodeConfig, NodeConfig]]:
    """Each prefill node with each decode node, other nodes first."""
    members = subject.nodes
    prefill = [node for node in members if node.pool == "prefill"]
    decode = [node for node in members if node.pool == "decode"]
    pairs = [(writer, reader) for writer in prefill for reader in decode]
    return sorted(pairs, key=lambda pair: (pair[0].index != pair[1].index, pair[0].index))


def _failed(subject: Subject, writer: NodeConfig, reader: NodeConfig, error: TrialError) -> Problem:
    """What kept a pair from writing to each other."""
    if error.is_late:
        return warning(
            f"{error.node.pool}.transfer.transport",
            f"{error.node.name} could not be measured: {error.why}",
            "try again when less else computes on its CPUs; a slow disk or name server takes time "
            "too",
        )
    why, _, fix = error.why.rpartition("; ")
    named = subject.config.pool(error.node.pool).env
    keys = [f"{error.node.pool}.env.{name}" for name in named if name.startswith("UCX_")]
    keys += [name for name in subject.environ if name.startswith("UCX_")]
    return failure(
        (*keys, f"{error.node.pool}.transfer.transport"),
        f"{error.node.name} cannot take part in a transfer between {writer.name} and "
        f"{reader.name}: {why or error.why}",
        fix if why else "use another transport (`tcp` needs nothing)",
    )


def _slow(subject: Subject, writer: NodeConfig, result: PairResult) -> Iterator[Problem]:
    name = writer.settings.transfer.transport
    pair = f"{result.prefill} and {result.decode}"
    keys = ("prefill.transfer.transport", "decode.transfer.transport")
    if name in _UCX and SLOW_LANE in result.lane and COPY_LANE not in result.lane:
        yield warning(
            _ucx_keys(subject) or keys,
            f"between {pair} UCX chose {result.lane}, and a copy from process to process ("
            f"{COPY_LANE}) would be many times faster on one host",
            _ucx_remedy(subject, name),
        )
    elif result.share < LEAST_SHARE[name]:
        yield warning(
            (*keys, "prefill.cpus", "decode.cpus"),
            f"between {pair} pages travel at {result.share:.0%} of a plain copy's speed on this "
            f"machine; {name} should have at least {LEAST_SHARE[name]:.0%}",
            "see `cpus` and `numa`, and what else computes on these cores",
        )
    for way, direction in (("PUT", result.put), ("GET", result.get)):
        if direction.setup_ms > SETUP_LIMIT_MS:
            yield warning(
                keys,
                f"{way} between {pair}: the first write takes {direction.setup_ms:.0f} ms",
                "expect it at the first request of each pair; look for a slow name server or a "
                "device that UCX should not try (UCX_NET_DEVICES)",
            )
        if direction.latency_us > LATENCY_LIMIT_US:
            yield warning(
                keys,
                f"{way} between {pair}: one page takes {direction.latency_us / 1e3:.1f} ms",
                "see what else computes on these cores",
            )


def _ucx_keys(subject: Subject) -> tuple[str, ...]:
    """Where the choice of UCX's transports is set."""
    own = [
        f"{pool}.env.UCX_TLS"
        for pool in ("prefill", "decode")
        if "UCX_TLS" in subject.config.pool(pool).env
    ]
    return tuple(own) or (("UCX_TLS",) if "UCX_TLS" in subject.environ else ())


def _ucx_remedy(subject: Subject, name: str) -> str:
    if _ucx_keys(subject):
        return "leave UCX_TLS out, or add `cma` to it"
    if name == "ucx":
        return "use `nixl` or `local`, which copy"
    return "give the right that the check `rights` names, or use `local` to be refused without it"


def _in_words(result: PairResult) -> str:
    return (
        f"{result.prefill} to {result.decode} by {result.lane}: PUT "
        f"{result.put.bytes_per_s / 1e9:.2f} GB/s, GET {result.get.bytes_per_s / 1e9:.2f} GB/s "
        f"({result.share:.0%} of a plain copy's {result.copy_bytes_per_s / 1e9:.1f}), a page of "
        f"{result.page_bytes >> 10} KiB in {result.put.latency_us:.0f} us, the first in "
        f"{result.put.setup_ms:.0f} ms"
    )

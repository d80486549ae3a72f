"""What a running cluster says of itself: whether its engines pair, which of them are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.fingerprint import differences
from splitserve.orchestrator.cli.router_client import RouterClient, RouterSilentError
from splitserve.orchestrator.launch.finding import Finding, failure, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord
    from splitserve.orchestrator.launch.finding import Problem

_TIMEOUT_S = 5.0


def running_cluster(files: ClusterFiles, record: ClusterRecord) -> Finding:
    """Every node of the running cluster takes part, with the fingerprint of the others."""
    check = "running"
    where = f"{record.name} is {record.phase} on {record.url} (pid {record.pid})"
    try:
        status = RouterClient(files, record).status(_TIMEOUT_S)
    except (RouterSilentError, OSError) as error:
        said = error.message if isinstance(error, RouterSilentError) else str(error)
        problem = warning(
            "router", said, f"see `splitserve status` and the logs in {record.log_dir}"
        )
        return Finding(check, where, (problem,))
    found: dict[str, dict[str, Any]] = status.get("nodes", {})
    problems = [*_refused(status), *_unequal(found), *_missing(record, found, status)]
    measured = {
        "fingerprints": {name: node.get("fingerprint", {}) for name, node in found.items()},
        "transports": {name: node.get("transport", "") for name, node in found.items()},
    }
    return Finding(check, f"{where}, {len(found)} nodes take part", tuple(problems), measured)


def _refused(status: dict[str, Any]) -> Iterator[Problem]:
    for name, why in sorted(status.get("refused", {}).items()):
        yield failure(
            name.rpartition("-")[0] or name,
            f"the router refuses {name}: {why}",
            "make both pools' engine_args and env equal in this, and restart the node",
        )


def _unequal(nodes: dict[str, dict[str, Any]]) -> Iterator[Problem]:
    """Nodes whose fingerprints differ from the first one's, with both values."""
    names = sorted(nodes)
    for name in names[1:]:
        ours, theirs = (nodes[n].get("fingerprint", {}) for n in (names[0], name))
        for sentence in differences(ours, theirs):
            yield failure(
                (nodes[names[0]].get("pool", "prefill"), nodes[name].get("pool", "decode")),
                f"fingerprint of {names[0]} (here) and {name} (the peer): {sentence}",
                "restart the node that was started differently",
            )


def _missing(
    record: ClusterRecord, nodes: dict[str, dict[str, Any]], status: dict[str, Any]
) -> Iterator[Problem]:
    absent = set(record.nodes) - nodes.keys() - set(status.get("loading", {}))
    for name in sorted(absent - set(status.get("refused", {}))):
        yield warning(
            name,
            "it takes no part",
            f"see its log in {record.log_dir}; `splitserve restart {name}` starts it again",
        )

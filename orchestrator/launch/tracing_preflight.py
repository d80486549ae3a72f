"""What traces need to be there before anything is started. The collector itself may come later."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.finding import Finding

if TYPE_CHECKING:
    from splitserve.orchestrator.config import ClusterConfig

_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
}


def tracing_finding(config: ClusterConfig) -> Finding:
    """Whether the libraries that make and send spans are installed."""
    tracing = config.observability.tracing
    if tracing is None:
        return Finding("tracing", "off")
    missing = [
        name
        for name in ("opentelemetry.sdk", _EXPORTERS[tracing.otlp_protocol])
        if not _is_installed(name)
    ]
    detail = f"{tracing.otlp_protocol} to {tracing.traces_url}"
    if not missing:
        return Finding("tracing", detail)
    problem = (
        f"observability.tracing: {' and '.join(missing)} cannot be imported; run "
        "`pip install 'splitserve[tracing]'`, or remove that section"
    )
    return Finding("tracing", detail, (problem,))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

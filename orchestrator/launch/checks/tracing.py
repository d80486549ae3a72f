"""What traces need to be there before anything is started. The collector itself may come later."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from splitserve.orchestrator.launch.finding import Finding, failure

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.checks.subject import Subject

_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
}


def tracing(subject: Subject) -> Finding:
    """Whether the libraries that make and send spans are installed."""
    asked_for = subject.config.observability.tracing
    if asked_for is None:
        return Finding("tracing", "off")
    missing = [
        name
        for name in ("opentelemetry.sdk", _EXPORTERS[asked_for.otlp_protocol])
        if not _is_installed(name)
    ]
    detail = f"{asked_for.otlp_protocol} to {asked_for.traces_url}"
    if not missing:
        return Finding("tracing", detail)
    what = f"{' and '.join(missing)} cannot be imported"
    fix = "run `pip install 'splitserve[tracing]'`, or remove that section"
    return Finding("tracing", detail, (failure("observability.tracing", what, fix),))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

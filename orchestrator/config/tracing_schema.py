"""The section ``observability.tracing`` of the cluster YAML, and what of it goes to whom."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from splitserve.orchestrator.config.fields import HOLDS_SECRET, Section

TRACES_PATH = "/v1/traces"
"""Where a collector takes traces by HTTP."""


def _checked_endpoint(url: str) -> str:
    parts = urlsplit(url)
    try:
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or any(character.isspace() for character in url):
        raise ValueError("an OTLP endpoint is a URL such as http://127.0.0.1:4318")
    if parts.username is not None or parts.query or parts.fragment:
        raise PydanticCustomError(
            HOLDS_SECRET,
            "an OTLP endpoint holds no user, password or query; give credentials in the variable "
            "OTEL_EXPORTER_OTLP_HEADERS of `splitserve up`",
        )
    return url


class TracingConfig(Section):
    """Traces of requests by OpenTelemetry: router, agents and vLLM engines send their spans to one
    collector. Headers for it, such as a token, come from the variable `OTEL_EXPORTER_OTLP_HEADERS`
    of `splitserve up`.
    """

    otlp_endpoint: Annotated[str, AfterValidator(_checked_endpoint)]
    """URL of the collector: `http://127.0.0.1:4318` for `http/protobuf` (`/v1/traces` is added
    where it is missing), `http://127.0.0.1:4317` for `grpc`.
    """

    otlp_protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    """How spans are sent."""

    sample_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of requests that are traced, from 0 to 1. It is for requests that bring no
    `traceparent`; one that does says itself whether it is traced.
    """

    service_name: str = Field(default="splitserve", min_length=1, pattern=r"^[^,=\s]+$")
    """Beginning of the names in the traces: `NAME-router`, `NAME-agent` and `NAME-engine`."""

    @property
    def traces_url(self) -> str:
        """What exporters are given."""
        url = self.otlp_endpoint.rstrip("/")
        if self.otlp_protocol == "grpc" or url.endswith(TRACES_PATH):
            return url
        return url + TRACES_PATH


def tracing_problems(tracing: TracingConfig | None) -> list[str]:
    """What its keys do not agree on."""
    if tracing is None or tracing.otlp_protocol != "grpc":
        return []
    if urlsplit(tracing.otlp_endpoint).scheme == "https":
        return [
            "observability.tracing.otlp_protocol is grpc but otlp_endpoint begins with https: "
            "vLLM's engines send gRPC without TLS only; use http/protobuf, or a collector on this "
            "host"
        ]
    return []


def engine_tracing_environment(tracing: TracingConfig, node: str) -> dict[str, str]:
    """Variables of a vLLM engine beside its flag ``--otlp-traces-endpoint``. Only what the router
    has chosen is traced: an engine by itself would also trace its start and every warm-up.
    """
    return {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": tracing.otlp_protocol,
        "OTEL_SERVICE_NAME": f"{tracing.service_name}-engine",
        "OTEL_RESOURCE_ATTRIBUTES": f"service.instance.id={node}",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }

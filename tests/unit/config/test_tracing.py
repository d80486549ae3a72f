"""The section ``observability.tracing``."""

from __future__ import annotations

import pytest

from splitserve.orchestrator.config import ConfigError, parse
from splitserve.orchestrator.config.tracing_schema import TracingConfig

TEXT = "engine: mock\nmodel: {{path: m}}\nobservability: {{tracing: {{otlp_endpoint: '{}'{}}}}}\n"


def problems_of(endpoint: str, more: str = "") -> list[str]:
    """What is refused."""
    with pytest.raises(ConfigError) as caught:
        parse(TEXT.format(endpoint, more))
    return caught.value.problems


@pytest.mark.parametrize(
    ("endpoint", "protocol", "url"),
    [
        ("http://c:4318", "http/protobuf", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http/protobuf", "http://c:4318/v1/traces"),
        ("https://c/otlp", "http/protobuf", "https://c/otlp/v1/traces"),
        ("http://c:4318/v1/traces", "http/protobuf", "http://c:4318/v1/traces"),
        ("http://c:4317", "grpc", "http://c:4317"),
    ],
)
def test_where_spans_go(endpoint: str, protocol: str, url: str) -> None:
    """The path of traces is added for HTTP where it is missing."""
    tracing = parse(TEXT.format(endpoint, f", otlp_protocol: {protocol}")).observability.tracing
    assert isinstance(tracing, TracingConfig)
    assert tracing.traces_url == url


@pytest.mark.parametrize(
    "endpoint", ["", "c:4318", "grpc://c:4317", "http://", "http://c:99999", "http://c d"]
)
def test_what_is_no_collector(endpoint: str) -> None:
    """The key and an example are named."""
    (problem,) = problems_of(endpoint)
    assert problem.startswith("observability.tracing.otlp_endpoint (line 3): an OTLP endpoint is")
    assert "http://127.0.0.1:4318" in problem


@pytest.mark.parametrize("endpoint", ["http://user:pw@c:4318", "http://c:4318?key=1"])
def test_credentials_are_no_part_of_it(endpoint: str) -> None:
    """The variable for them is named; they are not repeated."""
    (problem,) = problems_of(endpoint)
    assert "OTEL_EXPORTER_OTLP_HEADERS" in problem
    assert endpoint not in problem


def test_grpc_with_tls_is_refused() -> None:
    """vLLM's exporter cannot do it; the way out is named."""
    (problem,) = problems_of("https://c:4317", ", otlp_protocol: grpc")
    assert "http/protobuf" in problem


@pytest.mark.parametrize("ratio", ["-0.1", "1.1", ".nan"])
def test_a_ratio_is_a_share(ratio: str) -> None:
    """From 0 to 1."""
    assert problems_of("http://c:1", f", sample_ratio: {ratio}")

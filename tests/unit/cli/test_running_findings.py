"""What `doctor` makes of a running cluster's status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from splitserve.orchestrator.cli import running_findings as subject
from splitserve.orchestrator.cli.router_client import RouterSilentError
from splitserve.orchestrator.launch.files import ClusterFiles, ClusterRecord
from splitserve.orchestrator.launch.finding import Severity

if TYPE_CHECKING:
    from splitserve.orchestrator.launch.finding import Finding

RECORD = ClusterRecord(
    name="c",
    run="r",
    pid=7,
    source="c.yaml",
    url="http://127.0.0.1:8000",
    nodes=("prefill-0", "decode-0"),
    phase="serving",
    started=0.0,
    log_dir="/logs",
)


def finding_of(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any] | Exception) -> Finding:
    """The finding when the router answers so."""

    def answer(client: object, timeout_s: float) -> dict[str, Any]:
        if isinstance(status, Exception):
            raise status
        return status

    monkeypatch.setattr(subject.RouterClient, "status", answer)
    return subject.running_cluster(ClusterFiles("c"), RECORD)


def node(pool: str, dtype: str = "float32") -> dict[str, Any]:
    """A node as the router's status tells it."""
    return {"pool": pool, "transport": "nixl", "fingerprint": {"dtype": dtype, "layers": "8"}}


def test_all_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both fingerprints are in the report."""
    nodes = {"prefill-0": node("prefill"), "decode-0": node("decode")}
    finding = finding_of(monkeypatch, {"nodes": nodes})
    assert finding.problems == ()
    assert finding.measured["fingerprints"]["decode-0"] == {"dtype": "float32", "layers": "8"}


def test_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the router's reason, which has both values."""
    why = "fingerprint dtype differs: decode-0 has bfloat16, prefill-0 has float32; KV can only"
    status = {"nodes": {"prefill-0": node("prefill")}, "refused": {"decode-0": why}}
    (problem,) = finding_of(monkeypatch, status).problems
    assert problem.severity is Severity.FAIL
    assert problem.keys == ("decode",)
    assert why in problem.what


def test_two_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes and both values are named."""
    nodes = {"prefill-0": node("prefill"), "decode-0": node("decode", "bfloat16")}
    (problem,) = finding_of(monkeypatch, {"nodes": nodes}).problems
    assert "decode-0 (here) and prefill-0 (the peer)" in problem.what
    assert "dtype: bfloat16 here, float32 at the peer" in problem.what


def test_one_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is still loading is not."""
    status = {"nodes": {"prefill-0": node("prefill")}, "loading": {}}
    (problem,) = finding_of(monkeypatch, status).problems
    assert problem.keys == ("decode-0",)
    assert finding_of(monkeypatch, {**status, "loading": {"decode-0": {}}}).problems == ()


@pytest.mark.parametrize("error", [RouterSilentError("no answer"), FileNotFoundError("no token")])
def test_a_router_that_is_silent(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """It is said, and nothing is raised."""
    finding = finding_of(monkeypatch, error)
    assert finding.severity is Severity.WARN
    assert "/logs" in finding.problems[0].fix

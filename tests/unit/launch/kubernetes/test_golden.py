"""Manifests that Kubernetes would take, kept as files so that a change of them is seen.

``SPLITSERVE_WRITE_GOLDEN=1 pytest FILE`` writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes_clusters import GOLDEN
from support.manifests import containers, pod_specs, problems, read_all

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.kubernetes.render import render, to_yaml

FOLDER = Path(__file__).parent / "golden"


def _rendered(name: str) -> str:
    """All but the alert rules, which lie in a file of their own."""
    text, options = GOLDEN[name]
    found = [m for part in render(parse(text), options).values() for m in part]
    return to_yaml([m for m in found if m["kind"] != "PrometheusRule"])


@pytest.fixture(scope="module", params=GOLDEN)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return read_all((FOLDER / f"{request.param}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_cluster_gives_the_same_manifests(name: str) -> None:
    """Word for word."""
    path, text = FOLDER / f"{name}.yaml", _rendered(name)
    if os.environ.get("SPLITSERVE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_they_are_valid(manifests: list[dict[str, Any]]) -> None:
    """Against Kubernetes' schemas, strictly; PodMonitors by their structure; and every name in them
    leads to something.
    """
    assert problems(manifests) == []


def test_pods_have_few_rights(manifests: list[dict[str, Any]]) -> None:
    """No token, nothing privileged, no writable image, no capability but the one that is needed,
    and root only with that one.
    """
    for name, spec in pod_specs(manifests):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostIPC", "hostNetwork"} & spec.keys()
        for container in containers(spec):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            added = security["capabilities"].get("add", [])
            user = security.get("runAsUser", spec["securityContext"]["runAsUser"])
            assert (user == 0) == bool(added), (name, container["name"])


def test_the_time_to_leave_is_longer_than_a_drain(manifests: list[dict[str, Any]]) -> None:
    """``supervision``'s defaults: 30 s to drain and 10 s to stop."""
    for name, spec in pod_specs(manifests):
        if not name.endswith("-cache"):
            assert spec["terminationGracePeriodSeconds"] >= 45


@pytest.mark.parametrize("name", GOLDEN)
def test_no_secret_is_in_them(name: str) -> None:
    """Values of secret variables stay out, and paths of secrets on the machine of who renders."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    for secret in ("hf_verysecret", "/home/me", "/keys/b"):
        assert secret not in text

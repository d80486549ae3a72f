"""Transports by name: imported late, kept apart, and clear about what is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from splitserve.kv_transfer.transports.base import TransportError
from splitserve.kv_transfer.transports.registry import TRANSPORTS, create
from splitserve.kv_transfer.transports.settings import TransportSettings

SETTINGS = TransportSettings("process-1")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What the loaders put into the environment is gone after the test."""
    for name in ("UCX_NET_DEVICES", "UCX_RCACHE_MAX_UNRELEASED"):
        monkeypatch.setenv(name, "")
    return monkeypatch


def test_an_unknown_transport_names_the_known_ones() -> None:
    """The error lists what may be written instead."""
    with pytest.raises(TransportError, match=", ".join(TRANSPORTS)):
        create("carrier-pigeon", SETTINGS)


def test_the_registry_loads_no_library() -> None:
    """Importing it, and making ``local`` and ``tcp``, brings neither NIXL nor ucxx."""
    program = """
import sys
from splitserve.kv_transfer.transports.registry import create
from splitserve.kv_transfer.transports.settings import TransportSettings
for name in ("local", "tcp"):
    create(name, TransportSettings("process-1")).close()
sys.exit(any(name.startswith(("nixl", "ucxx", "torch")) for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "missing"),
    [("nixl", ["nixl._api", "nixl_cu13._api", "nixl_cu12._api"]), ("ucx", ["ucxx._lib.libucxx"])],
)
def test_a_missing_library_says_what_to_install(
    name: str, missing: list[str], environment: pytest.MonkeyPatch
) -> None:
    """A ``TransportError`` with the command, not an ``ImportError``."""
    for module in list(sys.modules):
        if module.startswith("nixl"):
            environment.delitem(sys.modules, module)
    for module in missing:
        empty = ModuleType("empty")
        empty.__spec__ = ModuleSpec("empty", None)
        environment.setitem(sys.modules, module.partition(".")[0], empty)
        environment.setitem(sys.modules, module, None)
    if name == "ucx":
        for module in [m for m in sys.modules if m.startswith("nixl")]:
            environment.delitem(sys.modules, module)
    with pytest.raises(TransportError, match="pip install"):
        create(name, SETTINGS)


@pytest.mark.parametrize(("name", "loaded"), [("nixl", "ucxx"), ("ucx", "nixl")])
def test_nixl_and_ucxx_do_not_meet(name: str, loaded: str, environment: pytest.MonkeyPatch) -> None:
    """Whichever came first, the other transport refuses before it imports its library."""
    environment.setitem(sys.modules, loaded, ModuleType(loaded))
    with pytest.raises(TransportError, match="another UCX"):
        create(name, SETTINGS)

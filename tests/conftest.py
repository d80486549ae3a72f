"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import uvloop

from splitserve.orchestrator.models.prepare import prepare
from splitserve.orchestrator.models.tiny import TinyModel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from pathlib import Path


# How long an example takes says something about the machine's load, not about the code.
hypothesis.settings.register_profile(
    "loaded machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("loaded machine")


_SUMMARY: list[str] = []


@pytest.fixture
def summary() -> Callable[[str], None]:
    """A function that puts a line under the test run's results."""
    return _SUMMARY.append


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes hands what its tests counted to the one that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counted"] = _SUMMARY


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Such a process has ended."""
    _SUMMARY.extend(getattr(node, "workeroutput", {}).get("counted", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests counted is printed, whether they fail or not."""
    if _SUMMARY:
        terminalreporter.section("counted")
        for line in _SUMMARY:
            terminalreporter.write_line(line)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Coroutine tests run on the product's event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama: 8 layers, 2 KV heads, byte tokens, printable answers of
    any asked length.
    """
    return TinyModel().write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M, prepared on first use (`make model` has done it before `make
    test`).
    """
    return prepare("smollm2-135m")


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that returns a loopback port nobody listens on, another one each time in this run.

    The OS chooses it. Linux gives odd ports to binders and even ones to outgoing connections first,
    so it is not handed out again in the moment until the server under test binds it. Test processes
    that run side by side take turns in the ports.
    """
    given: set[int] = set()
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))

    def allocate() -> int:
        for _ in range(100 * processes):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            # Linux gives every other port to binders, so their halves are what is shared out
            if port not in given and port // 2 % processes == own:
                given.add(port)
                return port
        raise AssertionError("the OS gives no fresh loopback port any more")

    return allocate

"""vLLM's processes sleep while they wait where splitserve says so, and only there."""

from __future__ import annotations

import time
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from splitserve.orchestrator.engines.vllm.process_waits import SLEEPING_WAITS_ENV

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def install() -> Iterator[Callable[[], None]]:
    """The plugin as vLLM finds it; vLLM is as before afterwards."""
    (found,) = entry_points(group="vllm.general_plugins", name="splitserve_process_waits")
    before = SpinCondition.__init__.__defaults__, SpinCondition.wait
    yield found.load()
    SpinCondition.__init__.__defaults__, SpinCondition.wait = before


@pytest.fixture
def make_reader(tmp_path: Path) -> Iterator[Callable[[], SpinCondition]]:
    """A function that makes the reader of a queue; its sockets are closed after the test."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/queue"
    made = [SpinCondition(False, context, address)]

    def make() -> SpinCondition:
        made.append(SpinCondition(True, context, address))
        return made[-1]

    yield make
    for end in made:
        for socket in (end.local_notify_socket, end.read_cancel_socket, end.write_cancel_socket):
            if socket is not None:
                socket.close(linger=0)
    context.term()


class PollerSpy:
    """Records how long a reader was ready to sleep."""

    def __init__(self) -> None:
        self.timeouts: list[int | None] = []

    def poll(self, timeout: int | None) -> list[tuple[object, int]]:
        self.timeouts.append(timeout)
        return []


def test_readers_sleep_at_once(
    install: Callable[[], None],
    make_reader: Callable[[], SpinCondition],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that has just read sleeps for a moment, since a notification may be lost; later for
    longer, and in the end as long as vLLM says.
    """
    monkeypatch.setenv(SLEEPING_WAITS_ENV, "1")
    install()
    reader = make_reader()
    reader.poller = PollerSpy()
    for age_s in (0.0, 0.5, 10.0):
        reader.last_read = time.monotonic() - age_s
        reader.wait(timeout_ms=5000)
    assert reader.poller.timeouts == [1, 50, 5000]


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_vllm_is_untouched(
    install: Callable[[], None],
    make_reader: Callable[[], SpinCondition],
    monkeypatch: pytest.MonkeyPatch,
    value: str | None,
) -> None:
    """Other engines of the same environment keep vLLM's own way to wait."""
    monkeypatch.delenv(SLEEPING_WAITS_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(SLEEPING_WAITS_ENV, value)
    own = SpinCondition.wait
    install()
    assert SpinCondition.wait is own
    assert make_reader().busy_loop_s == 1


def test_another_vllm_is_refused(
    install: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version whose wait has another shape is named, not silently left polling."""
    monkeypatch.setenv(SLEEPING_WAITS_ENV, "1")
    monkeypatch.setattr(SpinCondition, "__init__", lambda self, is_reader=True: None)
    with pytest.raises(RuntimeError, match=SLEEPING_WAITS_ENV):
        install()

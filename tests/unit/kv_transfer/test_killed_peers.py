"""One side of a transfer is a process that is killed in the middle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import kv_rank_program
from support.kv_rank import DEADLINE_S, KvRank, opened, until
from support.kv_rank_program import PROMPT, SOURCE, TARGET

from splitserve.kv_transfer.orders import StepOrders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOTICED_S = 10.0
"""Far below every deadline and silence: the pidfd and the broken connection tell."""


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A function that starts a rank as a process and returns once its transfer has begun."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(role: str, port: int, peer_port: int = 0) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(kv_rank_program.__file__)), role, str(port)]
        process = subprocess.Popen(
            [*command, str(peer_port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_a_killed_prefill_engine_fails_the_receive(
    begin: Callable[..., subprocess.Popen[bytes]], free_port: Callable[[], int]
) -> None:
    """D has its pages back, and says so, within moments of the death."""
    port = free_port()
    killed = begin("P", port)
    d = KvRank("D", free_port())
    untouched = d.pages.copy()
    d.thread.start()
    request = d.receive("t", PROMPT, TARGET, KvRank("P", port))
    until(lambda: not np.array_equal(untouched, d.pages), "a layer has arrived")
    assert not d.has_received(request)
    killed.kill()
    until(lambda: d.has_received(request), "settled", NOTICED_S)
    assert d.failed == {request}
    d.thread.stop()


def test_a_killed_decode_engine_releases_the_prefill(
    begin: Callable[..., subprocess.Popen[bytes]], free_port: Callable[[], int]
) -> None:
    """P stops writing, and has its blocks back within moments once nobody else is to have them."""
    p = KvRank("P", free_port(), stream_min_bytes=1)
    p.thread.start()
    p.step("t", SOURCE, 0, 2, layers=1, opens=(opened("t", PROMPT),))
    killed = begin("D", free_port(), int(p.address.rsplit(":", 1)[1]))
    for layer in (1, 2):
        p.thread.layer_done(layer)
    killed.kill()
    killed.wait(DEADLINE_S)
    p.thread.layer_done(3)
    p.thread.end_step()
    p.close("t")
    p.thread.begin_step(StepOrders(given_up=(("t", "no decode node is left"),)))
    until(lambda: p.has_sent("p-t"), "released", NOTICED_S)
    p.thread.stop()

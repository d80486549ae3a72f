"""A writer that is stopped when it has decided to write, and before it does: whatever the
transport, its late bytes land in pages that nobody else has, or nowhere.

The transfer thread of P checks the attempt, and stops (SIGSTOP of the whole process) before it
calls its transport. Both ranks are processes: transports must not meet in one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import rank_program
from support.kv_rank import LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRANSPORTS = ["tcp", "local", "nixl"]
if find_spec("ucxx") is not None:  # the optional extra `ucx`; CI installs it
    TRANSPORTS.append("ucx")
SHUTS_OUT = ("tcp", "ucx")
"""The receiver refuses what a writer has not begun to write."""
DEADLINE_S = 60.0
POLL_S = 0.01
PAGES = [5, 6]
OTHERS = [8, 9]


class RankProcess:
    """A rank that obeys."""

    def __init__(self, incarnation: str, port: int, transport: str) -> None:
        self.port = port
        command = [sys.executable, str(Path(rank_program.__file__)), incarnation, str(port)]
        self.process = subprocess.Popen(
            [*command, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "UCX_NET_DEVICES": "lo"},
        )
        self._answer()

    def do(self, name: str, *arguments: Any) -> Any:
        """The result of an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def until(self, name: str, *arguments: Any, gives: Any = True) -> None:
        """Ask until the result is that."""
        end = time.monotonic() + DEADLINE_S
        while (result := self.do(name, *arguments)) != gives:
            assert time.monotonic() < end, f"{name}{arguments} gives {result}, not {gives}"
            time.sleep(POLL_S)

    def until_stopped(self) -> None:
        """The process has stopped itself."""
        end = time.monotonic() + DEADLINE_S
        options = os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        while os.waitid(os.P_PID, self.process.pid, options) is None:
            assert time.monotonic() < end, "it does not stop"
            time.sleep(POLL_S)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert ready, "no answer"
        line = self.process.stdout.readline()
        assert line, f"the rank ended with status {self.process.wait(5)}"
        return json.loads(line)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def ranks(
    transport: str, free_port: Callable[[], int]
) -> Iterator[tuple[RankProcess, RankProcess]]:
    """P, stopped between its decision and its second write, and D, which has the first layer."""
    p, d = (RankProcess(name, free_port(), transport) for name in ("P", "D"))
    try:
        d.do("receive", "t", PAGES, p.port)
        p.do("begin", "t")
        d.until("layers_of", PAGES, gives=["new", *["old"] * (LAYERS - 1)])
        p.do("stop_at_the_next_write")
        # The thread may stop the process before the answer is written
        assert p.process.stdin is not None
        p.process.stdin.write(b'["finish"]\n')
        p.process.stdin.flush()
        p.until_stopped()
        yield p, d
    finally:
        p.close()
        d.close()


def test_late_bytes_land_in_no_other_owners_pages(
    ranks: tuple[RankProcess, RankProcess], transport: str
) -> None:
    """D cancels while P stands between its check and its write. Where D can shut P out it has its
    pages at once, and the late bytes land nowhere; elsewhere it has them only after P's fence, and
    the late bytes are in them by then.
    """
    p, d = ranks
    d.do("cancel", "d-t-1")
    if transport in SHUTS_OUT:
        d.until("has_received", "d-t-1")
        d.do("use", PAGES)
    else:
        d.until("states", gives=["quarantined"])
        assert not d.do("has_received", "d-t-1")
    assert d.do("layers_of", OTHERS) == ["old"] * LAYERS
    p.go_on()
    p._answer()
    d.until("has_received", "d-t-1")
    assert d.do("has_failed", "d-t-1")
    if transport not in SHUTS_OUT:
        assert d.do("layers_of", PAGES)[1] == "new"
        d.do("use", PAGES)
    p.do("release", "t")
    p.until("has_sent", "t")
    _transfer(p, d, "later")
    assert d.do("layers_of", PAGES) == ["mark"] * LAYERS
    assert d.do("untouched_except", [*PAGES, *OTHERS])


def test_its_death_gives_the_pages_back(
    ranks: tuple[RankProcess, RankProcess], transport: str
) -> None:
    """SIGKILL ends a stopped process too: it will not write, and D knows."""
    p, d = ranks
    d.do("cancel", "d-t-1")
    if transport not in SHUTS_OUT:
        d.until("states", gives=["quarantined"])
    p.process.kill()
    d.until("has_received", "d-t-1")
    assert d.do("has_failed", "d-t-1")
    assert d.do("layers_of", PAGES) == ["new", *["old"] * (LAYERS - 1)]
    d.until("states", gives=[])


def _transfer(p: RankProcess, d: RankProcess, transfer_id: str) -> None:
    """Another transfer between the two, complete: whatever P had to write before is written."""
    request_id = d.do("receive", transfer_id, OTHERS, p.port)
    p.do("begin", transfer_id)
    p.do("finish")
    d.until("has_received", request_id)
    assert not d.do("has_failed", request_id)
    assert d.do("layers_of", OTHERS) == ["new"] * LAYERS

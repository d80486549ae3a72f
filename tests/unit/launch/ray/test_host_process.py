"""One process of a cluster on a host: started, watched, stopped, without Ray."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest
from support.up_process import kill, wait_for

from splitserve.orchestrator.agent.processes import marked
from splitserve.orchestrator.config import parse
from splitserve.orchestrator.launch.quality_record import record_path
from splitserve.orchestrator.launch.ray.host_process import HostProcess, host_folder
from splitserve.orchestrator.launch.ray.order import Order

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXT = """
name: here
launcher: ray
engine: mock
model: {path: m}
supervision: {restart_delay_s: 0.01}
"""
RUN = "unit-test-of-host-process"
STAYS = "import signal; signal.pause()"


class Rig:
    """A process whose command is a line of Python."""

    def __init__(self, name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
        order = Order(
            name=name,
            run=RUN,
            config=TEXT,
            router_hosts=("127.0.0.1",),
            router_port=9,
            secret="ab" * 32,
            router_environment={"ONLY_FOR_THE_ROUTER": "x"},
            quality='{"a record": 1}',
        )
        self.died = threading.Event()
        self.process = HostProcess(order, "127.0.0.1", on_death=self.died.set)
        monkeypatch.setattr(HostProcess, "_command", lambda _: [sys.executable, "-c", line])
        self.process.start()

    def wait_for_state(self, state: str) -> None:
        """It says so."""
        wait_for(
            lambda: self.process.report()["state"] == state,
            20,
            state,
            lambda: str(self.process.report()),
        )

    def pid(self) -> int:
        """Of the command."""
        (found,) = wait_for(lambda: marked(RUN), 10, "the command")
        return found.pid


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_JOB_ID", "1")
    yield
    kill(process.pid for process in marked(RUN))


@pytest.mark.parametrize(("name", "has_keys"), [("router", True), ("prefill-0", False)])
def test_the_command_gets_files_and_no_secret_in_its_environment(
    name: str, has_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what Ray sets for its own workers; keys of clients only where they are looked at. After
    the stop nothing lives, and the secret is on no disk.
    """
    rig = Rig(name, STAYS, monkeypatch)
    rig.wait_for_state("running")
    (process,) = marked(RUN)
    environ = process.environ()
    assert not {"OMP_NUM_THREADS", "RAY_JOB_ID", "SPLITSERVE_SECRET"} & environ.keys()
    assert ("ONLY_FOR_THE_ROUTER" in environ) == has_keys
    secret = host_folder("here") / f"{name}.secret"
    assert environ["SPLITSERVE_SECRET_FILE"] == str(secret)
    assert secret.read_text() == "ab" * 32
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", environ["XDG_STATE_HOME"])
        assert record_path(parse(TEXT)).read_text() == '{"a record": 1}'
    assert secret.stat().st_mode & 0o777 == 0o600
    rig.process.stop(10)
    assert rig.process.report()["state"] == "stopped"
    assert marked(RUN) == []
    assert not secret.exists()
    assert not rig.died.is_set()


def test_a_death_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Ray starts another actor."""
    rig = Rig("prefill-0", STAYS, monkeypatch)
    kill([rig.pid()])
    assert rig.died.wait(20)
    assert rig.process.report()["why"] == "signal 9"


def test_one_that_left_is_started_again_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drained node ends with status 0, and its actor stays."""
    rig = Rig("prefill-0", "raise SystemExit(0)", monkeypatch)
    rig.wait_for_state("left")
    assert not rig.died.is_set()
    monkeypatch.setattr(HostProcess, "_command", lambda _: [sys.executable, "-c", STAYS])
    assert rig.process.start_again()
    rig.wait_for_state("running")
    assert not rig.process.start_again()
    rig.process.stop(10)


@pytest.mark.parametrize("status", [2, 3])
def test_what_starting_again_cannot_help_stays_down(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the end of its log."""
    line = f"print('the reason', flush=True); raise SystemExit({status})"
    rig = Rig("decode-0", line, monkeypatch)
    rig.wait_for_state("failed")
    report = rig.process.report()
    assert report["tail"] == ["the reason"]
    assert f"status {status}" in report["why"]
    assert not rig.died.is_set()


def test_what_an_actor_before_has_left_is_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is the only one."""
    first = Rig("prefill-0", STAYS, monkeypatch)
    old = first.pid()
    second = Rig("prefill-0", STAYS, monkeypatch)
    wait_for(lambda: {p.pid for p in marked(RUN)} not in (set(), {old}), 20, "the second one")
    second.wait_for_state("running")
    assert old not in {process.pid for process in marked(RUN)}
    second.process.stop(10)

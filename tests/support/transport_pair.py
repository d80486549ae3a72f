"""Directs processes that own a transport each (``transport_program``): writers and receivers."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitserve.kv_transfer.transports.base import TransportError

ANSWER_DEADLINE_S = 30.0

_incarnations = itertools.count(1)


@dataclass(frozen=True)
class Variant:
    """A transport and the conditions that it runs under."""

    name: str
    transport: str
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    notices_idle_death: bool = True
    """Whether a peer's death is an event though nothing is being written."""

    def __str__(self) -> str:
        return self.name


class TransportProcess:
    """One process that owns a transport; methods of the program are methods here."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.incarnation = ""
        self.base = 0
        self.pages = 0
        self.stride = 0
        self.description = ""
        self.capabilities: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("transport_program.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **variant.env},
        )
        self.pid = self._process.pid

    def do(self, name: str, *, deadline_s: float = ANSWER_DEADLINE_S, **arguments: Any) -> Any:
        """The program's answer. Raises ``TransportError`` when the transport did."""
        self.order(name, **arguments)
        return self.answer(deadline_s)

    def order(self, name: str, **arguments: Any) -> None:
        """Send a command without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, deadline_s: float = ANSWER_DEADLINE_S) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        assert ready, f"process {self.pid} gave no answer in {deadline_s} s"
        line = self._process.stdout.readline()
        assert line, f"process {self.pid} ended with status {self._process.wait(5)}"
        answer = json.loads(line)
        if "transport_error" in answer:
            raise TransportError(answer["transport_error"])
        return answer["result"]

    def setup(self, pages: int, stride: int, **settings: Any) -> None:
        """Fresh pages with random bytes and a registered transport, under a new incarnation."""
        number = next(_incarnations)
        self.incarnation = f"process-{number}"
        self.pages, self.stride = pages, stride
        told = self.do(
            "setup",
            transport=self.variant.transport,
            settings={"incarnation": self.incarnation, **self.variant.settings, **settings},
            pages=pages,
            stride=stride,
            seed=number,
        )
        self.base, self.description = told["base"], told["description"]
        self.capabilities = told["capabilities"]

    def connect(
        self,
        peer: TransportProcess,
        page_bytes: int = 0,
        local_offset: int = 0,
        remote_offset: int = 0,
        description: str = "",
    ) -> None:
        """Get ready to write ``page_bytes`` of each page (default: all) to ``peer``."""
        self.do(
            "connect",
            peer=peer.incarnation,
            description=description or peer.description,
            local=[self.base + local_offset, self.stride, self.pages],
            remote=[peer.base + remote_offset, peer.stride, peer.pages],
            page_bytes=page_bytes or peer.stride,
        )

    def write(self, peer: TransportProcess, tag: int, local: list[int], remote: list[int]) -> int:
        return int(self.do("write", peer=peer.incarnation, tag=tag, local=local, remote=remote))

    def events(self, count: int, deadline_s: float = ANSWER_DEADLINE_S) -> list[dict[str, Any]]:
        """Events as they come until there are ``count``; fewer when the deadline passes."""
        until = time.monotonic() + deadline_s
        found: list[dict[str, Any]] = []
        while len(found) < count and time.monotonic() < until:
            found += self.do("take_events")
        return found

    def stop(self) -> None:
        """SIGSTOP; afterwards it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; afterwards it is gone."""
        self._process.kill()
        self._process.wait(10)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """End the process by the end of its input, or by force."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class ProcessPool:
    """Processes for the tests of a module; those that are sound are used again."""

    def __init__(self) -> None:
        self._idle: list[TransportProcess] = []

    def take(self, variant: Variant) -> TransportProcess:
        """A process without a transport."""
        for process in self._idle:
            if process.variant == variant:
                self._idle.remove(process)
                return process
        return TransportProcess(variant)

    def give_back(self, process: TransportProcess) -> None:
        """Close the transport and keep the process, unless it has been killed."""
        if not process.alive:
            process.end()
            return
        process.do("close")
        self._idle.append(process)

    def close(self) -> None:
        for process in self._idle:
            process.end()
        self._idle.clear()

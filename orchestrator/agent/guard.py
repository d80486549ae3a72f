"""The process between an agent and its engine; it does one thing: end the engine's whole process
tree, whatever happens.

``python -m splitserve.orchestrator.agent.guard [--cpus 0,1] -- COMMAND...`` starts COMMAND in a
session of its own, pinned to the CPUs, and then waits for one of:

- a line on standard input: ``stop SECONDS`` (SIGTERM to the engine, SIGKILL to all of it when the
  seconds are over) or ``kill``;
- the end of standard input, or SIGTERM from the kernel: the agent is gone, so everything is killed
  at once;
- the engine's end.

It is a subreaper, so orphans of the engine (vLLM's engine core and workers, also in sessions of
their own) become its children, and it exits only when it has none left: its exit is the proof that
nothing of the engine lives. Its exit status is the engine's; 128 + N stands for signal N.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from splitserve.orchestrator.agent.processes import (
    become_subreaper,
    descendants,
    die_with_parent,
    reap_children,
)

_TICK_S = 5.0
_KILL_TICK_S = 0.05
_LINE_LIMIT_BYTES = 4096


def main(arguments: list[str]) -> int:
    """Run the guard until the engine's tree is gone; returns the exit status to use."""
    cpus, command = _parse(arguments)
    become_subreaper()
    wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    die_with_parent(os.getppid(), signal.SIGTERM)
    return Guard(_start(cpus, command), wakeup_read).run()


@dataclass
class Guard:
    """The loop of one guard. ``kill_at`` is the time from which on everything is killed, None while
    the engine may run.
    """

    engine: subprocess.Popen[bytes]
    wakeup: int
    kill_at: float | None = None
    exit_status: int | None = None
    _orders: bytes = b""

    def run(self) -> int:
        """Returns the engine's exit status when no process of it is left."""
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            selector.register(self.wakeup, selectors.EVENT_READ)
            while not self._is_over():
                for key, _ in selector.select(self._wait_s()):
                    if key.fd == self.wakeup:
                        self._on_signals(os.read(self.wakeup, 4096))
                    elif not self._read_orders():
                        selector.unregister(sys.stdin.fileno())
        assert self.exit_status is not None
        return self.exit_status

    def _is_over(self) -> bool:
        """Reap, kill what is due, and say whether nothing is left."""
        status = self.engine.poll()
        if status is not None and self.exit_status is None:
            self.exit_status = status if status >= 0 else 128 - status
            self.kill_at = time.monotonic()
        reap_children(keep=() if status is not None else (self.engine.pid,))
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            for process in descendants():
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
        return self.exit_status is not None and _has_no_child()

    def _wait_s(self) -> float:
        if self.kill_at is None:
            return _TICK_S
        return max(_KILL_TICK_S, min(_TICK_S, self.kill_at - time.monotonic()))

    def _on_signals(self, numbers: bytes) -> None:
        if set(numbers) & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}:
            self.kill_at = time.monotonic()

    def _read_orders(self) -> bool:
        """Apply complete lines of standard input; False at its end."""
        data = os.read(sys.stdin.fileno(), 4096)
        if not data:
            self.kill_at = time.monotonic()
            return False
        *lines, rest = (self._orders + data).split(b"\n")
        self._orders = rest[:_LINE_LIMIT_BYTES]
        for line in lines:
            self._on_order(line.decode(errors="replace").split())
        return True

    def _on_order(self, words: list[str]) -> None:
        if words[:1] == ["kill"]:
            self.kill_at = time.monotonic()
        elif words[:1] == ["stop"] and len(words) == 2:
            self.kill_at = time.monotonic() + float(words[1])
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.engine.pid, signal.SIGTERM)


def _parse(arguments: list[str]) -> tuple[set[int] | None, list[str]]:
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    cpus = {int(cpu) for cpu in options[1].split(",")} if options[:1] == ["--cpus"] else None
    return cpus, command


def _start(cpus: set[int] | None, command: list[str]) -> subprocess.Popen[bytes]:
    guard = os.getpid()

    def before_exec() -> None:
        die_with_parent(guard, signal.SIGKILL)

    # the mask set here is inherited by the engine and all it starts
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before_exec
    )


def _has_no_child() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

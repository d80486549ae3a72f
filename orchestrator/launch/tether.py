"""``python -m splitserve.orchestrator.launch.tether PARENT -- COMMAND...``: becomes COMMAND, which
dies when process PARENT dies.

The kernel keeps the promise (``PR_SET_PDEATHSIG`` survives ``exec``), so it holds when the parent
is killed with SIGKILL too. PARENT must have started this process from its main thread.
"""

from __future__ import annotations

import os
import sys

from splitserve.orchestrator.agent.processes import die_with_parent


def tethered(argv: list[str]) -> list[str]:
    """The command line that runs ``argv`` tied to this process."""
    module = "splitserve.orchestrator.launch.tether"
    return [sys.executable, "-m", module, str(os.getpid()), "--", *argv]


def main(arguments: list[str]) -> None:
    """Replaces this process; returns only by an exception."""
    parent, separator, *command = arguments
    if separator != "--" or not command:
        raise SystemExit("usage: tether PARENT -- COMMAND...")
    die_with_parent(int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

"""``python -m splitserve.orchestrator.observe.log_program``: writes the router's request log to its
standard output, in a process of its own.

A router has one thread for all requests, and making a line takes longer than handing over what it
says. Standard input brings the requests (``request_records``). It ends when its input does: signals
that end a router, and reach a whole process group, do not end it before the last line.
"""

from __future__ import annotations

import logging
import signal
import sys

from splitserve.orchestrator.router.log_lines import LogLines
from splitserve.orchestrator.router.request_records import records_in


def main() -> int:
    """The process's exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    lines = LogLines(sys.stdout.buffer)
    for records in records_in(sys.stdin.buffer):
        lines.write(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())

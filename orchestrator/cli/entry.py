"""What ``splitserve`` calls first. Importing the commands takes a second or more on a slow machine,
and Ctrl-C may come meanwhile: so this module imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

EXIT_INTERRUPTED = 130
"""Ctrl-C has ended the command; shells say the same of a process that SIGINT has ended."""


def main() -> None:
    """Run the command line. Ctrl-C before its commands are there ends it without a word."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # A shell that starts it with `&` may have it ignored
        signal.signal(signal.SIGINT, _end_quietly)
    from splitserve.orchestrator.cli.main import main as command

    signal.signal(signal.SIGINT, usual)
    command()


def _end_quietly(*_: object) -> NoReturn:
    """Nothing has been begun that would have to be ended; an exception could be taken for a failed
    import.
    """
    os._exit(EXIT_INTERRUPTED)

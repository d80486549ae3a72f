"""``python -m splitserve.orchestrator.observe.span_program SETTINGS``: the router's spans, made and
sent in a process of their own.

A router has one thread for all requests, and making four spans takes as long as half a request.
Standard input brings the requests (``request_records``); standard output gives a line of counts
after each batch. It ends when its input does, ``CLOSE_TIMEOUT_S`` later at most: signals that end a
router, and reach a whole process group, do not end it before that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from splitserve.orchestrator.config.tracing_schema import TracingConfig
from splitserve.orchestrator.observe.span_sender import SpanSender, exporter_of
from splitserve.orchestrator.observe.spans import SpanSource, request_spans
from splitserve.orchestrator.router.request_records import records_in

if TYPE_CHECKING:
    from splitserve.orchestrator.observe.sent_counts import SentCounts

CLOSE_TIMEOUT_S = 2.0
NICENESS = 19
"""Requests come first: beside a busy core's other work it gets a hundredth or two of it."""


class ProgramSettings(msgspec.Struct, frozen=True):
    """What the router hands over, as JSON."""

    tracing: dict[str, str | float]
    instance: str
    model: str


def main() -> int:
    """The process's exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.argv[1].encode(), type=ProgramSettings)
    tracing = TracingConfig.model_validate(settings.tracing)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    os.nice(NICENESS)
    source = SpanSource(f"{tracing.service_name}-router", settings.instance, settings.model)
    sender: SpanSender[dict[str, Any]] = SpanSender(
        exporter_of(tracing),
        lambda record: request_spans(record, source),
        tracing.traces_url,
        _tell,
    )
    for records in records_in(sys.stdin.buffer):
        for record in records:
            sender.put(record)
    sender.close(CLOSE_TIMEOUT_S)
    return 0


def _tell(counts: SentCounts) -> None:
    # The router may be gone already
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), msgspec.json.encode(counts) + b"\n")


if __name__ == "__main__":
    sys.exit(main())

"""``python -m splitserve.orchestrator.observe.span_program SETTINGS``: the router's spans, made and
sent in a process of their own.

A router has one thread for all requests, and making four spans takes as long as half a request.
Standard input brings one record per line (``request_log``); standard output gives a line of counts
after each batch. It ends when its input does, ``CLOSE_TIMEOUT_S`` later at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

import msgspec
import orjson

from splitserve.orchestrator.config.tracing_schema import TracingConfig
from splitserve.orchestrator.observe.span_sender import SpanSender, exporter_of
from splitserve.orchestrator.observe.spans import SpanSource, request_spans

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
    settings = msgspec.json.decode(sys.argv[1].encode(), type=ProgramSettings)
    tracing = TracingConfig.model_validate(settings.tracing)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    os.nice(NICENESS)
    source = SpanSource(f"{tracing.service_name}-router", settings.instance, settings.model)
    sender: SpanSender[bytes] = SpanSender(
        exporter_of(tracing),
        lambda line: request_spans(orjson.loads(line), source),
        tracing.traces_url,
        _tell,
    )
    for line in sys.stdin.buffer:
        sender.put(line)
    sender.close(CLOSE_TIMEOUT_S)
    return 0


def _tell(counts: SentCounts) -> None:
    # The router may be gone already
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), msgspec.json.encode(counts) + b"\n")


if __name__ == "__main__":
    sys.exit(main())

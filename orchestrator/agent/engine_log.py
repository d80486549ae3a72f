"""What an engine prints: kept in a bounded file, its last lines in memory, its loading stage and
the likely cause of its end read from it.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_log = logging.getLogger(__name__)

LOG_LIMIT_BYTES = 32 * 2**20
"""A log file that reaches this size becomes ``NAME.1`` (replacing the last one) and a new one is
begun.
"""
LAST_LINES = 40
FIRST_ERRORS = 10
ERROR_AGE_LIMIT_S = 60.0
"""An engine that serves prints errors of requests, too; those older than this have not ended it."""
SIGKILLED = 137
LINE_LIMIT_CHARACTERS = 2000

_EXCEPTION = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR \S+ \S+ \[\S+\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)"
)
"""An exception's own line, with or without the prefix that vLLM's processes put before it."""
_FOLLOW_UP = re.compile(r"Engine core initialization failed|EngineDeadError")
"""Errors that only say that something else has failed."""

STAGES = (
    (
        re.compile(r"init engine \(|Starting vLLM API server|Started server process"),
        "starting server",
    ),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading .*checkpoint shards:\s*(\d+)%"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "kv cache"),
    (re.compile(r"KV cache size|CPU blocks|kv cache|Registering KV"), "kv cache"),
    (re.compile(r"Warming up model|Capturing CUDA graph|torch\.compile takes"), "warm-up"),
)
"""First match wins."""
STAGE_ORDER = ("starting", "loading weights", "kv cache", "warm-up", "starting server")

CAUSES = (
    (
        re.compile(r"[Aa]ddress already in use|Errno 98|EADDRINUSE"),
        "a port is in use; set `port_base` and `transfer.port_base` to 0 or to free ports",
    ),
    (
        re.compile(r"out of memory|MemoryError|[Cc]annot allocate memory|DefaultCPUAllocator"),
        "out of memory; lower `kv_cache_bytes` or `engine_args.max_model_len`",
    ),
    (
        re.compile(
            r"(?:ModuleNotFoundError|ImportError): (.*)|(cannot import name .*?)(?:, please|$)"
        ),
        "a Python package is missing or broken ({0}); install the engine into this environment",
    ),
    (
        re.compile(r"unrecognized arguments: (.*)|argument (--\S+): (?:invalid|expected)"),
        "the engine does not accept {0}; correct `engine_args`",
    ),
    (
        re.compile(
            r"Repository Not Found|is not a local folder|does not appear to have a file named|"
            r"No such file or directory: '[^']*config\.json|"
            r"Cannot find any model weights|LocalEntryNotFound"
        ),
        "the model is missing or incomplete; check `model.path` or run `splitserve model prepare`",
    ),
    (
        re.compile(
            r"max_model_len|max seq len .* larger than|No available memory for the cache blocks"
        ),
        "`engine_args.max_model_len` does not fit; lower it or raise `kv_cache_bytes`",
    ),
    (
        re.compile(
            r"dtype .*(?:not supported|unsupported)|"
            r"(?:bfloat16|float16|half) .*not (?:supported|implemented)"
        ),
        "this machine cannot compute in that type; set `engine_args.dtype: float32` in both pools",
    ),
    (
        re.compile(r"TransportError: (.*)"),
        "the transport cannot be used here: {0}",
    ),
)
"""Searched in this order, each through all lines."""


class EngineLog:
    """Takes the engine's output as bytes. ``hide`` are strings that never reach the file (secrets
    the engine might print).
    """

    def __init__(
        self,
        path: Path,
        hide: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._clock = clock
        self.stage = "starting"
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._errors: dict[str, float] = {}
        """The first exceptions printed, without those that only follow from others, and when."""
        self._does_serve = False
        self._hide = [secret for secret in hide if secret]
        self._rest = b""
        self._unwritten_lines = 0
        """Lost since the file could last be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def feed(self, data: bytes) -> bool:
        """Take output; True when ``stage`` has changed."""
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + data)
        if len(self._rest) > LINE_LIMIT_CHARACTERS:
            lines.append(self._rest)
            self._rest = b""
        before = self.stage
        self._write([text for line in lines if (text := self._take(line))])
        return self.stage != before

    def story(self) -> tuple[str, ...]:
        """What a person needs to see of an engine that ended: its first errors, then its last
        lines.
        """
        self._drop_old_errors()
        return (*self._errors, *list(self.last_lines)[len(self._errors) :])

    def begin_serving(self) -> None:
        """The engine has loaded: what went wrong until now has not ended it."""
        self._does_serve = True
        self._errors.clear()

    def _drop_old_errors(self) -> None:
        if self._does_serve:
            since = self._clock() - ERROR_AGE_LIMIT_S
            self._errors = {text: at for text, at in self._errors.items() if at >= since}

    def close(self) -> None:
        """Write what is left and close the file."""
        self._write([text for text in [self._take(self._rest)] if text])
        self._rest = b""
        self._file.close()

    def note(self, text: str) -> None:
        """Add a line of the agent itself."""
        self._write([f"[agent] {text}"])

    def _write(self, lines: list[str]) -> None:
        """Add lines to the file. A full disk must not end a healthy engine: lines that cannot be
        written are counted, and the count is written when there is room again.
        """
        if not lines:
            return
        told = list(lines)
        if self._unwritten_lines:
            told.insert(0, f"[agent] {self._unwritten_lines} lines could not be written here")
        try:
            self._file.write("".join(f"{line}\n" for line in told).encode())
            self._unwritten_lines = 0
            if self._file.tell() > LOG_LIMIT_BYTES:
                self._rotate()
        except OSError as error:
            if not self._unwritten_lines:
                _log.error("cannot write %s: %s", self.path, error)
            self._unwritten_lines += len(lines)

    def _take(self, line: bytes) -> str:
        """Learn from a line; what is to be written of it."""
        text = line.decode(errors="replace").rstrip()[:LINE_LIMIT_CHARACTERS]
        if not text:
            return ""
        for secret in self._hide:
            text = text.replace(secret, "(hidden)")
        self.last_lines.append(text)
        self.stage = stage_after(self.stage, text)
        error = _EXCEPTION.match(text)
        if error is None or _FOLLOW_UP.search(text):
            return text
        self._drop_old_errors()
        if len(self._errors) < FIRST_ERRORS:
            self._errors.setdefault(error[1], self._clock())
        return text

    def _rotate(self) -> None:
        self._file.close()
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        self._file = self.path.open("ab", buffering=0)


def stage_after(stage: str, line: str) -> str:
    """The loading stage after ``line`` was printed in ``stage``; it never goes back."""
    for pattern, name in STAGES:
        match = pattern.search(line)
        if match is None:
            continue
        if STAGE_ORDER.index(name) < STAGE_ORDER.index(stage.split(" (")[0]):
            return stage
        percent = match[1] if match.re.groups and match[1] else None
        return f"{name} ({percent} %)" if percent else name
    return stage


def likely_cause(lines: Sequence[str], exit_status: int) -> str:
    """Why an engine ended, in a sentence for people: from its last lines, else from its exit
    status. Who is killed by SIGKILL has not said why: its last lines are about something else.
    """
    if exit_status == SIGKILLED:
        return "killed by SIGKILL: by hand, or by the kernel for lack of memory (see `dmesg`)"
    for pattern, cause in CAUSES:
        for line in lines:
            match = pattern.search(line)
            if match is not None:
                details = [group for group in match.groups() if group]
                return cause.format(*details) if details else cause
    is_about_another = False
    for line in lines:
        if _FOLLOW_UP.search(line):
            is_about_another = True
        elif (error := _EXCEPTION.match(line)) is not None:
            return f"ended by {error[1]}"
    if is_about_another:
        return (
            "its engine core process died: killed by hand, by the kernel for lack of memory (see "
            "`dmesg`), or by a fault that its log may show"
        )
    if exit_status > 128:
        return f"ended by signal {exit_status - 128}"
    return f"ended with status {exit_status}; see its log"

"""Two short-lived processes that write pages to each other as a pair of nodes would: with their
CPUs, their environment and their transport.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from splitserve.kv_transfer.transports.settings import TransportSettings
from splitserve.orchestrator.engines.command import network_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitserve.orchestrator.config import NodeConfig

PROGRAM = "splitserve.kv_transfer.transports.trial"
SETUP_DEADLINE_S = 30.0
"""Until a side has loaded its libraries: NIXL's take seconds on a cold disk."""
ANSWER_DEADLINE_S = 12.0
END_DEADLINE_S = 5.0
TRIAL_BYTES = 32 << 20
PAGES_LIMIT = 4096
LATENCY_WRITES = 40
BANDWIDTH_BUDGET_S = 0.4
COPY_BUDGET_S = 0.2
_SAID_LIMIT_BYTES = 1 << 20
_BLOCK = re.compile(r"(?:ucp_put\*|ucp_tag_send\*)")
_ROW = re.compile(r"\|\s*\d+[KMG]?(?:\.\.(?:inf|\d+[KMG]?))?\s*\|[^|]*\|\s*([^|]*?)\s*\|\s*$")
_TITLE = re.compile(r"\|[^|]*(?:intra|inter)-node cfg#")


class TrialError(Exception):
    """A side could not be set up, or bytes did not arrive; the message says whose and why."""

    def __init__(self, node: NodeConfig, why: str, *, is_late: bool = False) -> None:
        self.node = node
        self.why = why
        self.is_late = is_late
        """It only took too long, which a busy machine explains too."""
        super().__init__(f"{node.name}: {why}")


@dataclass(frozen=True)
class Direction:
    """Writes from one side to the other."""

    bytes_per_s: int
    latency_us: float
    """Median of a write of one page to an established peer."""
    latency_us_p95: float
    setup_ms: float
    """To connect, and the first write."""


@dataclass(frozen=True)
class PairResult:
    """What a pair of nodes has measured."""

    prefill: str
    decode: str
    lane: str
    """How UCX moves pages, in its words (``cma/memory``, ``tcp/lo``); the transport's name where
    UCX has no part."""
    page_bytes: int
    put: Direction
    """The prefill node writes into the decode node's pages: what every split request does."""
    get: Direction
    """The decode node writes into the prefill node's: after a change of roles."""
    copy_bytes_per_s: int
    """A plain copy of the same pages on the prefill node's CPUs: the slower of one before and one
    after, so that what began or ended meanwhile is not taken for the transport's fault.
    """

    @property
    def share(self) -> float:
        """Of the plain copy's speed, in the slower direction."""
        return min(self.put.bytes_per_s, self.get.bytes_per_s) / self.copy_bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        """For ``doctor --json``."""
        return {**asdict(self), "share_of_copy": round(self.share, 3)}


def try_pair(
    writer: NodeConfig, reader: NodeConfig, page_bytes: int, environ: Mapping[str, str]
) -> PairResult:
    """Both nodes have written to each other and are gone. Raises ``TrialError``."""
    sides: list[_Side] = []
    try:
        for node in (writer, reader):
            sides.append(_Side(node, environ))
        return _measured(sides[0], sides[1], page_bytes)
    finally:
        for side in sides:
            side.end()


def _measured(writer: _Side, reader: _Side, page_bytes: int) -> PairResult:
    pages = max(2, min(PAGES_LIMIT, TRIAL_BYTES // page_bytes))
    for number, side in enumerate((writer, reader)):
        side.order("setup", **side.setup(page_bytes, pages, seed=number + 1))
    told = {side: side.answer(SETUP_DEADLINE_S) for side in (writer, reader)}
    copies = [float(writer.do("copy", budget_s=COPY_BUDGET_S))]
    put = _direction(writer, reader, told[reader])
    get = _direction(reader, writer, told[writer])
    copies.append(float(writer.do("copy", budget_s=COPY_BUDGET_S)))
    sent, landed = zip(*(side.do("digests") for side in (writer, reader)), strict=True)
    for side, mine, theirs in ((writer, sent[0], landed[1]), (reader, sent[1], landed[0])):
        if mine != theirs:
            raise TrialError(side.node, "other bytes arrived than it wrote")
    return PairResult(
        prefill=writer.node.name,
        decode=reader.node.name,
        lane=lane_in(writer.said()) or writer.node.settings.transfer.transport,
        page_bytes=page_bytes,
        put=put,
        get=get,
        copy_bytes_per_s=round(min(copies)),
    )


def _direction(side: _Side, peer: _Side, told: dict[str, Any]) -> Direction:
    name = peer.node.name
    connecting = side.do("connect", peer=name, description=told["description"], base=told["base"])
    first, *later = side.do("write_one", peer=name, count=LATENCY_WRITES + 1)
    speed = side.do("write_all", peer=name, budget_s=BANDWIDTH_BUDGET_S)
    ordered = sorted(later)
    return Direction(
        bytes_per_s=round(float(speed)),
        latency_us=round(median(ordered) * 1e6, 1),
        latency_us_p95=round(ordered[int(len(ordered) * 0.95) - 1] * 1e6, 1),
        setup_ms=round((connecting + first) * 1e3, 2),
    )


def lane_in(said: str) -> str:
    """How UCX moves large pages to another process, from the tables that it prints with
    ``UCX_PROTO_INFO``: what the last row of the last such table names. Empty when there is none.
    """
    lane, is_between, is_write = "", False, False
    for line in said.splitlines():
        if "cfg#" in line and "|" in line:
            is_between, is_write = _TITLE.search(line) is not None, False
        if is_between and _BLOCK.search(line):
            is_write = True
        elif is_write and (row := _ROW.search(line)):
            lane = row.group(1)
        elif is_write and "from host memory" in line:
            is_write = False
    return lane


class _Side:
    """One process of a trial."""

    def __init__(self, node: NodeConfig, environ: Mapping[str, str]) -> None:
        self.node = node
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        cpus = ",".join(map(str, node.cpus or ()))
        speaking = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, cpus],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**environ, **speaking, **network_environment(node), **node.settings.env},
        )
        self._pending = b""

    def setup(self, page_bytes: int, pages: int, seed: int) -> dict[str, Any]:
        """What the program needs to make the node's transport."""
        settings = self.node.settings
        transport = TransportSettings(
            incarnation=self.node.name,
            host=self.node.transfer_host,
            advertised_host=self.node.advertise_host,
            port=self.node.data_port_base,
        )
        return {
            "transport": settings.transfer.transport,
            "settings": asdict(transport),
            "page_bytes": page_bytes,
            "pages": pages,
            "seed": seed,
        }

    def do(self, name: str, **arguments: Any) -> Any:
        """The program's answer. Raises ``TrialError``."""
        self.order(name, **arguments)
        return self.answer(ANSWER_DEADLINE_S)

    def order(self, name: str, **arguments: Any) -> None:
        """Send a command; ``answer`` follows."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise TrialError(self.node, self._ending()) from error

    def answer(self, limit_s: float) -> Any:
        """The next answer. Raises ``TrialError``."""
        assert self._process.stdout is not None
        descriptor, end = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._pending:
            left = end - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TrialError(self.node, f"no answer in {limit_s:g} s", is_late=True)
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise TrialError(self.node, self._ending())
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise TrialError(self.node, str(answer["error"]))
        return answer["result"]

    def said(self) -> str:
        """What its libraries have printed so far."""
        self._errors.seek(0)
        return self._errors.read(_SAID_LIMIT_BYTES).decode(errors="replace")

    def end(self) -> None:
        """The process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            self._process.kill()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_DEADLINE_S)
        self._process.stdout.close()
        self._errors.close()

    def _ending(self) -> str:
        """Why the process has ended, by its last words."""
        try:
            status = self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return "it does not read"
        words = [line for line in self.said().splitlines() if line.strip() and "| " not in line]
        return f"the trial process ended with status {status} ({words[-1][-200:] if words else ''})"

"""Reads what the product says about its transfers: one JSON line per finished transfer and side.

The engines write the files because ``SPLITSERVE_TRANSFER_LOG`` names them. Times are of the
monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

RECORD_DEADLINE_S = 10.0


class MissingRecordError(Exception):
    """A transfer was not logged in time."""


@dataclass(frozen=True)
class Transfer:
    """Both sides' records of one transfer."""

    send: dict[str, Any]
    receive: dict[str, Any]

    @property
    def tail_s(self) -> float | None:
        """Seconds from P's last layer to "delivered": what the transfer adds after the
        computation.
        """
        if "last_layer" not in self.send:
            return None
        return float(self.send["ended"] - self.send["last_layer"])

    @property
    def streamed(self) -> bool:
        """The first page was written before P's last layer was computed."""
        sent = self.send
        return "first_write" in sent and sent["first_write"] < sent.get("last_layer", 0.0)


def records(path: Path, transfer_id: str) -> list[dict[str, Any]]:
    """The complete lines about one transfer."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    parsed = (json.loads(line) for line in lines if line.endswith("\n") and transfer_id in line)
    return [record for record in parsed if record["transfer_id"] == transfer_id]


async def wait_for(logs: list[Path], transfer_id: str) -> Transfer:
    """Both sides' last record of the transfer. Raises ``MissingRecordError`` after ten seconds."""
    deadline = time.monotonic() + RECORD_DEADLINE_S
    while True:
        send, receive = (records(path, transfer_id) for path in logs)
        if send and receive:
            return Transfer(send[-1], receive[-1])
        if time.monotonic() > deadline:
            raise MissingRecordError(
                f"{transfer_id}: {len(send)} send, {len(receive)} receive records"
            )
        await asyncio.sleep(0.02)

"""What a client has sent, as one message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitserve.orchestrator.router.engine_client import RawHeaders


@dataclass(slots=True)
class HttpRequest:
    """One complete request. Header names are in lower case."""

    method: str
    path: str
    headers: RawHeaders
    body: bytes
    keep_alive: bool
    allows_chunks: bool
    """False for HTTP/1.0, where only the connection's end can end a body of unknown length."""
    query: str = ""
    """What follows the path's question mark."""

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

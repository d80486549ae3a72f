"""What an answer is written to: a connection of the HTTP server, or who plays one in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from splitserve.orchestrator.router.engine_client import RawHeaders


class Sink(Protocol):
    """Where the client's answer goes. ``finish`` or ``abort`` comes last."""

    def send_head(self, status: int, headers: RawHeaders, body_bytes: int | None) -> None:
        """Status line and headers; ``body_bytes`` None for a body whose length is not known."""

    def send_body(self, data: bytes, is_last: bool = False) -> None:
        """The next bytes; ``is_last`` when ``finish`` follows at once."""

    def finish(self) -> None:
        """The answer is complete."""

    def abort(self) -> None:
        """Close the connection so that the client sees an incomplete answer."""

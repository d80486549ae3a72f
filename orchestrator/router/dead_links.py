"""How a peer that has vanished without a word is noticed: by the kernel, which asks an idle
connection's other end now and then, and gives up bytes that nobody acknowledges.

A stopped process is not noticed so: its kernel answers for it.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

IDLE_S: Final = 10
"""Seconds without a byte after which the other end is asked."""
INTERVAL_S: Final = 3
QUESTIONS: Final = 4
LIMIT_S: Final = IDLE_S + INTERVAL_S * QUESTIONS
"""A dead link is broken for the router after so many seconds."""

OPTIONS: Final = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", IDLE_S),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", INTERVAL_S),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", QUESTIONS),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", LIMIT_S * 1000),
    )
    if hasattr(socket, name)
)


def notice_dead_link(transport: asyncio.BaseTransport) -> None:
    """The connection breaks when the link is dead for ``LIMIT_S``. Nothing for what is no TCP
    connection of the kernel's.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for level, option, value in OPTIONS:
        connection.setsockopt(level, option, value)

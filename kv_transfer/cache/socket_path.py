"""Where a host's cache server listens: a ``SOCK_SEQPACKET`` Unix socket.

The kernel takes at most 107 bytes as such a socket's address, and folders of clusters may be
deeper. So both sides name the socket through an open descriptor of its folder, which is always
short.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROBE_S = 0.2


@contextlib.contextmanager
def short_address(path: str | Path) -> Iterator[str]:
    """An address for ``bind`` and ``connect`` that means ``path`` until the block ends. Raises
    ``OSError`` when its folder is not there.
    """
    place = Path(path)
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{place.name}"
    finally:
        os.close(folder)


def is_listening(path: str | Path) -> bool:
    """Whether a server takes connections on ``path``; asks for a fifth of a second at most."""
    try:
        connected(path, _PROBE_S).close()
    except OSError:
        return False
    return True


def connected(path: str | Path, timeout_s: float) -> socket.socket:
    """A blocking socket to the server that listens on ``path``; its calls take ``timeout_s`` at
    most. Raises ``OSError``.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        with short_address(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection

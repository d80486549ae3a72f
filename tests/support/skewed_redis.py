"""A Redis whose clock is wrong: a relay that answers ``TIME`` itself and hands on all else."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

ASKED = b"*1\r\n$4\r\nTIME\r\n"


class SkewedRedis:
    """Listens on ``port``, in front of the server on ``behind``."""

    def __init__(self, behind: int, skew_s: float) -> None:
        self._behind = behind
        self._skew_s = skew_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Nobody is served any more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._behind))
        with client, server, contextlib.suppress(OSError):
            while True:
                ready, _, _ = select.select([client, server], [], [])
                for source in ready:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if data == ASKED:
                        client.sendall(self._time())
                    else:
                        (server if source is client else client).sendall(data)

    def _time(self) -> bytes:
        seconds = b"%d" % (time.time() + self._skew_s)
        return b"*2\r\n$%d\r\n%s\r\n$1\r\n0\r\n" % (len(seconds), seconds)

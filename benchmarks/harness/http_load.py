"""Closed-loop HTTP load over raw sockets, light enough to share cores with what it loads."""

from __future__ import annotations

import json
import select
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

ANSWER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Row:
    """One load."""

    name: str
    concurrency: int
    is_streaming: bool
    prompt_words: int = 8
    model: str = "fake"

    def body(self) -> bytes:
        """The request's JSON."""
        return json.dumps(
            {
                "model": self.model,
                "prompt": " ".join(f"word{i % 97}" for i in range(self.prompt_words)),
                "max_tokens": 32,
                "temperature": 0,
                "stream": self.is_streaming,
            },
            separators=(",", ":"),
        ).encode()


@dataclass
class Target:
    """Something that answers requests; the process whose CPU time is counted, if any."""

    name: str
    port: int
    process: psutil.Process | None
    headers: bytes = b""

    def request(self, row: Row) -> bytes:
        """One request as it goes over the wire."""
        body = row.body()
        return (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: bench\r\n"
            b"Accept: */*\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
            % (self.port, self.headers, len(body))
            + body
        )

    def cpu_s(self) -> float:
        """CPU time so far."""
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return float(times.user + times.system)


class Client:
    """One keep-alive connection that sends the same request again and again."""

    def __init__(self, target: Target, row: Row) -> None:
        self._socket = socket.create_connection(("127.0.0.1", target.port), ANSWER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = target.request(row)
        self._is_streaming = row.is_streaming
        self._answer = b""
        self._sent_at = 0.0

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self) -> None:
        """The next request."""
        self._answer = b""
        self._sent_at = time.perf_counter()
        self._socket.sendall(self._request)

    def read(self) -> float | None:
        """Seconds from request to the answer's end, None when it is not complete yet."""
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the connection was closed in the middle of an answer")
        self._answer = self._answer + data if self._answer else data
        if not self._is_complete():
            return None
        took = time.perf_counter() - self._sent_at
        if not self._answer.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"unexpected answer: {self._answer[:500]!r}")
        return took

    def _is_complete(self) -> bool:
        answer = self._answer
        if self._is_streaming:
            return answer.endswith(b"\r\n0\r\n\r\n")
        end = answer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = answer[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            return answer.endswith(b"\r\n0\r\n\r\n")
        return len(answer) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def load(target: Target, row: Row, seconds: float) -> dict[str, float]:
    """Keep ``row.concurrency`` requests out for that long."""
    clients = [Client(target, row) for _ in range(row.concurrency)]
    took: list[float] = []
    poll = select.epoll()
    by_fd = {client.fileno(): client for client in clients}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    cpu, start = target.cpu_s(), time.perf_counter()
    end = start + seconds
    for client in clients:
        client.send()
    out = len(clients)
    while out:
        ready = poll.poll(ANSWER_TIMEOUT_S)
        if not ready:
            raise TimeoutError(f"{target.name}: no answer within {ANSWER_TIMEOUT_S} s")
        for fd, _ in ready:
            answered = by_fd[fd].read()
            if answered is not None:
                took.append(answered)
                if time.perf_counter() < end:
                    by_fd[fd].send()
                else:
                    out -= 1
    elapsed = time.perf_counter() - start
    cpu = target.cpu_s() - cpu
    poll.close()
    for client in clients:
        client.close()
    took.sort()
    return {
        "requests_per_s": len(took) / elapsed,
        "p50_ms": took[len(took) // 2] * 1000,
        "p99_ms": took[int(len(took) * 0.99)] * 1000,
        "router_cpu_us_per_request": cpu / len(took) * 1e6,
    }

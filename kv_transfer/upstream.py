"""One connection of the decode role: to a prefill rank that may write to us.

Each connection starts with a ``Hello``; until the ``Welcome`` that answers it nothing else is said.
A connection that breaks, or is silent, is dialled anew on a fresh socket. ZeroMQ would reconnect by
itself, but it keeps the queues: a message meant for one engine process could reach its successor.
And a socket whose handshake failed it may give up for good.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from splitserve.kv_transfer import messages
from splitserve.kv_transfer.channel import dial

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 1_000
"""Control messages read before the thread looks at everything else again."""
DECLINE_LIMIT_TRANSFERS = 1_000
"""Declined transfers that wait for an introduction; older ones are left to the peer's lease."""


@dataclass(frozen=True)
class ConnectionLost:
    """The introduction holds no more: what was granted stays granted, a new hello is on its way."""

    reason: str


UpstreamEvent = messages.FromPrefill | ConnectionLost


class Upstream:
    """Owned by the transfer thread."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        secret: bytes,
        hello: messages.Hello,
        now: float,
    ) -> None:
        """Dials and says hello. Raises ``OSError`` when ``address`` is none."""
        self.address = address
        self.welcome: messages.Welcome | None = None
        """The peer's introduction on the current connection."""
        self.incarnation = ""
        """Of the peer that was introduced last."""
        self.hello_due = False
        """An introduction was ended by the peer; the next one is asked for after a pause."""
        self.declines: deque[messages.Cancel] = deque(maxlen=DECLINE_LIMIT_TRANSFERS)
        """To be said once it is introduced."""
        self._context = context
        self._secret = secret
        self._hello = hello
        self._is_connected = False
        self.last_heard = now
        """Or dialled."""
        self._connect()

    def is_introduced_as(self, incarnation: str) -> bool:
        """Whether what is said now reaches that engine."""
        return self.welcome is not None and self.welcome.incarnation == incarnation

    def say_hello(self) -> None:
        """Ask for an introduction (again)."""
        self.hello_due = False
        self.send(self._hello)

    def send(self, message: messages.FromDecode) -> None:
        """Queue a message; never blocks. Lost when the queue is full: whoever waits asks again."""
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("dropped %s to %s: %s", type(message).__name__, self.address, error)

    def receive(self, now: float) -> list[UpstreamEvent]:
        """What has arrived, oldest first, up to a bound.

        After a loss the connection is dialled anew; fences that came before it still count, an
        answer to the old hello does not.
        """
        is_lost = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            is_lost = is_lost or (self._is_connected and event == zmq.EVENT_DISCONNECTED)
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        events = self._read(now)
        if not is_lost:
            return events
        self.redial(now)
        answers = (messages.Welcome, messages.TurnedAway)
        kept = [event for event in events if not isinstance(event, answers)]
        return [*kept, ConnectionLost("the connection to the prefill engine was lost")]

    def _read(self, now: float) -> list[UpstreamEvent]:
        events: list[UpstreamEvent] = []
        for _ in range(MESSAGES_PER_TURN):
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.last_heard = now
            try:
                events.append(messages.decode_from_prefill(payload))
            except msgspec.DecodeError as error:
                logger.warning("dropped a control message that cannot be read: %s", error)
        return events

    def redial(self, now: float) -> None:
        """A new connection, with nothing queued for the old one."""
        self.close()
        self.welcome, self._is_connected, self.last_heard = None, False, now
        self._connect()

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        """What may become readable."""
        return self._socket, self._monitor

    def _connect(self) -> None:
        self._socket = dial(self._context, self.address, self._secret)
        self._monitor: zmq.Socket[Any] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.say_hello()

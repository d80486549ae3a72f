"""The authenticated control channel: ZeroMQ sockets with CURVE keys that follow from the cluster
secret.

Every listener of a cluster has the same CURVE key pair, derived from the cluster secret; its public
half is secret too, so that only a process that knows the cluster secret can complete a handshake,
in either direction. ``mac`` lets a message prove the same once more, bound to its content.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET_MIN_BYTES = 16
SECRET_ENV = "SPLITSERVE_SECRET"
"""Environment variable that holds the cluster secret, in hexadecimal."""
SECRET_FILE_ENV = "SPLITSERVE_SECRET_FILE"
"""Environment variable that names the file it is in; this is how engines are told."""

MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
QUEUE_LIMIT_MESSAGES = 10_000
HEARTBEAT_INTERVAL_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000


def parse_secret(text: str) -> bytes:
    """The cluster secret from its hexadecimal form. Raises ``ValueError`` with what to change."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError as error:
        raise ValueError("the cluster secret must be hexadecimal digits") from error
    if len(secret) < SECRET_MIN_BYTES:
        raise ValueError(
            f"the cluster secret has {len(secret)} bytes; at least {SECRET_MIN_BYTES} are needed"
        )
    return secret


def secret_in(environ: Mapping[str, str]) -> bytes | None:
    """The cluster secret from the variable that holds it or names its file; None without either.

    Raises ``ValueError`` that names the variable.
    """
    name, text = SECRET_ENV, environ.get(SECRET_ENV, "")
    if not text and (file := environ.get(SECRET_FILE_ENV, "")):
        name = SECRET_FILE_ENV
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: {file} cannot be read: {error}") from error
    if not text:
        return None
    try:
        return parse_secret(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def mac(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """A 16-byte MAC over ``parts`` for one purpose; lengths are bound in, so parts cannot be
    re-cut.
    """
    digest = hashlib.blake2b(key=hashlib.blake2b(secret).digest(), digest_size=16)
    digest.update(purpose.encode() + b"\0")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def is_mac(given: bytes, secret: bytes, purpose: str, *parts: bytes) -> bool:
    """Whether ``given`` is that MAC, in constant time."""
    return hmac.compare_digest(given, mac(secret, purpose, *parts))


def _listener_keys(secret: bytes) -> tuple[bytes, bytes]:
    private = hashlib.blake2b(
        b"control listener", key=hashlib.blake2b(secret).digest(), digest_size=32
    ).digest()
    private_z85 = z85.encode(private)
    return zmq.curve_public(private_z85), private_z85


def listen(context: zmq.Context[Any], address: str, secret: bytes) -> zmq.Socket[Any]:
    """A ROUTER socket bound to ``address`` that only holders of the secret can talk to.

    Raises ``OSError`` when the address is taken or is none.
    """
    router: zmq.Socket[Any] = context.socket(zmq.ROUTER)
    _bound(router)
    router.curve_publickey, router.curve_secretkey = _listener_keys(secret)
    router.curve_server = True
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close(0)
        raise OSError(f"cannot listen on {address} for KV control messages: {error}") from error
    return router


def dial(context: zmq.Context[Any], address: str, secret: bytes) -> zmq.Socket[Any]:
    """A DEALER socket that connects, and reconnects, to a listener of the same cluster.

    Never blocks. Raises ``OSError`` for what is no address.
    """
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    _bound(dealer)
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.curve_serverkey = _listener_keys(secret)[0]
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        dealer.close(0)
        raise OSError(f"{address!r} is no address for KV control messages: {error}") from error
    return dealer


def _bound(sock: zmq.Socket[Any]) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT_BYTES)
    sock.setsockopt(zmq.SNDHWM, QUEUE_LIMIT_MESSAGES)
    sock.setsockopt(zmq.RCVHWM, QUEUE_LIMIT_MESSAGES)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    sock.setsockopt(zmq.IPV6, 1)


def tcp_address(host: str, port: int) -> str:
    """``tcp://host:port`` with IPv6 addresses in brackets, as ZeroMQ writes them."""
    is_ipv6 = ":" in host and not host.startswith("[")
    if is_ipv6:
        socket.inet_pton(socket.AF_INET6, host.split("%")[0])
    return f"tcp://[{host}]:{port}" if is_ipv6 else f"tcp://{host}:{port}"

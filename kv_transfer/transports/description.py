"""The envelope around a description: which transport wrote it, and whether it is whole.

A description comes from an authenticated peer, but possibly from one that runs another transport or
another version, and some of it goes into native code that does not expect damage: so it carries a
name, a version and a digest.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from splitserve.kv_transfer.transports.base import Region, TransportError

_VERSION = 1
_LIMIT_BYTES = 16 * 1024 * 1024

Body = TypeVar("Body", bound=msgspec.Struct)


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    transport: str
    version: int
    digest: bytes
    body: bytes


def seal(transport: str, body: msgspec.Struct) -> bytes:
    """``body`` as the bytes that the same transport's ``connect`` opens."""
    encoded = msgspec.msgpack.encode(body)
    return msgspec.msgpack.encode(_Envelope(transport, _VERSION, _digest(encoded), encoded))


def unseal(transport: str, description: bytes, body_type: type[Body]) -> Body:
    """What the peer sealed. Raises ``TransportError`` with the reason when it is not for us."""
    if len(description) > _LIMIT_BYTES:
        raise TransportError(f"the peer's description has {len(description)} bytes: damaged")
    try:
        envelope = msgspec.msgpack.decode(description, type=_Envelope)
        if envelope.transport != transport:
            raise TransportError(
                f"transport: {transport!r} here, {envelope.transport[:40]!r} at the peer; "
                "start both nodes with the same one"
            )
        if envelope.version != _VERSION:
            raise TransportError(
                f"version of the {transport} transport: {_VERSION} here, {envelope.version} at "
                "the peer; run the same release on both nodes"
            )
        if envelope.digest != _digest(envelope.body):
            raise TransportError("the peer's description was damaged on its way")
        return msgspec.msgpack.decode(envelope.body, type=body_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"the peer's description cannot be read: {error}") from error


def regions_to_wire(regions: tuple[Region, ...]) -> tuple[tuple[int, int], ...]:
    """Regions as plain pairs ``(address, length)``."""
    return tuple((region.address, region.length) for region in regions)


def regions_from_wire(pairs: tuple[tuple[int, int], ...]) -> tuple[Region, ...]:
    """Inverse of ``regions_to_wire``. Raises ``TransportError`` for what cannot be memory."""
    for address, length in pairs:
        if address <= 0 or length <= 0 or address + length > 1 << 63:
            raise TransportError("the peer's description names memory that cannot exist")
    return tuple(Region(address, length) for address, length in pairs)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()

"""Chunks at rest that only their tenant's key opens: AES-256-GCM, one key per tenant.

Keys come from the cluster's cache secret and the tenant's tag by HKDF, so hosts with the same
secret read each other's chunks and no key is stored. A chunk gets a random nonce; the plain
header is associated data, so none of it can be changed or moved to another chunk. The checksums,
which would confirm a guess of the content, are encrypted with the body.

What it does not hide: which chunks there are, of which model and tenant, and their sizes.
"""

from __future__ import annotations

import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from splitserve.kv_transfer.cache.chunk_format import (
    BadChunkError,
    Header,
    Seal,
    encode_content,
)

SECRET_BYTES_LEAST = 16
_KEY_BYTES, _NAME_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 8, 12, 16


class Sealer:
    """Seals and opens chunks; holds the keys of the tenants it has met."""

    def __init__(self, secret: bytes) -> None:
        """Raise ``ValueError`` for a secret that can be guessed."""
        if len(secret) < SECRET_BYTES_LEAST:
            raise ValueError(f"the secret has to have at least {SECRET_BYTES_LEAST} bytes")
        self._secret = secret
        self._keys: dict[str, tuple[bytes, bytes]] = {}

    def seal(self, header: Header, body: memoryview, sealed: memoryview) -> Header:
        """``sealed`` (as long as ``body``) is the encrypted body; returns the header for it."""
        name, key = self._of(header.tenant)
        plain = msgspec.structs.replace(
            header, seal=Seal(name, os.urandom(_NONCE_BYTES), bytes(_TAG_BYTES))
        )
        assert plain.seal is not None
        encryptor = Cipher(algorithms.AES(key), modes.GCM(plain.seal.nonce)).encryptor()
        encryptor.authenticate_additional_data(_associated(plain))
        checksums = encryptor.update(header.checksums)
        encryptor.update_into(body, sealed)
        encryptor.finalize()
        seal = Seal(name, plain.seal.nonce, encryptor.tag)
        return msgspec.structs.replace(plain, checksums=checksums, seal=seal)

    def unseal(self, header: Header, body: memoryview) -> Header:
        """``body`` is decrypted in its place and proven to be what was sealed; returns the header
        for it.

        Raises ``BadChunkError``: then the body is worthless. A chunk that was not sealed is one
        that anybody could have written.
        """
        if header.seal is None:
            raise BadChunkError("not sealed, and this cache takes only sealed chunks")
        name, key = self._of(header.tenant)
        if header.seal.secret != name:
            raise BadChunkError("sealed with another secret")
        if len(body) != header.body_bytes:
            raise BadChunkError(f"torn: {len(body)} of {header.body_bytes} bytes")
        try:
            mode = modes.GCM(header.seal.nonce, header.seal.tag)
            decryptor = Cipher(algorithms.AES(key), mode).decryptor()
            decryptor.authenticate_additional_data(_associated(header))
            checksums = decryptor.update(header.checksums)
            decryptor.update_into(body, body)
            decryptor.finalize()
        except (InvalidTag, ValueError) as error:  # ValueError: a nonce or tag of wrong length
            raise BadChunkError("it does not fit its seal") from error
        return msgspec.structs.replace(header, checksums=checksums, seal=None)

    def _of(self, tenant: str) -> tuple[bytes, bytes]:
        """(name, key)."""
        if tenant not in self._keys:
            info = b"splitserve cache chunk\0" + tenant.encode()
            length = _NAME_BYTES + _KEY_BYTES
            both = HKDF(SHA256(), length, salt=None, info=info).derive(self._secret)
            self._keys[tenant] = both[:_NAME_BYTES], both[_NAME_BYTES:]
        return self._keys[tenant]


def _associated(header: Header) -> bytes:
    """The header but for what sealing makes."""
    assert header.seal is not None
    seal = Seal(header.seal.secret, header.seal.nonce, b"")
    blank = bytes(len(header.checksums))
    return encode_content(msgspec.structs.replace(header, checksums=blank, seal=seal))

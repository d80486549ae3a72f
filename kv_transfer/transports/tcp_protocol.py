"""What two ``tcp`` transports say to each other on one connection, from the writer to the receiver
of pages.

========  ========================================================================================
receiver  CHALLENGE: a random nonce
writer    HELLO: its nonce, a MAC over both, lengths of its name and of its lane, bytes of a page,
          number of pages; then name, lane and the address of every page of the receiver (int64)
receiver  WELCOME: a MAC over both nonces, and a reason for refusal or nothing
writer    frames: FRAME (tag, write id, pages, bytes of a page), page indices (int64), the pages
receiver  for each frame, in order, ACK: write id, landed or refused
========  ========================================================================================

A lane is what the transport ``ucx``, which uses the same conversation, tells to carry the pages
themselves outside this connection; it is empty for ``tcp``.

The key of both MACs is the receiver's token, which travels only over the encrypted control channel:
a stranger can neither write pages nor receive any. The connection itself is neither encrypted nor
authenticated byte by byte: use it inside one host or a trusted network.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import ClassVar

CHALLENGE = struct.Struct("<8s32s")
HELLO = struct.Struct("<8s32s32sHHQQ")
WELCOME = struct.Struct("<8s32sH")
FRAME = struct.Struct("<QQQQ")
ACK = struct.Struct("<QQ")

MAGIC = b"splitkv1"
TOKEN_BYTES = 32
NONCE_BYTES = 32
NAME_LIMIT_BYTES = 256
LANE_LIMIT_BYTES = 4096
REASON_LIMIT_BYTES = 1024

LANDED = 0
REFUSED = 1


@dataclass(frozen=True)
class Handshake:
    """Both nonces of a connection and the token that its two ends must share."""

    token: bytes
    receiver_nonce: bytes
    writer_nonce: bytes

    _PERSON: ClassVar[bytes] = b"splitserve-tcp"

    def writer_mac(self) -> bytes:
        """Proves that the writer knows the token."""
        return self._mac(b"writer")

    def receiver_mac(self) -> bytes:
        """Proves that the receiver knows the token."""
        return self._mac(b"receiver")

    def _mac(self, side: bytes) -> bytes:
        said = side + self.receiver_nonce + self.writer_nonce
        return hashlib.blake2b(said, key=self.token, digest_size=32, person=self._PERSON).digest()

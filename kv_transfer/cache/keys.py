"""Names of chunks: a chain of keyed BLAKE3 hashes over everything that a chunk's KV depends on.

A chunk is ``chunk_tokens`` tokens of a prompt in all layers, and its KV follows from the model, the
adapter, and every token and picture up to its end. So one hash, keyed with the *root*
(fingerprint, salt, adapter), runs over the prompt, and its state at the end of each chunk is that
chunk's key: two keys are equal only when all of that is. Hashes are cryptographic and nothing of
the process goes in: a client cannot make two prompts share a key, and every process, host and
Python version computes the same ones.

The first bytes of a key are its tenant's tag in the clear, so that a store can count and clear a
tenant's chunks; the tenant's secret salt is in the hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import msgspec
from blake3 import blake3

from splitserve.kv_transfer.cache.codecs.names import RAW

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KEY_BYTES = 32
TAG_BYTES = 8
NO_TENANT = bytes(TAG_BYTES)
HASH_BYTES = KEY_BYTES - TAG_BYTES
FORMAT_VERSION = 2
"""Of keys and chunks; another one finds nothing that this one has stored."""
LAYOUT_VALUES = frozenset({"block_size", "kv_layout", "attention_isa", "device", "tokenizer"})
"""Values of an engine's fingerprint that say how KV lies in memory, or how text becomes tokens: a
chunk does not depend on them.
"""

_encoder = msgspec.msgpack.Encoder()
_encode, _encode_into = _encoder.encode, _encoder.encode_into


class Media(msgspec.Struct, frozen=True):
    """A picture or sound in a prompt: its content's hash, and the tokens that stand for it."""

    identifier: str
    offset: int
    length: int


def model_digest(fingerprint: Mapping[str, str], chunk_tokens: int, codec: str = RAW) -> bytes:
    """32 bytes that stand for the model, the size of chunks and what codecs lose of them.

    ``codec`` is ``codecs.names.worst_of`` the cache's tiers: a cache that keeps KV to the bit never
    finds what was lossy, nor what was computed behind it.
    """
    values = sorted((k, v) for k, v in fingerprint.items() if k not in LAYOUT_VALUES)
    what = ("splitserve chunk", FORMAT_VERSION, chunk_tokens, codec, values)
    return blake3(_encode(what)).digest()


def root_key(model: bytes, tenant: bytes, salt: str, adapter: str) -> bytes:
    """What the first chunk's key is keyed with. ``tenant`` is the tag that all keys begin with."""
    assert len(tenant) == TAG_BYTES
    return tenant + blake3(_encode((salt, adapter)), key=model).digest(HASH_BYTES)


def tag_of(text: str) -> bytes:
    """A tenant's tag from its hex text; that of nobody for a text that is none."""
    try:
        tag = bytes.fromhex(text)
    except ValueError:
        return NO_TENANT
    return tag if len(tag) == TAG_BYTES else NO_TENANT


def tenant_of(key: bytes) -> bytes:
    """The tag of the tenant that a chunk belongs to."""
    return key[:TAG_BYTES]


def split_keys(joined: bytes) -> list[bytes]:
    """The keys of a message. Raises ``ValueError`` when they are no whole number of keys."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are no whole number of keys")
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]


class JoinedKeys(Sequence[bytes]):
    """The keys of a message, cut out when they are looked at: a look-up looks at few."""

    __slots__ = ("_first", "_joined", "_length")

    def __init__(self, joined: bytes, first: int = 0) -> None:
        """From key number ``first`` on. Raises ``ValueError`` for no whole number of keys."""
        if len(joined) % KEY_BYTES:
            raise ValueError(f"{len(joined)} bytes are no whole number of keys")
        self._joined = joined
        self._first = first
        self._length = max(0, len(joined) // KEY_BYTES - first)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[bytes]: ...

    def __getitem__(self, place: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(place, slice):
            if place.stop is None and place.step is None:
                return JoinedKeys(self._joined, self._first + (place.start or 0))
            return list(self)[place]
        if not 0 <= place < self._length:
            raise IndexError(place)
        at = (self._first + place) * KEY_BYTES
        return self._joined[at : at + KEY_BYTES]


class KeyChain:
    """The keys of one prompt's chunks, which can be continued with the answer's tokens."""

    def __init__(self, root: bytes, chunk_tokens: int, media: Iterable[Media] = ()) -> None:
        self.keys: list[bytes] = []
        self._tag = root[:TAG_BYTES]
        self._hasher = blake3(key=root)
        self._chunk_tokens = chunk_tokens
        self._media = list(media)
        self._buffer = bytearray()

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """The key of every whole chunk of ``tokens``, in order. They begin with the tokens of the
        chunks that have keys already.
        """
        size, keys, tag = self._chunk_tokens, self.keys, self._tag
        update, digest, buffer = self._hasher.update, self._hasher.digest, self._buffer
        for start in range(len(keys) * size, len(tokens) - size + 1, size):
            _encode_into(tokens[start : start + size], buffer)
            update(buffer)
            if self._media and (inside := _inside(self._media, start, start + size)):
                update(_encode(inside))
            keys.append(tag + digest(HASH_BYTES))
        return keys


def chunk_keys(root: bytes, tokens: Sequence[int], chunk_tokens: int) -> list[bytes]:
    """The key of every whole chunk of a text, in order."""
    return KeyChain(root, chunk_tokens).extend(tokens)


def _inside(media: list[Media], start: int, end: int) -> list[tuple[str, int]]:
    """(identifier, offset in the chunk) of the media that reach into ``start`` to ``end``."""
    return [
        (item.identifier, item.offset - start)
        for item in media
        if item.offset < end and item.offset + item.length > start
    ]

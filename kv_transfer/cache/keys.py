"""Names of chunks: a chain of keyed BLAKE3 hashes over everything that a chunk's KV depends on.

A chunk is ``chunk_tokens`` tokens of a prompt in all layers, and its KV follows from the model, the
adapter, and every token and picture up to its end. So each chunk's tokens are hashed, as numbers of
32 bits in pieces of 256, and the hashes of its pieces and its pictures are hashed once more, keyed
with the chunk before it, the first one with the *root* (fingerprint, salt, adapter). Of 56 bytes
that come out, 32 are the next chunk's secret and the others this chunk's key: two keys are equal
only when all of that is. Hashes are cryptographic and nothing of the process goes in: a client
cannot make two prompts share a key, and every process, host and Python version computes the same
ones. Pieces make chunks independent of one another but for the last, short hash: where many keys
are made at once, ``compiled_keys.py`` hashes sixteen at a time.

The first bytes of a key are its tenant's tag in the clear, so that a store can count and clear a
tenant's chunks; the tenant's secret salt is in the hash.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import msgspec
from blake3 import blake3

from splitserve.kv_transfer.cache.codecs.names import RAW

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from splitserve.kv_transfer.cache.compiled_keys import CompiledKeys

KEY_BYTES = 32
TAG_BYTES = 8
NO_TENANT = bytes(TAG_BYTES)
HASH_BYTES = KEY_BYTES - TAG_BYTES
PIECE_BYTES = 1024
STATE_BYTES = 32
FORMAT_VERSION = 3
"""Of keys and chunks; another one finds nothing that this one has stored."""
LAYOUT_VALUES = frozenset({"block_size", "kv_layout", "attention_isa", "device", "tokenizer"})
"""Values of an engine's fingerprint that say how KV lies in memory, or how text becomes tokens: a
chunk does not depend on them.
"""

_encode = msgspec.msgpack.Encoder().encode
_compiled: CompiledKeys | None = None


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


def compile_keys() -> None:
    """Keys of plain tokens are made several times faster from now on, where numba is. Takes some
    three seconds, which only an engine has.
    """
    global _compiled
    from splitserve.kv_transfer.cache.compiled_keys import compiled_keys

    _compiled = compiled_keys()


class KeyChain:
    """The keys of one prompt's chunks, which can be continued with the answer's tokens."""

    def __init__(self, root: bytes, chunk_tokens: int, media: Iterable[Media] = ()) -> None:
        self.keys: list[bytes] = []
        self._tag = root[:TAG_BYTES]
        self._state = root
        self._chunk_tokens = chunk_tokens
        self._media = list(media)

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """The key of every whole chunk of ``tokens``, in order. They begin with the tokens of the
        chunks that have keys already.

        Raises ``ValueError`` for a token that is no unsigned number of 32 bits.
        """
        size, known = self._chunk_tokens, len(self.keys)
        count = len(tokens) // size - known
        if count <= 0:
            return self.keys
        is_whole = not known and isinstance(tokens, list | tuple)
        new = tokens if is_whole else list(tokens[known * size :])
        if _compiled is None or self._media or not _compiled.can_hash(size):
            for index in range(count):
                self._add(known + index, new[index * size : (index + 1) * size])
            return self.keys
        hashes, self._state = _compiled.hashes(self._state, _encode(new), count, size)
        tag, length = self._tag, 2 * STATE_BYTES
        self.keys += [
            tag + hashes[at : at + HASH_BYTES] for at in range(STATE_BYTES, count * length, length)
        ]
        return self.keys

    def _add(self, index: int, tokens: Sequence[int]) -> None:
        """The key of one chunk, by the library."""
        text = _as_words(tokens)
        parts = [text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES)]
        leaves = b"".join([blake3(part).digest() for part in parts])
        start = index * self._chunk_tokens
        if self._media and (inside := _inside(self._media, start, start + self._chunk_tokens)):
            leaves += _encode(inside)
        found = blake3(leaves, key=self._state).digest(STATE_BYTES + HASH_BYTES)
        self._state = found[:STATE_BYTES]
        self.keys.append(self._tag + found[STATE_BYTES:])


def chunk_keys(root: bytes, tokens: Sequence[int], chunk_tokens: int) -> list[bytes]:
    """The key of every whole chunk of a text, in order."""
    return KeyChain(root, chunk_tokens).extend(tokens)


def _as_words(tokens: Sequence[int]) -> bytes:
    """Four bytes each, little-endian."""
    try:
        words = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token is no number from 0 to 4294967295: {error}") from error
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _inside(media: list[Media], start: int, end: int) -> list[tuple[str, int]]:
    """(identifier, offset in the chunk) of the media that reach into ``start`` to ``end``."""
    return [
        (item.identifier, item.offset - start)
        for item in media
        if item.offset < end and item.offset + item.length > start
    ]

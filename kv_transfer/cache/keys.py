"""Names of chunks: a chain of keyed BLAKE3 hashes over everything that a chunk's KV depends on.

A chunk is ``chunk_tokens`` tokens of a prompt in all layers, and its KV follows from the model, the
adapter, and every token and picture up to its end. So the key of the first chunk is a hash keyed
with the *root* (fingerprint, salt, adapter), the key of every other one a hash keyed with the key
before it, and two keys are equal only when all of that is. Hashes are cryptographic and nothing of
the process goes in: a client cannot make two prompts share a key, and every process, host and
Python version computes the same ones.

The first bytes of a key are its tenant's tag in the clear, so that a store can count and clear a
tenant's chunks; the tenant's secret salt is in the hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

KEY_BYTES = 32
TAG_BYTES = 8
NO_TENANT = bytes(TAG_BYTES)
HASH_BYTES = KEY_BYTES - TAG_BYTES
FORMAT_VERSION = 1
"""Of keys and chunks; another one finds nothing that this one has stored."""
LAYOUT_VALUES = frozenset({"block_size", "kv_layout", "attention_isa", "device", "tokenizer"})
"""Values of an engine's fingerprint that say how KV lies in memory, or how text becomes tokens: a
chunk does not depend on them.
"""

_encode = msgspec.msgpack.Encoder().encode


class Media(msgspec.Struct, frozen=True):
    """A picture or sound in a prompt: its content's hash, and the tokens that stand for it."""

    identifier: str
    offset: int
    length: int


def model_digest(fingerprint: Mapping[str, str], chunk_tokens: int) -> bytes:
    """32 bytes that stand for the model and the size of chunks."""
    values = sorted((k, v) for k, v in fingerprint.items() if k not in LAYOUT_VALUES)
    return blake3(_encode(("splitserve chunk", FORMAT_VERSION, chunk_tokens, values))).digest()


def root_key(model: bytes, tenant: bytes, salt: str, adapter: str) -> bytes:
    """What the first chunk's key is keyed with. ``tenant`` is the tag that all keys begin with."""
    assert len(tenant) == TAG_BYTES
    return tenant + blake3(_encode((salt, adapter)), key=model).digest(HASH_BYTES)


def tenant_of(key: bytes) -> bytes:
    """The tag of the tenant that a chunk belongs to."""
    return key[:TAG_BYTES]


def split_keys(joined: bytes) -> list[bytes]:
    """The keys of a message. Raises ``ValueError`` when they are no whole number of keys."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are no whole number of keys")
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]


def chunk_keys(
    root: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    *,
    media: Iterable[Media] = (),
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """The key of every whole chunk of ``tokens``, in order.

    ``known`` are keys of the first chunks, computed before for the same beginning.
    """
    keys = list(known)
    parent = keys[-1] if keys else root
    tag = root[:TAG_BYTES]
    pictures = list(media)
    for start in range(len(keys) * chunk_tokens, len(tokens) - chunk_tokens + 1, chunk_tokens):
        content = _encode(tokens[start : start + chunk_tokens])
        if inside := _inside(pictures, start, start + chunk_tokens):
            content += _encode(inside)
        parent = tag + blake3(content, key=parent).digest(HASH_BYTES)
        keys.append(parent)
    return keys


def _inside(media: list[Media], start: int, end: int) -> list[tuple[str, int]]:
    """(identifier, offset in the chunk) of the media that reach into ``start`` to ``end``."""
    return [
        (item.identifier, item.offset - start)
        for item in media
        if item.offset < end and item.offset + item.length > start
    ]

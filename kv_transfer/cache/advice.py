"""What a cache of a given size would save, from a record of requests. Pure.

Requests are replayed in their order against the index that the cache server uses
(``index.TierIndex``), one chunk a byte: look up, then store what is missing. That is the order of
arrivals, so a request that arrives while an equal one is still computed counts as a hit here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.index import TierIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_KEY_BYTES = 16
_COPY_BYTES = 4
"""First ones of a key: which copy of a trace's users it belongs to."""
_NUMBERS = (1 << 8 * (_KEY_BYTES - _COPY_BYTES)) - 1
_TENANT = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's prompt."""

    keys: tuple[bytes, ...]
    """Chained, of its chunks."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Saving:
    """What one size of cache does for a trace."""

    capacity_chunks: int
    hit_chunks: int
    """Found from each prompt's beginning on, as far as there was no gap."""
    chunks: int
    """Of all prompts."""
    saved_tokens: int
    """Prompt tokens that need not be computed."""
    tokens: int
    """Of all prompts."""

    @property
    def hit_share(self) -> float:
        """Of all chunks, 0 to 1."""
        return self.hit_chunks / self.chunks if self.chunks else 0.0

    @property
    def saved_share(self) -> float:
        """Of all prompt tokens, 0 to 1: the part of prefill that is not needed."""
        return self.saved_tokens / self.tokens if self.tokens else 0.0


def key_of(number: int) -> bytes:
    """A key for a trace's number of a block (its lowest 96 bits)."""
    return (number & _NUMBERS).to_bytes(_KEY_BYTES, "big")


def replay(
    prompts: Iterable[Prompt], capacity_chunks: int, policy: str, chunk_tokens: int
) -> Saving:
    """What a cache of ``capacity_chunks`` saves when these requests arrive one after the other."""
    index: TierIndex[None] = TierIndex(capacity_chunks, policy)
    chunks = tokens = saved = 0
    for prompt in prompts:
        keys = prompt.keys
        found = index.prefix(keys, 0.0)
        chunks += len(keys)
        tokens += prompt.tokens
        saved += min(found * chunk_tokens, prompt.tokens)
        store_missing(index, keys, found)
    return Saving(capacity_chunks, index.hits, chunks, saved, tokens)


def store_missing(index: TierIndex[None], keys: Sequence[bytes], found: int) -> None:
    """What is missing of a prompt, of which ``found`` chunks are there, is in the cache, as far as
    that has room. Nothing in it may be held.
    """
    parent = keys[found - 1] if found else b""
    missing = keys[found : index.capacity_bytes]  # those before them stay
    room = index.make_room(len(missing), _TENANT, parent)
    assert room is not None, "something is held"
    entries = []
    for key in missing:
        entries.append(index.reserve(key, parent, 1, _TENANT, None))
        parent = key
    for entry in entries:
        index.publish(entry, 0.0)


def ceiling(prompts: Sequence[Prompt], chunk_tokens: int) -> Saving:
    """What a cache without bound saves."""
    seen: set[bytes] = set()
    chunks = tokens = hits = saved = 0
    for prompt in prompts:
        found = 0
        for key in prompt.keys:
            if key not in seen:
                break
            found += 1
        seen.update(prompt.keys[found:])
        hits += found
        chunks += len(prompt.keys)
        tokens += prompt.tokens
        saved += min(found * chunk_tokens, prompt.tokens)
    return Saving(len(seen), hits, chunks, saved, tokens)


def with_more_users(prompts: Iterable[Prompt], factor: int) -> list[Prompt]:
    """``factor`` times as many users, who share nothing with each other: each request is followed
    by those of the others, with prompts of their own.

    Between two requests of a user come ``factor`` times as many of others, in the same time.
    """
    return [
        Prompt(tuple([own + key[_COPY_BYTES:] for key in prompt.keys]), prompt.tokens)
        for prompt in prompts
        for own in (copy.to_bytes(_COPY_BYTES, "big") for copy in range(factor))
    ]


def log_spaced(least: int, most: int, count: int) -> list[int]:
    """At most ``count`` different whole numbers from ``least`` to ``most``, equal factors apart."""
    if least >= most or count < 2:
        return [most]
    step = (most / least) ** (1 / (count - 1))
    return sorted({round(least * step**number) for number in range(count)} | {most})

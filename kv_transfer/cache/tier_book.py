"""What the server knows of one lower tier: what is in it (where this host owns it), what is being
written to it, how it does. Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.book_effects import Effect, RemoveChunks, WriteChunk
from splitserve.kv_transfer.cache.codec_choice import CodecChoice
from splitserve.kv_transfer.cache.codecs.names import RAW
from splitserve.kv_transfer.cache.index import TierIndex
from splitserve.kv_transfer.cache.keys import tenant_of
from splitserve.kv_transfer.cache.messages import TierSpeed
from splitserve.kv_transfer.cache.tier_health import TierHealth
from splitserve.kv_transfer.cache.tiers.base import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from splitserve.kv_transfer.cache.chunk import Chunk
    from splitserve.kv_transfer.cache.chunk_coding import Trial
    from splitserve.kv_transfer.cache.codecs.names import CodecName
    from splitserve.kv_transfer.cache.settings import TierSettings

UNBOUNDED_BYTES = 1 << 62
FULL_S = 5.0
"""How long a disk that was full is taken to be smaller than configured."""
WRITTEN_LIMIT_KEYS = 65_536
"""Keys that this host has written to a shared tier and remembers, so as not to write them again."""


class TierBook:
    """One lower tier. ``index`` is None where others write to the store too."""

    def __init__(
        self,
        number: int,
        settings: TierSettings,
        *,
        is_exclusive: bool,
        write_limit_bytes: int,
        quotas: Callable[[str], int | None],
        name: str = "",
    ) -> None:
        self.number = number
        self.settings = settings
        self.name = name or settings.type
        """As in the configuration (``settings.tier_names``)."""
        self.health = TierHealth(is_remote=not is_exclusive)
        self.counters: Counter[str] = Counter()
        self.codecs = CodecChoice(settings.codec, settings.auto_codecs)
        self._capacity_bytes = settings.capacity_bytes or UNBOUNDED_BYTES
        self.index: TierIndex[None] | None = (
            TierIndex(self._capacity_bytes, settings.eviction, settings.ttl_s, quotas)
            if is_exclusive
            else None
        )
        self._full_until = 0.0
        self.writing: dict[bytes, int] = {}
        """Key to stored size of what was handed to the tier and has not been answered."""
        self._write_limit_bytes = write_limit_bytes
        self._quotas = quotas
        self._written: dict[bytes, int] = {}
        """Key to size of what this server has put into a shared tier, as far as it knows."""
        self._void: set[bytes] = set()
        """Those of ``writing`` that are removed as soon as they are written."""
        self.written_bytes_by_tenant: Counter[str] = Counter()
        """Of a shared tier: what this server has put there."""

    @property
    def is_usable(self) -> bool:
        """Whether the tier is asked at all."""
        return not self.health.is_open

    def filled(self, stored: Iterable[tuple[bytes, bytes, int]], now: float) -> list[Effect]:
        """The store holds these (key, parent, size) from an earlier life, oldest first. What is
        beyond the capacity goes.
        """
        assert self.index is not None
        gone: list[bytes] = []
        for key, parent, size in stored:
            room = self.index.make_room(size, tenant_of(key).hex())
            if room is None:
                gone.append(key)
                continue
            gone += [entry.key for entry in room]
            self.index.add(key, parent, size, tenant_of(key).hex(), None, now)
        return [RemoveChunks(self.number, gone)] if gone else []

    def has(self, key: bytes) -> bool:
        """Whether the chunk is known to be there, or will be soon."""
        if key in self.writing:
            return True
        return key in self._written if self.index is None else self.index.get(key) is not None

    def admits(self, uses: int) -> bool:
        """Whether a chunk that was used so often is written here."""
        admission = self.settings.admission
        return admission == "always" or (admission == "second_use" and uses > 0)

    @property
    def waiting_bytes(self) -> int:
        """Chunks that were handed to the tier and are not written yet."""
        return sum(self.writing.values())

    @property
    def used_bytes_by_tenant(self) -> Mapping[str, int]:
        """What tenants have there; in a shared tier what they have by this server."""
        index = self.index
        return self.written_bytes_by_tenant if index is None else index.used_bytes_by_tenant

    def can_queue(self, chunk_bytes: int) -> bool:
        """Whether one more chunk may wait to be written; each keeps its slot meanwhile."""
        held_bytes = len(self.writing) * chunk_bytes
        return not held_bytes or held_bytes + chunk_bytes <= self._write_limit_bytes

    def write(self, key: bytes, parent: bytes, chunk: Chunk) -> WriteChunk | None:
        """The order to write a chunk; None when the tier does not take it now, or not a chunk that
        has lost so much.
        """
        size_bytes = HEADER_BYTES + chunk.geometry.chunk_bytes
        if not self.is_usable or self.has(key):
            return None
        if not self.codecs.takes(chunk.codec):
            self.counters["writes_too_lossy"] += 1
            return None
        if not self.can_queue(chunk.geometry.chunk_bytes):
            self.counters["writes_shed"] += 1
            return None
        if self.index is None and not self._is_within_quota(tenant_of(key), size_bytes):
            self.counters["writes_over_quota"] += 1
            return None
        self.writing[key] = size_bytes
        if chunk.codec != RAW:
            return WriteChunk(self.number, key, parent, chunk)
        return WriteChunk(self.number, key, parent, chunk, self.codec, self.codecs.to_try())

    @property
    def codec(self) -> CodecName:
        """What a new chunk that comes now is coded by."""
        return self.codecs.choose(self._link_bytes_per_s)

    @property
    def _link_bytes_per_s(self) -> float | None:
        return self.health.bytes_per_s if self.health.has_delivered else None

    @property
    def speed(self) -> TierSpeed:
        """What loading from here is believed to take."""
        rate = self.codecs.load_bytes_per_s(
            self.health.bytes_per_s, is_measured=self.health.has_delivered
        )
        return TierSpeed(self.health.latency_s, rate)

    def written(
        self,
        key: bytes,
        parent: bytes,
        outcome: str,
        now: float,
        size_bytes: int = 0,
        trials: Sequence[Trial] = (),
    ) -> list[Effect]:
        """A write has ended: ``written``, ``full`` or ``failed``; of a chunk that was coded its
        size as it is stored. Codecs may have been measured on it.
        """
        for trial in trials:
            self.codecs.tried(trial)
        size = self.writing.pop(key)
        if size_bytes and size_bytes < size:
            self.counters["coded_chunks"] += 1
            self.counters["bytes_saved_by_codec"] += size - size_bytes
            size = size_bytes
        self.counters[f"writes_{outcome}"] += 1
        if outcome != "written":
            self._void.discard(key)
        if outcome == "full" and self.index is not None:
            return self._make_way(now)
        if outcome != "written":
            return []
        self.counters["written_bytes"] += size
        self.health.wrote()
        if key in self._void:
            self._void.discard(key)
            return []
        if self.index is None:
            self.written_bytes_by_tenant[tenant_of(key).hex()] += size
            self._written[key] = size
            if len(self._written) > WRITTEN_LIMIT_KEYS:
                del self._written[next(iter(self._written))]
            return []
        room = self.index.make_room(size, tenant_of(key).hex(), parent)
        if room is None:
            return [RemoveChunks(self.number, [key])]
        self.index.add(key, parent, size, tenant_of(key).hex(), None, now)
        return [RemoveChunks(self.number, [e.key for e in room])] if room else []

    def remove(self, keys: Sequence[bytes]) -> RemoveChunks:
        """The order that removes these, after what is being written of them has been."""
        self.forget(keys)
        self._void.update(key for key in keys if key in self.writing)
        return RemoveChunks(self.number, list(keys))

    def forget(self, keys: Sequence[bytes]) -> None:
        """The store does not have these, or not any more."""
        for key in keys:
            size = self._written.pop(key, None)
            if size is not None:
                self.written_bytes_by_tenant[tenant_of(key).hex()] -= size
            if self.index is not None:
                self.index.remove(key)

    def clear(self, tenant: str | None, *, keep_pinned: bool) -> tuple[list[bytes], int]:
        """Nothing of this tenant's (None: of anybody's) is known to be there any more, and what is
        being written is forgotten when it has been. Returns the keys that are to be removed from
        the store after that, and the bytes of those that were there.

        Of a shared tier these are only the ones that this server remembers.
        """
        void = [k for k in self.writing if tenant is None or tenant_of(k).hex() == tenant]
        self._void.update(void)
        if self.index is not None:
            gone = self.index.clear(tenant, keep_pinned=keep_pinned)
            return [*(e.key for e in gone), *void], sum(e.size_bytes for e in gone)
        known = [k for k in self._written if tenant is None or tenant_of(k).hex() == tenant]
        for key in known:
            del self._written[key]
        if tenant is None:
            self.written_bytes_by_tenant.clear()
        else:
            self.written_bytes_by_tenant.pop(tenant, None)
        return [*known, *void], 0

    def shrink(self, tenant: str) -> list[Effect]:
        """The tenant has no more than its quota, or only what cannot go now. Shared tiers keep what
        they have.
        """
        if self.index is None:
            return []
        keys = [entry.key for entry in self.index.shrink(tenant)]
        return [RemoveChunks(self.number, keys)] if keys else []

    def expire(self, now: float) -> list[Effect]:
        """What has outlived the tier's time goes."""
        if self.index is None:
            return []
        if self._full_until and now >= self._full_until:
            self._full_until = 0.0
            self.index.capacity_bytes = self._capacity_bytes
        keys = [entry.key for entry in self.index.expire(now)]
        self.counters["expired"] += len(keys)
        return [RemoveChunks(self.number, keys)] if keys else []

    def _is_within_quota(self, tenant: bytes, size_bytes: int) -> bool:
        """Whether the tenant may have so much more in a shared tier."""
        limit = self._quotas(tenant.hex())
        if limit is None:
            return True
        waiting = sum(size for key, size in self.writing.items() if tenant_of(key) == tenant)
        return self.written_bytes_by_tenant[tenant.hex()] + waiting + size_bytes <= limit

    def _make_way(self, now: float) -> list[Effect]:
        """The disk is fuller than its index says: the capacity is what fits, for a while."""
        assert self.index is not None
        self.counters["disk_full"] += 1
        self._full_until = now + FULL_S
        self.index.capacity_bytes = max(self.index.used_bytes - 1, 0)
        room = self.index.make_room(0, "") or []
        return [RemoveChunks(self.number, [e.key for e in room])] if room else []

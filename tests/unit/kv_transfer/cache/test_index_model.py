"""A ``TierIndex`` against a model that walks every chain and sums every byte.

Hypothesis chooses look-ups, stores, leases, pins, removals, the clock and the quotas. The model
holds what is in the tier and when it was used; it checks each victim, and fails when a byte is
counted twice or not at all.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splitserve.kv_transfer.cache.eviction import POLICIES
from splitserve.kv_transfer.cache.index import TierIndex

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.entry import Entry

CAPACITY = 12
TTL_S = 10.0
TENANTS = ("a", "b")
PATHS = ("0", "00", "000", "0000", "00000", "001", "0010", "01", "1", "10")
CHAINS = st.tuples(st.sampled_from(["a", "a", "b"]), st.sampled_from(PATHS))
"""A tenant, and the path to a chunk in the tree of its prompts."""
POSITION = st.integers(0, 1_000)
"""Chooses one of a list, whatever its length."""
SIZES = st.sampled_from([1, 1, 1, 2, 5])


def keys_of(tenant: str, path: str) -> list[bytes]:
    """The chain that ends in a chunk."""
    return [f"{tenant}{path[:end]}".encode() for end in range(1, len(path) + 1)]


def parent_of(key: bytes) -> bytes:
    return key[:-1] if len(key) > 2 else b""


@dataclass
class Known:
    """A chunk as the model sees it."""

    entry: Entry[int]
    last_use: int
    hits: int = 0
    added: float = 0.0
    leases: int = 0
    is_pinned: bool = False


@dataclass
class Model:
    """What is in the tier."""

    present: dict[bytes, Known] = field(default_factory=dict)
    reserved: dict[bytes, Known] = field(default_factory=dict)
    lingering: list[Known] = field(default_factory=list)
    """Removed while leased."""
    ghosts: set[bytes] = field(default_factory=set)
    tick: int = 0
    has_lost_parents: bool = False
    """A chunk went before those that follow it: uses of these are not known of before it."""

    def everything(self) -> list[Known]:
        return [*self.present.values(), *self.reserved.values(), *self.lingering]

    def used_bytes(self, tenant: str | None = None) -> int:
        return sum(
            known.entry.size_bytes
            for known in self.everything()
            if tenant is None or known.entry.tenant == tenant
        )

    def is_leaf(self, key: bytes) -> bool:
        return all(parent_of(other) != key for other in [*self.present, *self.reserved])

    def evictable(self, keep: bytes) -> list[bytes]:
        """Chunks that could go, one after the other, leaves first."""
        held = {key for key, known in self.present.items() if known.leases or known.is_pinned}
        stay = held | set(self.reserved) | ({keep} & set(self.present))
        for key in list(stay):
            while (key := parent_of(key)) and (key in self.present or key in self.reserved):
                stay.add(key)
        return [key for key in self.present if key not in stay]


class Index(RuleBasedStateMachine):
    """Everything that may happen to the index of one tier."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)), has_ttl=st.sampled_from([True, False, False])
    )
    def begin(self, policy: str, has_ttl: bool) -> None:
        self.quotas: dict[str, int] = {}
        self.ttl_s = TTL_S if has_ttl else None
        self.policy = POLICIES[policy]
        self.index: TierIndex[int] = TierIndex(CAPACITY, policy, self.ttl_s, self.quotas.get)
        self.model = Model()
        self.now = 0.0
        self.found = self.asked = 0

    # -- looking up ------------------------------------------------------------------------------

    @rule(chain=CHAINS, skipped=st.sampled_from([0, 0, 0, 1, 2]))
    def look_up(self, chain: tuple[str, str], skipped: int) -> None:
        """As many chunks as a walk finds; they count as used."""
        keys = keys_of(*chain)[skipped:]
        self.model.tick += 1
        expected = []
        for key in keys:
            known = self.model.present.get(key)
            if known is None or self.is_overdue(known):
                break
            expected.append(known)
        for known in expected:
            known.last_use = self.model.tick
            known.hits += 1
        if skipped and expected:
            self.model.has_lost_parents = True
        assert self.index.prefix(keys, self.now) == len(expected)
        self.found += len(expected)
        self.asked += len(keys)

    def is_overdue(self, known: Known) -> bool:
        return (
            self.ttl_s is not None and known.added + self.ttl_s <= self.now and not known.is_pinned
        )

    # -- room ------------------------------------------------------------------------------------

    @rule(chain=CHAINS, size=SIZES)
    def store_chain(self, chain: tuple[str, str], size: int) -> None:
        """What is missing of a prompt is stored, as far as there is room."""
        for key in keys_of(*chain):
            if key not in self.model.present and not self.index.is_reserved(key):
                if not self.has_room(chain[0], size, parent_of(key)):
                    return
                self.reserve(key, chain[0], size)
                self.publish(key)

    @rule(chain=CHAINS, size=SIZES, publish=st.booleans())
    def store_one(self, chain: tuple[str, str], size: int, publish: bool) -> None:
        """One chunk comes, with or without those before it."""
        key = keys_of(*chain)[-1]
        if key in self.model.present or key in self.model.reserved:
            return
        if self.has_room(chain[0], size, parent_of(key)):
            self.reserve(key, chain[0], size)
            if publish:
                self.publish(key)

    def has_room(self, tenant: str, size: int, parent: bytes) -> bool:
        """Room is made exactly when it can be; every victim was next, and none was needless."""
        model = self.model
        quota = self.quotas.get(tenant, sys.maxsize)
        evictable = model.evictable(parent)
        sizes = {key: model.present[key].entry.size_bytes for key in evictable}
        own = sum(sizes[key] for key in evictable if model.present[key].entry.tenant == tenant)
        can = (
            model.used_bytes() - sum(sizes.values()) + size <= CAPACITY
            and model.used_bytes(tenant) - own + size <= quota
        )
        victims = self.index.make_room(size, tenant, parent)
        assert (victims is not None) == can
        for victim in victims or ():
            is_over = model.used_bytes(tenant) + size > quota
            assert is_over or model.used_bytes() + size > CAPACITY, "a needless victim"
            self.check_victim(victim, parent, tenant if is_over else None)
            del model.present[victim.key]
            model.ghosts.add(victim.key)
            assert victim.is_free
        return can

    def check_victim(self, victim: Entry[int], keep: bytes, tenant: str | None) -> None:
        model = self.model
        known = model.present[victim.key]
        assert known.entry is victim
        assert victim.key != keep
        assert not known.leases
        assert not known.is_pinned
        assert model.is_leaf(victim.key)
        assert tenant is None or victim.tenant == tenant
        if not model.has_lost_parents:
            rivals = [
                self.rank(other)
                for key, other in model.present.items()
                if key != keep
                and not (other.leases or other.is_pinned)
                and model.is_leaf(key)
                and (tenant is None or other.entry.tenant == tenant)
            ]
            assert self.rank(known) == max(rivals)

    def rank(self, known: Known) -> float:
        weights = self.policy.weights
        level = min(known.hits, len(weights) - 1)
        return (self.model.tick - known.last_use) / weights[level]

    def reserve(self, key: bytes, tenant: str, size: int) -> None:
        self.model.tick += 1
        entry = self.index.reserve(key, parent_of(key), size, tenant, 0)
        is_ghost = bool(self.policy.ghost_level) and key in self.model.ghosts
        self.model.ghosts.discard(key)
        known = Known(entry, self.model.tick, self.policy.ghost_level if is_ghost else 0)
        self.model.reserved[key] = known
        for before in keys_of(tenant, key[1:].decode())[:-1]:
            if (ancestor := self.model.present.get(before)) is not None:
                ancestor.last_use = self.model.tick
        if parent_of(key) and parent_of(key) not in self.model.present:
            self.model.has_lost_parents = True

    def publish(self, key: bytes) -> None:
        known = self.model.reserved.pop(key)
        known.added = self.now
        self.index.publish(known.entry, self.now)
        self.model.present[key] = known

    @precondition(lambda self: self.model.reserved)
    @rule(position=POSITION, arrives=st.booleans())
    def settle(self, position: int, arrives: bool) -> None:
        """A reserved chunk is published or withdrawn, in any order."""
        key = list(self.model.reserved)[position % len(self.model.reserved)]
        if arrives:
            self.publish(key)
        else:
            self.lose_parent(key)
            self.index.withdraw(self.model.reserved.pop(key).entry)

    def lose_parent(self, key: bytes) -> None:
        if not self.model.is_leaf(key):
            self.model.has_lost_parents = True

    # -- holding ---------------------------------------------------------------------------------

    @precondition(lambda self: self.model.present)
    @rule(position=POSITION)
    def lease(self, position: int) -> None:
        known = list(self.model.present.values())[position % len(self.model.present)]
        known.leases += 1
        uses = known.entry.uses
        self.index.lease(known.entry)
        assert known.entry.uses == uses + 1

    @precondition(lambda self: any(known.leases for known in self.model.everything()))
    @rule(position=POSITION)
    def release(self, position: int) -> None:
        """The last reader of a removed chunk, and nobody else, is told that its place is free."""
        leased = [known for known in self.model.everything() if known.leases]
        known = leased[position % len(leased)]
        known.leases -= 1
        is_last = known in self.model.lingering and not known.leases
        if is_last:
            self.model.lingering.remove(known)
        assert self.index.release(known.entry) is is_last

    @rule(chain=CHAINS, pinned=st.booleans())
    def pin(self, chain: tuple[str, str], pinned: bool) -> None:
        keys = keys_of(*chain)
        here = [self.model.present[key] for key in keys if key in self.model.present]
        changed = self.index.pin(keys) if pinned else self.index.unpin(keys)
        expected = here if pinned else [known for known in here if known.is_pinned]
        assert changed == [known.entry for known in expected]
        for known in expected:
            known.is_pinned = pinned

    # -- removing --------------------------------------------------------------------------------

    @rule(chain=CHAINS)
    def remove(self, chain: tuple[str, str]) -> None:
        key = keys_of(*chain)[-1]
        known = self.model.present.get(key)
        removed = self.index.remove(key)
        assert removed is (known.entry if known else None)
        if known:
            self.goes(key)

    def goes(self, key: bytes) -> None:
        self.lose_parent(key)
        known = self.model.present.pop(key)
        assert known.entry.is_free is not bool(known.leases)
        known.is_pinned = False
        if known.leases:
            self.model.lingering.append(known)

    @rule(tenant=st.sampled_from([None, *TENANTS]), keep_pinned=st.booleans())
    def clear(self, tenant: str | None, keep_pinned: bool) -> None:
        expected = [
            key
            for key, known in self.model.present.items()
            if (tenant is None or known.entry.tenant == tenant)
            and not (keep_pinned and known.is_pinned)
        ]
        gone = self.index.clear(tenant, keep_pinned=keep_pinned)
        assert sorted(entry.key for entry in gone) == sorted(expected)
        for key in expected:
            self.goes(key)

    @precondition(lambda self: self.ttl_s is not None)
    @rule(seconds=st.sampled_from([1.0, 4.0, TTL_S]), expires=st.sampled_from([True, False, False]))
    def time_passes(self, seconds: float, expires: bool) -> None:
        self.now += seconds
        if expires:
            expected = [key for key, known in self.model.present.items() if self.is_overdue(known)]
            gone = self.index.expire(self.now)
            assert sorted(entry.key for entry in gone) == sorted(expected)
            for key in expected:
                self.goes(key)

    @rule(tenant=st.sampled_from(TENANTS), quota=st.sampled_from([None, 2, 5, 8]))
    def set_quota(self, tenant: str, quota: int | None) -> None:
        if quota is None:
            self.quotas.pop(tenant, None)
        else:
            self.quotas[tenant] = quota

    # -- always ----------------------------------------------------------------------------------

    @invariant()
    def counts_are_right(self) -> None:
        """Bytes are those of all chunks that take room; nothing is lost, double or too much."""
        if not hasattr(self, "model"):
            return
        model = self.model
        assert {entry.key: entry for entry in self.index} == {
            key: known.entry for key, known in model.present.items()
        }
        assert len(self.index) == len(model.present)
        assert self.index.used_bytes == model.used_bytes() <= CAPACITY
        by_tenant = {tenant: model.used_bytes(tenant) for tenant in TENANTS}
        assert self.index.used_bytes_by_tenant == {t: used for t, used in by_tenant.items() if used}
        assert (self.index.hits, self.index.misses) == (self.found, self.asked - self.found)

    def teardown(self) -> None:
        """When every hold has ended the whole tier can be emptied."""
        if not hasattr(self, "model"):
            return
        for known in self.model.reserved.values():
            self.index.withdraw(known.entry)
        for known in self.model.everything():
            for _ in range(known.leases):
                self.index.release(known.entry)
        self.index.unpin(list(self.model.present))
        self.quotas.clear()
        gone = self.index.make_room(CAPACITY, "a")
        assert gone is not None
        assert {entry.key for entry in gone} == set(self.model.present)
        assert self.index.used_bytes == 0


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

"""What tenants may hold, shown and changed while the cache server runs."""

from __future__ import annotations

from support.cache_host import (
    ALICE,
    BOB,
    CHUNK_BYTES,
    DISK,
    ENGINE,
    REDIS,
    STORED_BYTES,
    CacheHost,
    chain,
)

from splitserve.kv_transfer.cache.control_messages import (
    TenantStat,
)
from splitserve.kv_transfer.cache.messages import (
    OpenChunks,
)

A, B = chain(4, ALICE), chain(4, BOB, salt=1)


def test_quotas_are_shown() -> None:
    """Everybody's, one tenant's, one tier's; with what each one holds."""
    quotas = {ALICE.hex(): {"cpu": 9 * CHUNK_BYTES}, "*": {"cpu": 1000, "disk": 2000}}
    host = CacheHost(10, DISK, quotas=quotas)
    host.save(A)
    host.run()
    alice = TenantStat(
        tenant=ALICE.hex(),
        used_bytes={"cpu": 4 * CHUNK_BYTES, "disk": 4 * STORED_BYTES},
        quota_bytes={"cpu": 9 * CHUNK_BYTES},
    )
    everyone = TenantStat(tenant="*", quota_bytes={"cpu": 1000, "disk": 2000})
    assert host.quota().tenants == (everyone, alice)
    assert host.quota(ALICE.hex()).tenants == (alice,)
    [nobody] = host.quota("").tenants
    assert nobody == TenantStat(tenant="", quota_bytes=everyone.quota_bytes)
    assert host.quota("*", "disk").tenants == (TenantStat(tenant="*", quota_bytes={"disk": 2000}),)


def test_a_lowered_quota_holds_at_once() -> None:
    """The tenant's own last chunks go, in each tier by its own bound; nobody else's do."""
    host = CacheHost(10, DISK)
    host.save(A)
    host.save(B)
    host.run()
    [now] = host.quota(ALICE.hex(), "cpu", 2 * CHUNK_BYTES).tenants
    assert now.quota_bytes == {"cpu": 2 * CHUNK_BYTES}
    assert now.used_bytes == {"cpu": 2 * CHUNK_BYTES}
    assert host.in_arena([*A, *B]) == [True] * 2 + [False] * 2 + [True] * 4
    host.quota(ALICE.hex(), "disk", 3 * STORED_BYTES + 1)
    assert set(host.stores["disk"]) == {*A[:3], *B}
    assert host.arena.free_slots == 4
    host.quota(ALICE.hex(), "cpu", None)
    host.save(A)
    assert all(host.in_arena(A))
    assert host.quota(ALICE.hex()).tenants[0].quota_bytes == {"disk": 3 * STORED_BYTES + 1}


def test_what_cannot_go_stays_above_a_lowered_quota() -> None:
    """Pinned chunks and those that are read; then nothing new of the tenant is taken."""
    host = CacheHost(10, DISK)
    host.save(A)
    host.run()
    host.chunks("pin", A[:1], tier="cpu")
    opened = OpenChunks(load_id=1, keys=b"".join(A[:2]), limit_s=5.0)
    host.take(host.book.open(ENGINE, opened, host.now))
    [now] = host.quota(ALICE.hex(), "cpu", 0).tenants
    assert now.used_bytes["cpu"] == 2 * CHUNK_BYTES
    assert host.in_arena(A) == [True, True, False, False]
    assert host.save(A[2:], parent=A[1]) == [False, False]
    assert host.save(B) == [True] * 4


def test_a_quota_for_everyone() -> None:
    """Binds each tenant by itself, but for those that have one of their own; a tenant that gets its
    first own one keeps what bound it elsewhere.
    """
    host = CacheHost(20, DISK, quotas={BOB.hex(): {"cpu": 10 * CHUNK_BYTES}})
    for keys in (A, B, chain(3)):
        host.save(keys)
    host.run()
    host.quota("*", "cpu", CHUNK_BYTES)
    assert [host.in_arena(keys).count(True) for keys in (A, B, chain(3))] == [1, 4, 1]
    host.quota("*", "disk", 2 * STORED_BYTES)
    host.quota(ALICE.hex(), "cpu", 3 * CHUNK_BYTES)
    [alice] = host.quota(ALICE.hex()).tenants
    assert alice.quota_bytes == {"cpu": 3 * CHUNK_BYTES, "disk": 2 * STORED_BYTES}
    [nobody] = host.quota("").tenants
    assert nobody.used_bytes == {"cpu": CHUNK_BYTES, "disk": 2 * STORED_BYTES}


def test_a_quota_in_a_shared_store() -> None:
    """What is there stays; no more of the tenant is written."""
    host = CacheHost(20, REDIS)
    host.save(A[:2])
    host.run()
    host.quota(ALICE.hex(), "redis", STORED_BYTES)
    host.save(A[2:], parent=A[1])
    host.save(B)
    host.run()
    assert set(host.stores["redis"]) == {*A[:2], *B}

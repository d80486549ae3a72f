"""What each tenant may hold in each tier. Pure.

A tenant that has a quota of its own, in whichever tier, is bound by its own ones alone; all others
are bound by those of ``EVERY_TENANT``, each for itself. Tenants go by the hex of their tags here,
also that of requests without one, which is empty outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitserve.kv_transfer.cache.control_messages import EVERY_TENANT
from splitserve.kv_transfer.cache.keys import NO_TENANT, TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NOBODY = NO_TENANT.hex()


class QuotaBook:
    """The quotas of one cache server; they begin with those of its settings."""

    def __init__(self, quota_bytes: Mapping[str, Mapping[str, int]]) -> None:
        self._limits = {tag or NOBODY: dict(limits) for tag, limits in quota_bytes.items()}

    def limits(self, tenant: str) -> Mapping[str, int]:
        """Bytes by tier name; tiers without a bound are left out."""
        own = self._limits.get(tenant)
        return self._limits.get(EVERY_TENANT, {}) if own is None else own

    @property
    def named(self) -> Iterable[str]:
        """Who has quotas of its own, ``EVERY_TENANT`` among them."""
        return self._limits.keys()

    def set(self, tenant: str, tier: str, limit_bytes: int | None) -> None:
        """That is the tenant's bound in that tier from now on (None: there is none). One that had
        no quotas of its own keeps, as its own, what bound it in other tiers.
        """
        limits = self._limits.setdefault(tenant, dict(self.limits(tenant)))
        limits.pop(tier, None)
        if limit_bytes is not None:
            limits[tier] = limit_bytes


def inner_tag(tag: str) -> str:
    """The tag as keys have it. Raises ``ValueError`` for what is none."""
    if tag and len(bytes.fromhex(tag)) != TAG_BYTES:
        raise ValueError(f"a tenant's tag is {TAG_BYTES} bytes in hex, or empty")
    return tag.lower() or NOBODY


def outer_tag(tenant: str) -> str:
    """The tag as operators have it."""
    return "" if tenant == NOBODY else tenant

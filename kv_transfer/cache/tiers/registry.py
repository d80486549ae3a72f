"""Tiers by type, imported late: a server loads only the libraries of those it has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from splitserve.kv_transfer.cache.tiers.base import Tier, TierConfigError

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.settings import TierSettings

_CLASSES = {
    "disk": ("splitserve.kv_transfer.cache.tiers.disk", "DiskTier"),
    "redis": ("splitserve.kv_transfer.cache.tiers.redis", "RedisTier"),
    "mooncake": ("splitserve.kv_transfer.cache.tiers.mooncake", "MooncakeTier"),
    "s3": ("splitserve.kv_transfer.cache.tiers.s3", "ObjectTier"),
}

TIERS = tuple(_CLASSES)
"""Types that ``create`` knows."""


def create(settings: TierSettings) -> Tier:
    """A tier of that type; ``check`` has yet to find out whether it works.

    Raises ``TierConfigError`` for an unknown type, settings that it cannot have, a missing library,
    and a folder that another process owns.
    """
    if settings.type not in _CLASSES:
        raise TierConfigError(
            f"no lower tier of the cache has type {settings.type!r}; known are {', '.join(TIERS)}"
        )
    module, class_name = _CLASSES[settings.type]
    return cast("Tier", getattr(import_module(module), class_name)(settings))

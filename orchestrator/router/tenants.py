"""API keys, the tenants they belong to, and the salt that keeps tenants apart in the engines'
prefix caches.

Keys are compared as keyed hashes: whoever measures the time of a look-up learns nothing about a
key. A salt follows from the cluster secret and the tenant, so it is the same after a restart and
cannot be guessed; a salt that the client sends divides its tenant's cache further.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from splitserve.kv_transfer.channel import mac
from splitserve.orchestrator.config.credentials import tenant_tag
from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

_BEARER = b"bearer "
KNOWN_LIMIT_HEADERS = 1_000


class Tenants:
    """Who may use the router."""

    def __init__(self, tenant_by_key: Mapping[str, str], secret: bytes) -> None:
        self._secret = secret
        self._hash_key = mac(secret, "api key look-up")
        self._known: dict[bytes, str] = {}
        """Headers that were right, as they came: dictionaries of bytes are keyed with randomness of
        the process, so a look-up tells no more about a key than the hash does.
        """
        self._tenant_by_hash = {self._hash(k.encode()): t for k, t in tenant_by_key.items()}
        self._salts = {tenant: self.salt_for(tenant, "") for tenant in tenant_by_key.values()}
        self._tags = {tenant: tenant_tag(secret, tenant) for tenant in tenant_by_key.values()}

    @property
    def are_required(self) -> bool:
        """Whether a key is needed."""
        return bool(self._tenant_by_hash)

    def authenticate(self, authorization: bytes | None) -> str:
        """The tenant of an ``Authorization`` header, empty when no keys are configured. Raises
        ``ApiError`` 401.
        """
        if not self._tenant_by_hash:
            return ""
        known = self._known.get(authorization) if authorization is not None else None
        if known is not None:
            return known
        if authorization is None or authorization[:7].lower() != _BEARER:
            raise ApiError(401, "send an API key as 'Authorization: Bearer KEY'")
        tenant = self._tenant_by_hash.get(self._hash(authorization[7:].strip()))
        if tenant is None:
            raise ApiError(401, "the API key is not known here")
        if len(self._known) < KNOWN_LIMIT_HEADERS:
            self._known[authorization] = tenant
        return tenant

    @property
    def names(self) -> list[str]:
        """All tenants that have a key."""
        return sorted(self._tags)

    def tag(self, tenant: str) -> str:
        """What engines and the cache know the tenant by; empty when no keys are configured."""
        return self._tags.get(tenant, "")

    def name_of(self, tag: str) -> str | None:
        """The tenant with that tag; None for one that has no key any more."""
        if not tag:
            return ""
        return next((name for name, other in self._tags.items() if other == tag), None)

    def salt(self, tenant: str, client_salt: object) -> str | None:
        """The ``cache_salt`` of both legs; None leaves what the client sent."""
        if not self._tenant_by_hash:
            return None
        if type(client_salt) is str and client_salt:
            return self.salt_for(tenant, client_salt)
        return self._salts[tenant]

    def salt_for(self, tenant: str, client_salt: str) -> str:
        """The salt of one tenant and one salt of its own."""
        return mac(self._secret, "cache salt", tenant.encode(), client_salt.encode()).hex()

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._hash_key, digest_size=16).digest()

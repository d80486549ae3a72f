"""What operators send to ``/internal/cache/VERB``, and what they get: JSON with names of tenants
and counts of tokens, where the cache server has tags and chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from splitserve.kv_transfer.cache.control_messages import EVERY_TENANT
from splitserve.orchestrator.router.errors import ApiError

if TYPE_CHECKING:
    from splitserve.kv_transfer.cache.control_messages import Done, LookedUp, Stat, TenantStat
    from splitserve.orchestrator.router.tenants import Tenants

TIMEOUT_LIMIT_S = 600.0
TAG_SIGN = "#"
"""Begins the tag of a tenant that has no key any more, in the place of its name."""

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Timeout = Annotated[float, msgspec.Meta(gt=0, le=TIMEOUT_LIMIT_S)]


class ChunksBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which chunks: those of one prompt, as text, as a chat, or as token ids."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[Token] | None = None
    add_special_tokens: bool | None = None
    """Of a text or a chat; by default as the engine does for a request."""
    add_generation_prompt: bool = True
    """Of a chat: with the beginning of the answer, as a request has it."""
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tenant: str | None = None
    cache_salt: str = ""
    """What the tenant's requests send as ``cache_salt``."""
    adapter: str = ""
    tier: str = ""
    timeout_s: Timeout = 30.0

    def for_engine(self) -> dict[str, Any]:
        """The fields of vLLM's ``/tokenize``. Raises ``ApiError`` 400 for a prompt with pictures:
        their chunks depend on more than tokens.
        """
        if self.messages is None:
            fields: dict[str, Any] = {"prompt": self.prompt}
        else:
            if any(_has_media(message) for message in self.messages):
                raise ApiError(400, "chunks with pictures or sound cannot be named by messages")
            fields = {
                "messages": self.messages,
                "add_generation_prompt": self.add_generation_prompt,
                "tools": self.tools,
                "chat_template": self.chat_template,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        fields["add_special_tokens"] = self.add_special_tokens
        return {name: value for name, value in fields.items() if value is not None}


class ClearBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to remove; nothing given means everything."""

    tenant: str | None = None
    tier: str = ""
    keep_pinned: bool = True
    timeout_s: Timeout = 30.0


class QuotaBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Without ``limit_bytes`` quotas are shown; with it one is set, with null it is taken away."""

    tenant: str | None = None
    tier: str = ""
    limit_bytes: Annotated[int, msgspec.Meta(gt=0)] | msgspec.UnsetType | None = msgspec.UNSET


def tag_of(tenants: Tenants, name: str) -> str:
    """The tag of the tenant that an operator names. Raises ``ApiError`` 404."""
    if name.startswith(TAG_SIGN):
        return name.removeprefix(TAG_SIGN)
    if name in (tenants.names or [""]):
        return tenants.tag(name)
    known = ", ".join(tenants.names) or "none, since there are no security.api_keys"
    raise ApiError(404, f"there is no tenant {name!r}; known: {known}", param="tenant")


def shown_stat(stat: Stat, tenants: Tenants) -> dict[str, Any]:
    """``stat`` as JSON."""
    shown: dict[str, Any] = msgspec.to_builtins(stat, builtin_types=(bytes,))
    del shown["type"]
    shown["tenants"] = shown_tenants(stat.tenants, tenants)
    shown["engines"] = [
        {"engine": engine.engine, "rank": engine.rank, "model": engine.model.hex()[:16]}
        for engine in stat.engines
    ]
    return shown


def shown_tenants(found: tuple[TenantStat, ...], tenants: Tenants) -> list[dict[str, Any]]:
    """Tenants by name; by tag those that have no key any more."""
    shown = []
    for stat in found:
        name = stat.tenant if stat.tenant == EVERY_TENANT else tenants.name_of(stat.tenant)
        told = f"{TAG_SIGN}{stat.tenant}" if name is None else name
        shown.append(msgspec.to_builtins(stat) | {"tenant": told})
    return shown


def shown_lookup(
    found: LookedUp, tokens: int, chunk_tokens: int, max_model_len: int | None
) -> dict[str, Any]:
    """The answer of ``lookup`` for a prompt of so many tokens; ``max_model_len`` is the engines'
    least, None while no node takes part.
    """
    return {
        "tokens": tokens,
        "max_model_len": max_model_len,
        "chunk_tokens": chunk_tokens,
        "chunks": tokens // chunk_tokens,
        "cached_tokens": found.chunks * chunk_tokens,
        "tiers": {name: chunks * chunk_tokens for name, chunks in found.by_tier.items()},
        "pinned_tokens": found.pinned * chunk_tokens,
        "silent_tiers": list(found.silent),
    }


def shown_done(done: Done, chunk_tokens: int) -> dict[str, Any]:
    """The answer of what changes chunks."""
    return {
        "chunks": done.chunks,
        "tokens": done.chunks * chunk_tokens,
        "bytes": done.bytes,
        "missing": done.missing,
    }


def _has_media(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") not in ("text", "refusal") for part in content
    )

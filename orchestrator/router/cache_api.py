"""The routes by which operators manage the cache: ``GET /internal/cache`` and
``POST /internal/cache/VERB``.

Each request is a task that answers later and ends with its client. A prompt becomes keys here, with
the model, the salt and the tokens that its legs would have, so that the cache server is asked for
exactly what an engine would look up.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import orjson

from splitserve.kv_transfer.cache.control_messages import (
    EVERY_TENANT,
    ChunksWish,
    ClearWish,
    Done,
    LookedUp,
    LookupWish,
    Quotas,
    QuotaWish,
    Stat,
    StatWish,
)
from splitserve.kv_transfer.cache.keys import chunk_keys, model_digest, root_key, tag_of
from splitserve.kv_transfer.cache.messages import KEYS_LIMIT
from splitserve.kv_transfer.cache.settings import tier_names
from splitserve.orchestrator.router import cache_bodies as bodies
from splitserve.orchestrator.router.cache_control import (
    CacheControl,
    CacheRefusalError,
    CacheSilentError,
)
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.tokenizing import tokenize

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from splitserve.orchestrator.agent.messages import NodeDescription
    from splitserve.orchestrator.config import CacheConfig
    from splitserve.orchestrator.router.core_driver import CoreDriver
    from splitserve.orchestrator.router.http_request import HttpRequest
    from splitserve.orchestrator.router.http_server import HttpConnection
    from splitserve.orchestrator.router.tenants import Tenants

    Verb = Callable[[bytes], Awaitable[dict[str, Any]]]

_log = logging.getLogger(__name__)

CACHE_PATH = "/internal/cache"
OPERATIONS_LIMIT = 16
"""Requests of operators at a time; the next one gets status 429."""
ANSWER_MARGIN_S = 2.0
"""How much later than its own limit the server's answer may come."""
STAT_LIMIT_S = 5.0
JSON = [(b"content-type", b"application/json")]

B = TypeVar("B")


class CacheApi:
    """Answers operators' questions about the cache, and passes their wishes on."""

    def __init__(self, config: CacheConfig, driver: CoreDriver, tenants: Tenants) -> None:
        assert config.socket_path is not None, "the configuration's paths are filled in by `up`"
        self._control = CacheControl(config.socket_path)
        self._chunk_tokens = config.chunk_tokens
        self._key_codec = config.key_codec
        self._tiers = tier_names(tier.type for tier in config.tiers)
        self._driver = driver
        self._tenants = tenants
        self._operations: set[_Operation] = set()
        self._verbs: dict[str, Verb] = {
            "lookup": self._lookup,
            **{verb: self._changing(verb) for verb in ("pin", "unpin", "prefetch", "move")},
            "clear": self._clear,
            "quota": self._quota,
        }

    def handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        """The request of an operator is answered, now or later. Raises ``ApiError``."""
        verb = request.path.removeprefix(CACHE_PATH).removeprefix("/")
        if verb and verb not in self._verbs:
            known = ", ".join(self._verbs)
            raise ApiError(404, f"there is no {request.path}; below {CACHE_PATH} are: {known}")
        method = "POST" if verb else "GET"
        if request.method != method:
            raise ApiError(405, f"{request.path} takes {method} only", allow=method)
        if len(self._operations) >= OPERATIONS_LIMIT:
            raise ApiError(429, "too many operations on the cache at a time", retry_after_s=1)
        work = partial(self._verbs[verb], request.body or b"{}") if verb else self.stat
        operation = _Operation(connection, self._operations.discard)
        self._operations.add(operation)
        operation.begin(work)

    def close(self) -> None:
        """No operation goes on; who waits for one is told."""
        for operation in list(self._operations):
            operation.give_up(ApiError(503, "the router stops"))

    async def stat(self) -> dict[str, Any]:
        """What the cache holds and how it fares. Raises ``CacheSilentError`` or
        ``CacheRefusalError``.
        """
        stat = await self._control.ask("stat", StatWish(), Stat, STAT_LIMIT_S)
        return bodies.shown_stat(stat, self._tenants)

    async def _lookup(self, raw: bytes) -> dict[str, Any]:
        body = _read(raw, bodies.ChunksBody)
        tokens, keys = await self._keys(body)
        wish = LookupWish(keys=keys, limit_s=body.timeout_s)
        limit_s = body.timeout_s + ANSWER_MARGIN_S
        found = await self._control.ask("lookup", wish, LookedUp, limit_s)
        members = self._driver.core.membership.nodes.values()
        longest = min((node.description.max_model_len for node in members), default=None)
        return bodies.shown_lookup(found, tokens, self._chunk_tokens, longest)

    def _changing(self, verb: str) -> Verb:
        async def change(raw: bytes) -> dict[str, Any]:
            body = _read(raw, bodies.ChunksBody)
            self._check_tier(body.tier)
            if verb == "move" and not body.tier:
                raise ApiError(400, "say where to: 'tier' is missing", param="tier")
            _, keys = await self._keys(body)
            wish = ChunksWish(keys=keys, tier=body.tier, limit_s=body.timeout_s)
            limit_s = body.timeout_s + ANSWER_MARGIN_S
            done = await self._control.ask(verb, wish, Done, limit_s)
            return bodies.shown_done(done, self._chunk_tokens)

        return change

    async def _clear(self, raw: bytes) -> dict[str, Any]:
        body = _read(raw, bodies.ClearBody)
        self._check_tier(body.tier)
        wish = ClearWish(
            tenant=None if body.tenant is None else bodies.tag_of(self._tenants, body.tenant),
            tier=body.tier,
            keep_pinned=body.keep_pinned,
            limit_s=body.timeout_s,
        )
        done = await self._control.ask("clear", wish, Done, body.timeout_s + ANSWER_MARGIN_S)
        return bodies.shown_done(done, self._chunk_tokens)

    async def _quota(self, raw: bytes) -> dict[str, Any]:
        body = _read(raw, bodies.QuotaBody)
        self._check_tier(body.tier)
        changes = body.limit_bytes is not msgspec.UNSET
        if changes and (body.tenant is None or not body.tier):
            raise ApiError(400, "a quota is one tenant's in one tier: give 'tenant' and 'tier'")
        tenant = body.tenant
        if tenant is not None and tenant != EVERY_TENANT:
            tenant = bodies.tag_of(self._tenants, tenant)
        limit = None if body.limit_bytes is msgspec.UNSET else body.limit_bytes
        wish = QuotaWish(tenant=tenant, tier=body.tier, limit_bytes=limit, changes=changes)
        quotas = await self._control.ask("quota", wish, Quotas, STAT_LIMIT_S)
        return {"tenants": bodies.shown_tenants(quotas.tenants, self._tenants)}

    async def _keys(self, body: bodies.ChunksBody) -> tuple[int, bytes]:
        """(tokens of the prompt, the keys of its whole chunks). Raises ``ApiError``."""
        if sum(given is not None for given in (body.prompt, body.messages, body.tokens)) != 1:
            raise ApiError(400, "give exactly one of 'prompt', 'messages' and 'tokens'")
        salt = self._salt(body)
        node = self._node()
        tokens = body.tokens
        if tokens is None:
            client = self._driver.client
            tokens = await tokenize(client, node, body.for_engine(), body.timeout_s)
        limit = (KEYS_LIMIT + 1) * self._chunk_tokens - 1
        if len(tokens) > limit:
            message = f"the prompt has {len(tokens)} tokens; at most {limit} at a time, since"
            raise ApiError(413, f"{message} a look-up takes {KEYS_LIMIT} chunks")
        if len(tokens) < self._chunk_tokens:
            message = f"the prompt has {len(tokens)} tokens, less than the {self._chunk_tokens} of"
            raise ApiError(400, f"{message} one chunk: nothing of it is ever cached")
        model = model_digest(node.fingerprint, self._chunk_tokens, self._key_codec)
        root = root_key(model, tag_of(self._tenants.tag(body.tenant or "")), salt, body.adapter)
        # A million tokens take some 50 ms, which streams need not wait for
        keys = await asyncio.to_thread(chunk_keys, root, tokens, self._chunk_tokens)
        return len(tokens), b"".join(keys)

    def _salt(self, body: bodies.ChunksBody) -> str:
        """The ``cache_salt`` that legs of the tenant's requests get. Raises ``ApiError``."""
        if self._tenants.are_required and body.tenant is None:
            known = ", ".join(self._tenants.names)
            raise ApiError(400, f"say whose chunks: 'tenant' is missing; known: {known}")
        name = body.tenant or ""
        if name.startswith(bodies.TAG_SIGN):
            raise ApiError(400, "chunks are found by a tenant's name, not by its tag")
        bodies.tag_of(self._tenants, name)
        salt = self._tenants.salt(name, body.cache_salt)
        return body.cache_salt if salt is None else salt

    def _node(self) -> NodeDescription:
        """An engine that can be asked, prefill nodes first: they have time. Raises ``ApiError``."""
        membership = self._driver.core.membership
        for role in ("prefill", "decode"):
            for node in membership.usable(role):
                return node.description
        raise ApiError(503, "no node is ready, so nobody knows the model's keys")

    def _check_tier(self, tier: str) -> None:
        if tier and tier not in self._tiers:
            known = ", ".join(self._tiers)
            raise ApiError(404, f"there is no tier {tier!r}; known: {known}", param="tier")


class _Operation:
    """One request of an operator, from its task's start to its answer. Its connection calls it when
    the client leaves.
    """

    def __init__(self, connection: HttpConnection, on_end: Callable[[_Operation], None]) -> None:
        self._connection = connection
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """The result of ``work`` goes to the client."""
        self._connection.listener = self
        self._task = asyncio.get_running_loop().create_task(self._run(work))
        self._task.add_done_callback(lambda task: self._on_end(self))

    def client_gone(self) -> None:
        """Nobody waits for the answer."""
        if self._task is not None:
            self._task.cancel()

    def pause(self) -> None:
        """Answers are short: the connection holds them."""

    def resume(self) -> None:
        """See ``pause``."""

    def give_up(self, error: ApiError) -> None:
        """It ends here, with an error."""
        self.client_gone()
        self._refuse(error)

    async def _run(self, work: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        try:
            answer = await work()
        except CacheSilentError as error:
            self._refuse(ApiError(503, str(error)))
        except CacheRefusalError as error:
            self._refuse(ApiError(409, str(error)))
        except ApiError as error:
            self._refuse(error)
        except Exception as error:
            _log.error("an operation on the cache failed", exc_info=error)
            self._refuse(ApiError(500, f"the router has a fault: {error!r}"))
        else:
            self._connection.answer(200, JSON, orjson.dumps(answer))

    def _refuse(self, error: ApiError) -> None:
        self._connection.answer(error.status, error.headers(""), error.body())


def _read(raw: bytes, kind: type[B]) -> B:
    """The body of a wish. Raises ``ApiError`` 400."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(400, str(error)) from error

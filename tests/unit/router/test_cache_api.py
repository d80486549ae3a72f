"""The operators' routes to the cache: who may, what the cache server is asked, what is answered."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from router_stubs.cache_server import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    CacheServerStub,
    cache_server_stub,
)
from router_stubs.cluster import SECRET, StubCluster, completion, stub_cluster, until
from router_stubs.engine import Asked, plain_answer, send

from splitserve.kv_transfer.cache.control_messages import (
    ClearWish,
    Done,
    QuotaWish,
    TenantStat,
)
from splitserve.kv_transfer.cache.keys import KEY_BYTES, chunk_keys, model_digest, root_key, tag_of
from splitserve.kv_transfer.cache.messages import KEYS_LIMIT, Managed, Marks
from splitserve.orchestrator.agent.auth import agent_token, operator_token
from splitserve.orchestrator.config import tenant_tag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPERATOR = {"Authorization": f"Bearer {operator_token(SECRET)}"}
TOKENS = list(range(3 * CHUNK_TOKENS + 7))
KEYS = {"sk-1": "a", "sk-2": "b"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServerStub]:
    """A cache server that holds two chunks of everything."""
    with cache_server_stub(tmp_path / "cache.sock") as server:
        server.held = 2
        yield server


async def ask(
    cluster: StubCluster, verb: str = "", status: int = 200, **body: Any
) -> dict[str, Any]:
    """The answer to an operator's wish."""
    url = f"{cluster.url}/internal/cache" + (f"/{verb}" if verb else "")
    if verb:
        data = io.BytesIO(json.dumps(body).encode())
        response = await cluster.session.post(url, data=data, headers=OPERATOR)
    else:
        response = await cluster.session.get(url, headers=OPERATOR)
    answer: dict[str, Any] = await response.json()
    assert response.status == status, answer
    return answer


async def refused(cluster: StubCluster, verb: str, status: int, **body: Any) -> str:
    """The message of an error."""
    message: str = (await ask(cluster, verb, status, **body))["error"]["message"]
    return message


def tokenising(tokens: list[int], status: int = 200) -> Any:
    """An engine that tokenises everything into ``tokens``."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path != "/tokenize":
            await plain_answer(asked, writer)
            return
        await send(writer, status, json.dumps({"count": 1, "tokens": tokens}).encode())

    return answer


async def test_the_state_of_the_cache(server: CacheServerStub) -> None:
    """As the server says it, tenants by name; those without a key by tag."""
    server.tenants = (
        TenantStat(tenant=tenant_tag(SECRET, "a"), used_bytes={"cpu": 5}, quota_bytes={"cpu": 9}),
        TenantStat(tenant="abcd"),
    )
    async with stub_cluster("p0", keys=KEYS, cache=server.section) as cluster:
        stat = await ask(cluster)
    assert (stat["server"], stat["arena"]["slots"]) == ("life-1", 1000)
    assert [tier["state"] for tier in stat["tiers"]] == ["ok", "breaker open"]
    assert [tenant["tenant"] for tenant in stat["tenants"]] == ["a", "#abcd"]
    assert stat["tenants"][0]["used_bytes"] == {"cpu": 5}
    assert stat["engines"] == [{"engine": "prefill-0-1", "rank": -1, "model": "0" * 16}]


@pytest.mark.parametrize("keys", [{}, KEYS], ids=["open", "keys"])
async def test_the_keys_are_those_of_the_engines(
    server: CacheServerStub, keys: dict[str, str]
) -> None:
    """The model of the nodes, the salt that the legs of that tenant get, the tokens."""
    async with stub_cluster("p0", "d0", keys=keys, cache=server.section) as cluster:
        headers = {"Authorization": "Bearer sk-1"} if keys else {}
        body = completion(cache_salt="own")
        await (await cluster.post(json=body, headers=headers)).read()
        leg_salt = cluster.engines["p0"].asked[0].body["cache_salt"]
        tenant = {"tenant": "a"} if keys else {}
        found = await ask(cluster, "lookup", tokens=TOKENS, cache_salt="own", **tenant)
        node = cluster.router.core.membership.nodes["p0"].description
        tag = tag_of(tenant_tag(SECRET, "a") if keys else "")
    model = model_digest(node.fingerprint, CHUNK_TOKENS)
    expected = chunk_keys(root_key(model, tag, leg_salt, ""), TOKENS, CHUNK_TOKENS)
    ((verb, wish),) = server.asked
    assert verb == "lookup"
    assert wish.keys == b"".join(expected)
    assert found == {
        "tokens": len(TOKENS),
        "max_model_len": node.max_model_len,
        "chunk_tokens": CHUNK_TOKENS,
        "chunks": 3,
        "cached_tokens": 2 * CHUNK_TOKENS,
        "tiers": {"cpu": CHUNK_TOKENS, "disk": 2 * CHUNK_TOKENS},
        "pinned_tokens": CHUNK_TOKENS,
        "silent_tiers": [],
    }


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ({"prompt": "text"}, {"prompt": "text"}),
        (
            {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]},
            {
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"type": "function"}],
                "add_generation_prompt": True,
            },
        ),
    ],
)
async def test_text_is_tokenised_by_an_engine(
    server: CacheServerStub, prompt: dict[str, Any], asked: dict[str, Any]
) -> None:
    """A prefill node with its own key; text and its tokens name the same chunks."""
    async with stub_cluster("p0", "d0", cache=server.section) as cluster:
        cluster.engines["p0"].answer = tokenising(TOKENS)
        first = await ask(cluster, "lookup", **prompt)
        second = await ask(cluster, "lookup", tokens=TOKENS)
        (leg,) = cluster.engines["p0"].asked
    assert first == second
    assert leg.path == "/tokenize"
    assert leg.headers["authorization"] == "Bearer key-p0"
    assert leg.body == {"model": "m", **asked}
    assert server.asked[0] == server.asked[1]


@pytest.mark.parametrize("verb", ["pin", "unpin", "prefetch", "move"])
async def test_chunks_are_pinned_and_moved(server: CacheServerStub, verb: str) -> None:
    """The server hears which and where, and its answer is told in tokens."""
    async with stub_cluster("p0", cache=server.section) as cluster:
        done = await ask(cluster, verb, tokens=TOKENS, tier="disk", timeout_s=3)
    ((asked, wish),) = server.asked
    assert (asked, wish.tier, wish.limit_s) == (verb, "disk", 3.0)
    assert len(wish.keys) == 3 * KEY_BYTES
    expected = {"chunks": 2, "tokens": 2 * CHUNK_TOKENS, "bytes": 2 * CHUNK_BYTES, "missing": 1}
    assert done == expected


async def test_chunks_are_cleared(server: CacheServerStub) -> None:
    """Of one tenant, by name or by the tag of one that has gone; or everything."""
    async with stub_cluster("p0", keys=KEYS, cache=server.section) as cluster:
        await ask(cluster, "clear", tenant="a", tier="cpu")
        await ask(cluster, "clear", tenant="#abcd", keep_pinned=False)
        done = await ask(cluster, "clear")
        assert "known: a, b" in await refused(cluster, "clear", 404, tenant="c")
    assert done["chunks"] == 2
    assert [wish for _, wish in server.asked] == [
        ClearWish(tenant=tenant_tag(SECRET, "a"), tier="cpu", limit_s=30.0),
        ClearWish(tenant="abcd", keep_pinned=False, limit_s=30.0),
        ClearWish(tenant=None, limit_s=30.0),
    ]


async def test_quotas_are_set_shown_and_taken_away(server: CacheServerStub) -> None:
    """For a tenant and for every other one; null is no bound."""
    async with stub_cluster("p0", keys=KEYS, cache=server.section) as cluster:
        await ask(cluster, "quota", tenant="*", tier="cpu", limit_bytes=7)
        set_now = await ask(cluster, "quota", tenant="b", tier="disk", limit_bytes=9)
        gone = await ask(cluster, "quota", tenant="b", tier="disk", limit_bytes=None)
        shown = await ask(cluster, "quota")
        await refused(cluster, "quota", 400, tenant="b", limit_bytes=9)
        await refused(cluster, "quota", 400, tenant="b", tier="cpu", limit_bytes=0)
    assert [(t["tenant"], t["quota_bytes"]) for t in set_now["tenants"]] == [
        ("*", {"cpu": 7}),
        ("b", {"disk": 9}),
    ]
    assert gone == shown
    assert gone["tenants"][1]["quota_bytes"] == {}
    assert server.asked[-1] == ("quota", QuotaWish(tenant=None))


@pytest.mark.parametrize(
    ("verb", "status", "body", "words"),
    [
        ("lookup", 400, {}, "exactly one of 'prompt', 'messages' and 'tokens'"),
        ("lookup", 400, {"prompt": "x", "tokens": TOKENS}, "exactly one"),
        ("lookup", 400, {"tokens": [-1]}, "Expected `int` >= 0"),
        ("lookup", 400, {"tokens": [2**32]}, "Expected `int` <= 4294967295"),
        ("lookup", 400, {"token": TOKENS}, "unknown field `token`"),
        ("lookup", 400, {"tokens": [1]}, "1 tokens, less than the 128 of one chunk"),
        ("lookup", 404, {"tokens": TOKENS, "tenant": "a"}, "there are no security.api_keys"),
        ("lookup", 400, {"tokens": TOKENS, "tenant": "#ab"}, "by a tenant's name"),
        ("lookup", 400, {"messages": [{"content": [{"type": "image_url"}]}]}, "pictures"),
        ("pin", 404, {"tokens": TOKENS, "tier": "tape"}, "no tier 'tape'; known: cpu, disk"),
        ("move", 400, {"tokens": TOKENS}, "'tier' is missing"),
        ("pin", 400, {"tokens": TOKENS, "timeout_s": 1e9}, "timeout_s"),
        ("clear", 400, {"all": True}, "unknown field `all`"),
        ("drop", 404, {}, "below /internal/cache are: lookup, pin"),
    ],
)
async def test_what_cannot_be_is_refused(
    server: CacheServerStub, verb: str, status: int, body: dict[str, Any], words: str
) -> None:
    """With what to do; the cache server hears nothing."""
    async with stub_cluster("p0", cache=server.section) as cluster:
        assert words in await refused(cluster, verb, status, **body)
    assert not server.asked


async def test_a_tenant_must_be_named_where_there_are_some(server: CacheServerStub) -> None:
    """The salt depends on it."""
    async with stub_cluster("p0", keys=KEYS, cache=server.section) as cluster:
        message = await refused(cluster, "lookup", 400, tokens=TOKENS)
    assert message == "say whose chunks: 'tenant' is missing; known: a, b"


async def test_the_longest_prompt(server: CacheServerStub) -> None:
    """As many chunks as one packet holds, more than half a million tokens here; then status 413
    with the limit.
    """
    limit = (KEYS_LIMIT + 1) * CHUNK_TOKENS - 1
    async with stub_cluster("p0", cache=server.section) as cluster:
        found = await ask(cluster, "lookup", tokens=[0] * limit)
        assert found["chunks"] == KEYS_LIMIT
        assert len(server.asked[0][1].keys) == KEYS_LIMIT * KEY_BYTES
        message = await refused(cluster, "lookup", 413, tokens=[0] * (limit + 1))
    assert message.startswith(f"the prompt has {limit + 1} tokens; at most {limit} at a time")


@pytest.mark.parametrize(
    "token", [None, "Bearer sk-1", f"Bearer {agent_token(SECRET)}", "Bearer ", "é"]
)
@pytest.mark.parametrize("keys", [{}, KEYS], ids=["open", "keys"])
async def test_only_operators_may(
    server: CacheServerStub, token: str | None, keys: dict[str, str]
) -> None:
    """Not with a tenant's key or an agent's token, and before the body is read."""
    headers = {"Authorization": token} if token else {"X-Nothing": "1"}
    async with stub_cluster("p0", keys=keys, cache=server.section) as cluster:
        url = f"{cluster.url}/internal/cache"
        assert (await cluster.session.get(url, headers=headers)).status == 401
        response = await cluster.session.post(f"{url}/clear", json={}, headers=headers)
        assert response.status == 401
    assert not server.asked


async def test_a_cluster_without_a_cache() -> None:
    """503, and how to have one; wrong methods are wrong."""
    async with stub_cluster("p0") as cluster:
        assert "no cache; give its YAML a section" in await refused(cluster, "", 503)
        assert "no cache" in await refused(cluster, "lookup", 503, tokens=TOKENS)


async def test_methods(server: CacheServerStub) -> None:
    """State is read, wishes are posted."""
    async with stub_cluster("p0", cache=server.section) as cluster:
        url = f"{cluster.url}/internal/cache"
        assert (await cluster.session.post(url, json={}, headers=OPERATOR)).status == 405
        assert (await cluster.session.get(f"{url}/lookup", headers=OPERATOR)).status == 405


async def test_a_cache_server_that_is_not_there(tmp_path: Path) -> None:
    """503 at once, as long as it is away."""
    with cache_server_stub(tmp_path / "cache.sock") as server:
        section = server.section
    async with stub_cluster("p0", cache=section) as cluster:
        assert "cannot be reached" in await refused(cluster, "", 503)
        with cache_server_stub(tmp_path / "cache.sock"):
            assert (await ask(cluster))["server"] == "life-1"


@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (None, "has not answered within"),
        (b"", "closed the connection without an answer"),
        (b"nonsense", "cannot be read"),
        (msgspec.msgpack.encode(Marks()), "says Marks instead"),
        (
            msgspec.msgpack.encode(
                Managed(request_id=1, result=msgspec.msgpack.encode(Done(chunks=1, bytes=1)))
            ),
            "answers lookup with Done",
        ),
    ],
)
async def test_a_cache_server_that_does_not_answer(
    server: CacheServerStub,
    packet: bytes | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """503 with what happened, within the deadline; the router goes on."""
    monkeypatch.setattr("splitserve.orchestrator.router.cache_api.ANSWER_MARGIN_S", 0.0)
    server.raw_answer = lambda message: packet
    async with stub_cluster("p0", cache=server.section) as cluster:
        message = await refused(cluster, "lookup", 503, tokens=TOKENS, timeout_s=0.2)
        assert words in message
        server.raw_answer = None
        await ask(cluster, "lookup", tokens=TOKENS)


async def test_what_the_cache_server_refuses(server: CacheServerStub) -> None:
    """409 with its words."""
    server.refusal = "all slots are pinned; unpin some"
    async with stub_cluster("p0", cache=server.section) as cluster:
        assert await refused(cluster, "pin", 409, tokens=TOKENS) == server.refusal


@pytest.mark.parametrize(
    ("engine", "status", "words"),
    [
        (tokenising([], 400), 400, "p0 does not tokenise (400)"),
        (tokenising([], 500), 502, "p0 does not tokenise (500)"),
        (tokenising(["x"]), 502, "tokenises into what is no list"),  # type: ignore[list-item]
    ],
)
async def test_an_engine_that_does_not_tokenise(
    server: CacheServerStub, engine: Any, status: int, words: str
) -> None:
    """Its own 4xx is passed on; all else is a faulty gateway."""
    async with stub_cluster("p0", cache=server.section) as cluster:
        cluster.engines["p0"].answer = engine
        assert words in await refused(cluster, "lookup", status, prompt="text")
    assert not server.asked


async def test_an_engine_that_is_silent_or_dies(server: CacheServerStub) -> None:
    """504 after the operator's deadline, 502 when the connection breaks, 503 without any engine."""

    async def silent(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with stub_cluster("p0", cache=server.section) as cluster:
        engine = cluster.engines["p0"]
        engine.answer = silent
        message = await refused(cluster, "lookup", 504, prompt="text", timeout_s=0.1)
        assert message == "p0 has not tokenised within 0.1 s"
        await engine.asked[0].client_left.wait()
        question = asyncio.create_task(refused(cluster, "lookup", 502, prompt="text"))
        await until(lambda: len(engine.asked) == 2)
        engine.drop_connections()
        assert "p0 does not tokenise: " in await question
    async with stub_cluster(cache=server.section) as cluster:
        assert "no node is ready" in await refused(cluster, "lookup", 503, tokens=TOKENS)


async def test_operations_are_bounded_and_end_with_their_clients(
    server: CacheServerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more than the limit gets 429; a client that leaves makes room; a stop tells the rest."""
    monkeypatch.setattr("splitserve.orchestrator.router.cache_api.OPERATIONS_LIMIT", 2)
    server.raw_answer = lambda message: None
    async with stub_cluster("p0", cache=server.section) as cluster:
        api = cluster.router._cache
        assert api is not None
        first, second = (
            asyncio.create_task(ask(cluster, "lookup", 503, tokens=TOKENS)) for _ in range(2)
        )
        await until(lambda: len(server.asked) == 2)
        assert "too many operations" in await refused(cluster, "lookup", 429, tokens=TOKENS)
        first.cancel()
        await until(lambda: len(api._operations) == 1)
        api.close()
        assert (await second)["error"]["message"] == "the router stops"
        await until(lambda: not api._operations)

"""``/v1/responses`` and ``/v1/messages``: split like a chat, and responses stay with their node."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from router_stubs.cluster import SECRET, StubCluster, stub_cluster, until
from router_stubs.core_story import Driver
from router_stubs.engine import Asked, chunk, send, start_stream, stream

from splitserve.kv_transfer.transfer_params import unseal
from splitserve.orchestrator.agent.messages import AgentHello, NodeState
from splitserve.orchestrator.router.endpoints import PATHS, RESPONSES
from splitserve.orchestrator.router.errors import ApiError
from splitserve.orchestrator.router.response_ids import ResponseIds

RESPONSE = {"model": "m", "input": "hello", "max_output_tokens": 8}
MESSAGE = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "name": "f", "parameters": {}}
KEYS = {"sk-1": "a", "sk-2": "b"}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def usage(cached: int) -> bytes:
    return (
        b'"usage":{"input_tokens":300,"input_tokens_details":{"cached_tokens":%d,'
        b'"cache_write_tokens":0},"output_tokens":8}' % cached
    )


async def answer_like_an_engine(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A response with the id that was asked for; what was asked, for what it holds."""
    if asked.path.startswith("/v1/responses/"):
        await send(writer, 200, json.dumps({"asked": asked.path}).encode())
        return
    body = b'{"id":"%b",' % str(asked.body.get("request_id")).encode()
    await send(writer, 200, body + usage(299 if "request_id" in asked.body else 7) + b"}")


async def prefill_answered(cluster: StubCluster) -> None:
    """Until no prefill leg is out."""
    requests = cluster.router.core.requests
    await until(lambda: all(not request.has_prefill_leg for request in requests.values()))


async def post(cluster: StubCluster, path: str, body: Any, **headers: str) -> Any:
    """The answer's status and JSON."""
    response = await cluster.session.post(cluster.url + path, json=body, headers=headers)
    return response.status, await response.json()


def legs(cluster: StubCluster) -> tuple[list[Asked], list[Asked]]:
    """What prefill and decode nodes were asked."""
    asked: tuple[list[Asked], list[Asked]] = ([], [])
    for name, engine in cluster.engines.items():
        asked[name.startswith("d")].extend(engine.asked)
    return asked


async def test_a_response_is_split() -> None:
    """Both legs have the same input; the prefill leg samples one token, stores nothing and may not
    call tools; the response is named by the router, and its cached tokens are the prefill node's.
    """
    async with stub_cluster("p0", "d0", keys=KEYS) as cluster:

        async def later(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await prefill_answered(cluster)
            await answer_like_an_engine(asked, writer)

        cluster.engines["p0"].answer = answer_like_an_engine
        cluster.engines["d0"].answer = later
        body = RESPONSE | {
            "tools": [TOOL],
            "tool_choice": "required",
            "instructions": "be brief",
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_object"}},
            "include": ["message.output_text.logprobs"],
            "temperature": 0.5,
        }
        status, told = await post(cluster, "/v1/responses", body, Authorization="Bearer sk-1")
        assert status == 200
        assert re.fullmatch(r"resp_[0-9a-f]{64}", told["id"])
        assert told["usage"]["input_tokens_details"]["cached_tokens"] == 7
        await cluster.idle()
        (on_p,), (on_d,) = legs(cluster)
        assert on_p.path == on_d.path == "/v1/responses"
        first, second = on_p.body, on_d.body
        for name in ("input", "instructions", "tools", "reasoning", "model", "cache_salt"):
            assert first[name] == second[name]
        assert (first["max_output_tokens"], first["stream"], first["store"]) == (1, False, False)
        assert (first["tool_choice"], first["temperature"]) == ("none", 0)
        assert not first.keys() & {"text", "include", "request_id"}
        assert second["request_id"] == told["id"]
        assert {k: second[k] for k in body} == body
        params = [unseal(leg["kv_transfer_params"], SECRET) for leg in (first, second)]
        assert params[0]
        assert params[1]
        assert params[0].transfer_id == params[1].transfer_id


@pytest.mark.parametrize(
    "change",
    [
        {"background": True},
        {"truncation": "auto"},
        {"tools": [{"type": "web_search_preview"}]},
        {"tools": [{"type": "mcp", "server_label": "x"}]},
        {"tools": 7},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": []},
        {"input": None},
        {"max_output_tokens": 0},
        {"previous_input_messages": []},
    ],
)
async def test_what_of_responses_is_not_split(change: dict[str, Any]) -> None:
    """It goes to a decode node alone, whose engine is the judge of it."""
    async with stub_cluster("p0", "d0") as cluster:
        cluster.engines["d0"].answer = answer_like_an_engine
        status, told = await post(cluster, "/v1/responses", RESPONSE | change)
        assert status == 200
        await cluster.idle()
        on_p, (on_d,) = legs(cluster)
        assert not on_p
        assert on_d.body == RESPONSE | change | {"request_id": told["id"]}


async def test_an_empty_body_reaches_the_engine() -> None:
    """What is spliced into it leaves it JSON."""
    async with stub_cluster("p0", "d0", keys=KEYS) as cluster:
        cluster.engines["d0"].answer = answer_like_an_engine
        assert (await post(cluster, "/v1/responses", {}, Authorization="Bearer sk-1"))[0] == 200
        assert "request_id" in cluster.engines["d0"].asked[0].body


async def test_what_refers_to_a_response_goes_to_its_node() -> None:
    """Retrieval with its query, cancelling, and the next turn; each of many, on either node."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        for engine in cluster.engines.values():
            engine.answer = answer_like_an_engine
        nodes = set()
        for _ in range(4):
            _, told = await post(cluster, "/v1/responses", RESPONSE)
            await cluster.idle()
            name = told["id"]
            holder = next(
                node
                for node, engine in cluster.engines.items()
                if engine.asked and engine.asked[-1].body.get("request_id") == name
            )
            nodes.add(holder)
            before = len(cluster.engines[holder].asked)
            url = f"{cluster.url}/v1/responses/{name}"
            got = await cluster.session.get(f"{url}?stream=true&starting_after=2")
            assert (await got.json())["asked"].endswith(f"{name}?stream=true&starting_after=2")
            cancelled = await cluster.session.post(f"{url}/cancel")
            assert (await cancelled.json())["asked"] == f"/v1/responses/{name}/cancel"
            again = RESPONSE | {"previous_response_id": name}
            assert (await post(cluster, "/v1/responses", again))[0] == 200
            await cluster.idle()
            assert len(cluster.engines[holder].asked) == before + 3
            for engine in cluster.engines.values():
                engine.asked.clear()
        assert nodes == {"d0", "d1"}


async def test_a_response_that_is_not_there_is_404() -> None:
    """Unknown ids, those of another tenant, and those whose engine has been restarted or lost."""
    async with stub_cluster("p0", "d0", "d1", keys=KEYS) as cluster:
        for engine in cluster.engines.values():
            engine.answer = answer_like_an_engine
        mine, other = {"Authorization": "Bearer sk-1"}, {"Authorization": "Bearer sk-2"}
        _, told = await post(cluster, "/v1/responses", RESPONSE, **mine)
        await cluster.idle()
        name = told["id"]
        url = f"{cluster.url}/v1/responses"

        async def refused(response_id: str, headers: dict[str, str]) -> str:
            again = RESPONSE | {"previous_response_id": response_id}
            status, error = await post(cluster, "/v1/responses", again, **headers)
            assert (status, error["error"]["param"]) == (404, "response_id")
            for call in (
                cluster.session.get(f"{url}/{response_id}", headers=headers),
                cluster.session.post(f"{url}/{response_id}/cancel", headers=headers),
            ):
                response = await call
                assert response.status == 404
                error = await response.json()
                assert error["error"]["param"] == "response_id"
            return str(error["error"]["message"])

        assert "not found." in await refused("resp_unknown", mine)
        assert "not found." in await refused(name[:-1] + ("0" if name[-1] != "0" else "1"), mine)
        assert "not found." in await refused(name, other)
        holder = next(
            node
            for node, engine in cluster.engines.items()
            if node != "p0" and any(a.body.get("request_id") == name for a in engine.asked)
        )
        node = cluster.router.core.membership.nodes[holder]
        agent, fields = cluster.agents[holder], node.description.__struct_fields__
        told = {key: getattr(node.description, key) for key in fields}
        again = type(node.description)(**told | {"incarnation": "another-life"})
        await agent.say(AgentHello(description=again, role="decode"))
        state = NodeState(node=holder, incarnation="another-life", phase="ready", free_blocks=9)
        await agent.say(state)
        nodes = cluster.router.core.membership.nodes
        await until(lambda: nodes[holder].description.incarnation == "another-life")
        assert "was restarted" in await refused(name, mine)


async def test_a_clients_own_id() -> None:
    """It is kept, and the response cannot be asked for; one that takes another's place is 400."""
    async with stub_cluster("p0", "d0") as cluster:
        for engine in cluster.engines.values():
            engine.answer = answer_like_an_engine
        status, told = await post(cluster, "/v1/responses", RESPONSE | {"request_id": "mine"})
        assert (status, told["id"]) == (200, "mine")
        got = await cluster.session.get(f"{cluster.url}/v1/responses/mine")
        assert got.status == 404
        _, told = await post(cluster, "/v1/responses", RESPONSE)
        status, error = await post(cluster, "/v1/responses", RESPONSE | {"request_id": told["id"]})
        assert (status, error["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize("piece_bytes", [1, 50, 10**6])
async def test_a_streamed_response(piece_bytes: int) -> None:
    """Its bytes pass, but for the count of cached tokens in the last event."""

    def events(cached: int) -> bytes:
        return (
            b'event: response.created\ndata: {"response":{"usage":null}}\n\n'
            b'event: response.output_text.delta\ndata: {"delta":"\xc3\xa4"}\n\n'
            b'event: response.completed\ndata: {"response":{' + usage(cached) + b"}}\n\n"
        )

    async with stub_cluster("p0", "d0") as cluster:

        async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
            if "request_id" not in asked.body:
                await send(writer, 200, b"{" + usage(7) + b"}")
            else:
                await prefill_answered(cluster)
                await stream(writer, events(299), piece_bytes)

        for engine in cluster.engines.values():
            engine.answer = answer
        body = RESPONSE | {"stream": True}
        response = await cluster.session.post(f"{cluster.url}/v1/responses", json=body)
        assert await response.read() == events(7)
        await cluster.idle()
        cluster.router.log.flush()
        record = json.loads(cluster.log.getvalue())
        assert (record["prompt_tokens"], record["output_tokens"]) == (300, 8)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_stream_that_breaks_tells_so(path: str) -> None:
    """In the form that clients of that endpoint read."""
    async with stub_cluster("p0", "d0") as cluster:

        async def die(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await start_stream(writer)
            await chunk(writer, b"event: x\ndata: {}\n\n")
            writer.transport.abort()

        cluster.engines["d0"].answer = die
        body = (RESPONSE if path == "/v1/responses" else MESSAGE) | {"stream": True}
        response = await cluster.session.post(cluster.url + path, json=body)
        text = await response.read()
        head, data = text.strip().rpartition(b"\n\n")[2].split(b"\n")
        assert head == b"event: error"
        told = json.loads(data.removeprefix(b"data: "))
        assert told["type"] == "error"
        assert "middle of the answer" in told["error"]["message"]
        await cluster.idle()


async def test_a_message_is_split() -> None:
    """As a chat; what needs more than one token, or is for sampling, is not on the prefill leg."""
    async with stub_cluster("p0", "d0") as cluster:
        body = MESSAGE | {
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
            "stop_sequences": ["x"],
        }
        status, _ = await post(cluster, "/v1/messages", body)
        assert status == 200
        await cluster.idle()
        (on_p,), (on_d,) = legs(cluster)
        first = on_p.body
        assert (first["max_tokens"], first["tool_choice"]) == (1, {"type": "none"})
        assert first["output_config"] == {"effort": "low"}
        assert not first.keys() & {"thinking", "stop_sequences"}
        for name in ("system", "messages", "tools"):
            assert first[name] == on_d.body[name]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "source": {}}],
        [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
        [{"type": "tool_addition"}],
        7,
        None,
    ],
)
async def test_what_of_messages_is_not_split(content: Any) -> None:
    """Anything but text, tools' calls and their results."""
    async with stub_cluster("p0", "d0") as cluster:
        body = MESSAGE | {"messages": [{"role": "user", "content": content}]}
        assert (await post(cluster, "/v1/messages", body))[0] == 200
        await cluster.idle()
        on_p, (on_d,) = legs(cluster)
        assert not on_p
        assert on_d.body == body


async def test_errors_of_messages_have_their_form() -> None:
    """Also those of the router itself."""
    async with stub_cluster("p0", "d0") as cluster:
        status, told = await post(cluster, "/v1/messages", MESSAGE | {"model": "other"})
        assert (status, told["type"], told["error"]["type"]) == (404, "error", "NotFoundError")
        assert told["error"]["message"] == "The model `other` does not exist. Valid aliases: m."
    async with stub_cluster() as cluster:
        status, told = await post(cluster, "/v1/messages", MESSAGE)
        assert (status, told["type"]) == (503, "error")
    async with stub_cluster(keys=KEYS) as cluster:
        status, told = await post(cluster, "/v1/messages", MESSAGE)
        assert (status, told["type"]) == (401, "error")


async def test_a_response_is_named_after_the_node_that_makes_it() -> None:
    """Also when another one has failed before: what refers to it finds it."""
    async with stub_cluster("p0", "d0", "d1") as cluster:
        for engine in cluster.engines.values():
            engine.answer = answer_like_an_engine
        await cluster.engines["d0"].stop()
        for _ in range(2):
            status, told = await post(cluster, "/v1/responses", RESPONSE)
            assert status == 200
            got = await cluster.session.get(f"{cluster.url}/v1/responses/{told['id']}")
            assert (got.status, await got.json()) == (200, {"asked": f"/v1/responses/{told['id']}"})
        await cluster.idle()


def test_ids_outlast_the_router() -> None:
    """Another router of the cluster reads them; one with another secret does not."""
    core = Driver("p0", "d0", "d1").core
    ids, later, stranger = (
        ResponseIds(secret, core.membership) for secret in (SECRET, SECRET, bytes(32))
    )
    name = ids.new("a", "d1-1")
    assert later.holder(name, "a") == "d1-1"
    assert ids.new("a", "d1-1") != name
    for asked, tenant, reader in ((name, "b", later), (name, "a", stranger), (name[:-2], "a", ids)):
        with pytest.raises(ApiError, match="not found"):
            reader.holder(asked, tenant)


async def test_the_official_client_hears_of_a_broken_stream() -> None:
    """It raises, and does not take what came for a whole response."""
    async with stub_cluster("p0", "d0") as cluster:

        async def die(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await start_stream(writer)
            await chunk(writer, b'event: response.created\ndata: {"type":"response.created"}\n\n')
            writer.transport.abort()

        cluster.engines["d0"].answer = die
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
        ) as client:
            stream = await client.responses.create(model="m", input="x", stream=True)
            assert (await anext(stream)).type == "response.created"
            with pytest.raises(openai.APIError, match="middle of the answer"):
                await anext(stream)
        await cluster.idle()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/tokenize"])
async def test_a_client_that_leaves(path: str) -> None:
    """Every engine that works for it sees its connection closed, and the router is idle again."""
    async with stub_cluster("p0", "d0") as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        for engine in cluster.engines.values():
            engine.answer = hang
        body = MESSAGE if path == "/v1/messages" else RESPONSE
        posting = asyncio.ensure_future(cluster.session.post(cluster.url + path, json=body))
        working = ["d0"] if path == "/tokenize" else ["p0", "d0"]
        await until(lambda: all(cluster.engines[name].asked for name in working))
        posting.cancel()
        await cluster.idle()
        for name in working:
            async with asyncio.timeout(20):
                await cluster.engines[name].asked[0].client_left.wait()


@pytest.mark.parametrize("path", [*PATHS.values(), "/tokenize"])
async def test_the_trace_of_a_client_travels(path: str) -> None:
    """Trace state and ids reach every engine, and nothing that belongs to one connection does."""
    headers = {"traceparent": TRACE, "tracestate": "a=b", "baggage": "c=d", "X-Request-Id": "mine"}
    async with stub_cluster("p0", "d0") as cluster:
        text = {PATHS[RESPONSES]: "input", "/v1/completions": "prompt"}.get(path)
        body = MESSAGE if text is None else {"model": "m", text: "x"}
        response = await cluster.session.post(cluster.url + path, json=body, headers=headers)
        assert response.status == 200
        assert response.headers["x-request-id"] == "mine"
        await cluster.idle()
        on_p, on_d = legs(cluster)
        assert len(on_p) == (path != "/tokenize")
        for asked in on_p + on_d:
            told = asked.headers
            assert told["traceparent"].split("-")[1] == TRACE.split("-")[1]
            assert (told["tracestate"], told["baggage"]) == ("a=b", "c=d")
            assert told["x-request-id"] == "mine"

"""What the router answers itself: bad requests, keys, sizes, unknown paths, overload."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from router_stubs.cluster import completion, stub_cluster, until
from router_stubs.engine import send

from splitserve.orchestrator.config import parse
from splitserve.orchestrator.config.nodes import POOLS
from splitserve.orchestrator.router.app import no_prompt_logprobs
from splitserve.orchestrator.router.exchange import Exchange

if TYPE_CHECKING:
    from router_stubs.engine import Asked

    from splitserve.orchestrator.core.effects import StartPair

JSON = {"Content-Type": "application/json"}
KV = "kv_transfer_params"


async def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error, after a check of its shape."""
    assert response.status == status
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = (await response.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"model":"m","prompt":"x","y":' + b"[" * 300 + b"]" * 300 + b"}", 400),
        (b'{"model":"other","prompt":"x"}', 404),
    ],
)
async def test_bad_bodies_do_not_reach_an_engine(body: bytes, status: int) -> None:
    """They are answered at once, on a connection that stays usable."""
    async with stub_cluster("p0", "d0") as cluster:
        await error_of(await cluster.post(data=body, headers=JSON), status)
        assert not cluster.engines["p0"].asked
        assert not cluster.engines["d0"].asked
        assert (await cluster.post()).status == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {}),
        ("completions", {"prompt": {"a": 1}}),
        ("completions", {"prompt": ["a", 1] * 4000}),
        ("completions", {"prompt": "x" * 9000, "model": [7]}),
        ("completions", {"prompt": "x" * 9000, "max_tokens": {}, "cache_salt": 7}),
        ("completions", {"prompt": "x" * 9000, "stream_options": 3, "stream": "yes"}),
        ("chat/completions", {"messages": "x" * 9000}),
        ("chat/completions", {"messages": [["x" * 9000]]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("keys", [{}, {"sk-1": "a"}])
async def test_odd_types_are_the_engines_to_judge(
    path: str, fields: dict[str, Any], keys: dict[str, str]
) -> None:
    """They reach a decode node alone as they are, but for the tenant's salt; its answer is the
    client's.
    """
    async with stub_cluster("p0", "p1", "d0", keys=keys) as cluster:

        async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await send(writer, 400, b'{"error":{"message":"no","code":400}}')

        cluster.engines["d0"].answer = refuse
        response = await cluster.post(
            path, json=fields, headers={"Authorization": "Bearer sk-1"} if keys else {}
        )
        assert (response.status, (await response.json())["error"]["message"]) == (400, "no")
        (asked,) = cluster.engines["d0"].asked
        assert {k: v for k, v in asked.body.items() if k not in ("cache_salt", KV)} == {
            k: v for k, v in fields.items() if k != "cache_salt"
        }
        assert not cluster.engines["p0"].asked
        await cluster.idle()


@pytest.mark.parametrize(
    ("flag", "engine", "is_refused"),
    [
        ("enable_lora: true", "vllm", True),
        ("enable-lora: true", "vllm", True),
        ("enable_lora: false", "vllm", False),
        ("", "vllm", False),
        ("enable_lora: true", "mock", False),
    ],
)
def test_when_logprobs_of_prompts_are_refused(flag: str, engine: str, is_refused: bool) -> None:
    """Where they would end the engine."""
    pool = f"{{cpus: [[CPU]], engine_args: {{{flag}}}}}"
    text = f"engine: {engine}\nmodel: {{path: m}}\n" + "".join(
        f"{name}: {pool.replace('CPU', str(cpu))}\n" for cpu, name in enumerate(POOLS)
    )
    assert bool(no_prompt_logprobs(parse(text))) == is_refused


async def test_the_body_must_be_json_by_its_type() -> None:
    """As vLLM wants it; compressed bodies are not taken."""
    async with stub_cluster("p0", "d0") as cluster:
        response = await cluster.post(data=b"{}", headers={"Content-Type": "text/plain"})
        assert "application/json" in (await error_of(response, 400))["message"]
        response = await cluster.post(data=b"{}", headers=JSON | {"Content-Encoding": "gzip"})
        await error_of(response, 415)


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic sk-1", "Bearer", "sk-1"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
async def test_a_wrong_key_is_401(authorization: str | None, path: str) -> None:
    """On every path of the API; nodes are not affected."""
    async with stub_cluster("p0", "d0", keys={"sk-1": "a"}) as cluster:
        headers = {"Authorization": authorization} if authorization else {}
        method = "POST" if path.endswith("completions") else "GET"
        body = completion() if method == "POST" else None
        response = await cluster.session.request(
            method, cluster.url + path, headers=headers, json=body
        )
        await error_of(response, 401)
        good = await cluster.post(headers={"Authorization": "bearer sk-1"})
        assert good.status == 200


@pytest.mark.parametrize("encoding", ["length", "chunked"])
async def test_an_oversized_body_is_413(encoding: str) -> None:
    """As soon as it is known, also when its length was not told; the router serves on."""
    async with stub_cluster("p0", "d0", max_body_bytes=1000) as cluster:
        raw = json.dumps(completion(prompt="x" * 100_000)).encode()

        async def pieces() -> Any:
            for start in range(0, len(raw), 1000):
                yield raw[start : start + 1000]

        data = raw if encoding == "length" else pieces()
        await error_of(await cluster.post(data=data, headers=JSON), 413)
        assert (await cluster.post()).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/inference/v1/generate", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/unload_lora_adapter", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("POST", "/sleep", 404),
        ("POST", "/collective_rpc", 404),
        ("POST", "/v1/completions/render", 404),
        ("GET", "/server_info", 404),
        ("GET", "/v1/models/m", 404),
        ("GET", "/v1/responses/", 404),
        ("DELETE", "/v1/responses/resp_1", 405),
        ("GET", "/v1/responses/resp_1/cancel", 405),
        ("GET", "/v1/responses/resp_1/input_items", 404),
        ("GET", "/tokenize", 405),
        ("POST", "/version", 405),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/internal/timeline/unknown", 404),
    ],
)
async def test_everything_else_is_a_clear_error(method: str, path: str, status: int) -> None:
    """Never a hang, never sent to an engine."""
    async with stub_cluster("p0", "d0") as cluster:
        response = await cluster.session.request(method, cluster.url + path)
        assert path in (await error_of(response, status))["message"] or "timeline" in path
        assert ("allow" in response.headers) == (status == 405)


async def test_overload_is_429_with_retry_after() -> None:
    """Queue full: refused at once. Queue timeout: 503. Both say when to come again."""
    async with stub_cluster(
        "p0",
        "d0",
        queue_limit_requests=1,
        queue_timeout_s=0.3,
        prefill_ahead_requests=0,
        prefill_batch_tokens=0,
    ) as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        for engine in cluster.engines.values():
            engine.answer = hang
        running = asyncio.ensure_future(cluster.post())
        await until(lambda: len(cluster.router.core.requests) == 1)
        waiting = asyncio.ensure_future(cluster.post())
        await until(lambda: len(cluster.router.core.queue) == 1)
        refused = await cluster.post()
        await error_of(refused, 429)
        assert int(refused.headers["retry-after"]) >= 1
        timed_out = await waiting
        await error_of(timed_out, 503)
        assert int(timed_out.headers["retry-after"]) >= 1
        running.cancel()
        await cluster.idle()


async def test_deadlines_reach_the_client() -> None:
    """No first token in time is a 504."""
    async with stub_cluster("p0", "d0", first_token_deadline_s=0.2) as cluster:

        async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        cluster.engines["d0"].answer = hang
        error = await error_of(await cluster.post(), 504)
        assert "first_token_deadline_s" in error["message"]
        await cluster.idle()


async def test_without_nodes_the_answer_is_503() -> None:
    """For requests and for the health check; the model is listed all the same."""
    async with stub_cluster() as cluster:
        await error_of(await cluster.post(), 503)
        health = await cluster.session.get(cluster.url + "/health")
        assert health.status == 503
        models = await (await cluster.session.get(cluster.url + "/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["m"]


async def test_a_fault_of_the_router_ends_one_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be sent is told to its client; others, and what follows, are served."""
    start_pair = Exchange.start_pair

    def fail_for_one(self: Exchange, order: StartPair) -> None:
        if self._request.fields["prompt"] == "poison":
            raise ValueError("cannot be written")
        start_pair(self, order)

    monkeypatch.setattr(Exchange, "start_pair", fail_for_one)
    async with stub_cluster("p0", "d0") as cluster:
        asked = (completion(prompt=p) for p in ("poison", "a", "b"))
        poisoned, *others = await asyncio.gather(*(cluster.post(json=body) for body in asked))
        assert "cannot be written" in (await error_of(poisoned, 502))["message"]
        assert [response.status for response in others] == [200, 200]
        for response in others:
            await response.read()
        await cluster.idle()
    assert "could not carry out StartPair" in caplog.text

"""What the router reads of a body, what it refuses, and what it makes of it for the two legs."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from splitserve.orchestrator.router.client_request import (
    CHAT,
    COMPLETIONS,
    ClientRequest,
    read_client_request,
)
from splitserve.orchestrator.router.errors import ApiError

MODELS = frozenset({"m"})
MESSAGES = [{"role": "user", "content": "hello"}]
PARAMS = b'{"splitserve":{"leg":"x","mac":"y"}}'


def read(endpoint: str, body: Any) -> ClientRequest:
    """The request of a body given as bytes or as a value."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return read_client_request(endpoint, raw, MODELS)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b'{"prompt": "x"', 400, None),
        (b'{"prompt": NaN}', 400, None),
        (b'{"prompt": "\xff"}', 400, None),
        (b"[" * 2000 + b"]" * 2000, 400, None),
        ([1], 400, None),
        ("text", 400, None),
        ({"model": "other", "prompt": "x"}, 404, "model"),
    ],
)
def test_what_hides_its_fields_is_refused(body: Any, status: int, param: str | None) -> None:
    """With an OpenAI-shaped error; an unknown model is named."""
    with pytest.raises(ApiError) as caught:
        read(COMPLETIONS, body)
    error = orjson.loads(caught.value.body())["error"]
    assert (caught.value.status, error["code"], error["param"]) == (status, status, param)
    assert error["message"]
    assert error["type"] in ("BadRequestError", "NotFoundError")


@pytest.mark.parametrize(
    ("endpoint", "body", "why"),
    [
        (COMPLETIONS, {"model": 1, "prompt": "x"}, "model"),
        (COMPLETIONS, {"model": "m"}, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (COMPLETIONS, {"prompt": 7}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 2.5]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], ["a"]]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "x", "stream": 1}, "stream"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "9"}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": [1]}, "max_tokens"),
        (CHAT, {"model": "m"}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": {"role": "user"}}, "messages"),
        (CHAT, {"messages": ["hello"]}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": "1"}, "max_completion_tokens"),
    ],
)
def test_the_engine_judges_odd_types(endpoint: str, body: Any, why: str) -> None:
    """Such a request is not split, and is never taken for a stream that can be continued."""
    request = read(endpoint, body)
    assert request.alone_because == why
    assert not request.is_streaming
    assert not request.can_continue
    assert b"".join(request.decode_body(None, None)) == orjson.dumps(body)


@pytest.mark.parametrize("model", [None, "", "m"])
def test_a_model_need_not_be_named(model: str | None) -> None:
    """Engines take an empty name for their model."""
    assert read(COMPLETIONS, {"prompt": "x", "model": model}).alone_because == ""


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 2},
        {"n": 0},
        {"n": "2"},
        {"best_of": 3},
        {"use_beam_search": True},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"prompt_embeds": "AAAA"},
        {"truncate_prompt_tokens": 8},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"prompt": [[]]},
    ],
    ids=str,
)
def test_what_cannot_be_split_goes_to_decode_alone(extra: dict[str, Any]) -> None:
    """The engine is the judge of odd values; the router only keeps them whole."""
    assert read(COMPLETIONS, {"prompt": "x"} | extra).alone_because


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 1},
        {"n": None, "best_of": None, "echo": False, "use_beam_search": False},
        {"prompt": ["a"]},
        {"prompt": [[1, 2]]},
        {"prompt": [1, 2]},
        {"prompt_logprobs": None},
        {"stop": ["x"], "logprobs": 3, "seed": 1, "max_tokens": 1},
        {"max_tokens": None},
        {"max_tokens": 5.0},
    ],
    ids=str,
)
def test_ordinary_requests_may_be_split(extra: dict[str, Any]) -> None:
    """Default values written out change nothing."""
    assert read(COMPLETIONS, {"prompt": "x"} | extra).alone_because == ""


@pytest.mark.parametrize(
    ("endpoint", "extra", "wants"),
    [
        (COMPLETIONS, {"prompt_logprobs": 0}, True),
        (COMPLETIONS, {"prompt_logprobs": None}, False),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, True),
        (COMPLETIONS, {"echo": True}, False),
        (COMPLETIONS, {"logprobs": 1}, False),
        (CHAT, {"echo": True}, True),
        (CHAT, {"echo": False}, False),
    ],
)
def test_who_wants_logprobs_of_the_prompt(
    endpoint: str, extra: dict[str, Any], wants: bool
) -> None:
    """Also by an echo with logprobs; in a chat vLLM takes every echo for that."""
    request = read(endpoint, {"prompt": "x", "messages": MESSAGES} | extra)
    assert request.wants_prompt_logprobs == wants
    assert request.alone_because or not wants


def test_messages_with_pictures_are_not_split() -> None:
    """Text parts are."""
    text = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert read(CHAT, {"messages": text}).alone_because == ""
    assert read(CHAT, {"messages": text + image}).alone_because == "multimodal"


def test_the_prompts_length_is_counted_or_estimated() -> None:
    """Token ids exactly, text by a third of the body's bytes; the output limit as vLLM reads it."""
    ids = read(COMPLETIONS, {"prompt": list(range(1000))})
    assert (ids.prompt_tokens, ids.output_tokens) == (1000, 16)
    text = read(COMPLETIONS, {"prompt": "x" * 3000, "max_tokens": 7})
    assert 1000 <= text.prompt_tokens <= 1020
    assert text.output_tokens == 7
    chat = read(CHAT, {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6})
    assert chat.output_tokens == 6
    assert read(CHAT, {"messages": MESSAGES}).output_tokens is None


def test_decode_gets_the_clients_bytes() -> None:
    """Spacing, order and number formats of the client stay; the router's fields are spliced in at
    the end.
    """
    raw = b' { "temperature":1e-3, "prompt" :"h\\u00e9}", "top_p":1.0 }\r\n '
    request = read(COMPLETIONS, raw)
    assert b"".join(request.decode_body(None, None)) == raw
    joined = b"".join(request.decode_body(PARAMS, "s"))
    start = raw.rindex(b"}")
    assert joined[:start] == raw[:start]
    told = orjson.loads(joined)
    assert told["kv_transfer_params"] == orjson.loads(PARAMS)
    assert told["cache_salt"] == "s"


@pytest.mark.parametrize("key", ["kv_transfer_params", "kv_transfer_p\\u0061rams"])
@pytest.mark.parametrize("params", [None, PARAMS])
def test_a_clients_transfer_parameters_are_removed(key: str, params: bytes | None) -> None:
    """However the key is spelled, and whether the request is split or not."""
    raw = b'{"prompt":"x","%b":{"splitserve":{"leg":"evil","mac":""}}}' % key.encode()
    request = read(COMPLETIONS, raw)
    for body in (b"".join(request.decode_body(params, None)), request.prefill_body(PARAMS, None)):
        assert b"evil" not in body
    told = orjson.loads(b"".join(request.decode_body(params, None)))
    assert told.get("kv_transfer_params") == (orjson.loads(params) if params else None)


@pytest.mark.parametrize("params", [None, PARAMS])
def test_transfer_parameters_among_other_arguments_are_removed(params: bytes | None) -> None:
    """vLLM would take them from there, and fail; what stands beside them stays."""
    body = {"prompt": "x", "vllm_xargs": {"kv_transfer_params": "evil", "a": 1}}
    request = read(COMPLETIONS, body)
    for leg in (b"".join(request.decode_body(params, None)), request.prefill_body(PARAMS, None)):
        assert b"evil" not in leg
        assert orjson.loads(leg)["vllm_xargs"] == {"a": 1}
    told = orjson.loads(b"".join(request.decode_body(params, None)))
    assert told.get("kv_transfer_params") == (orjson.loads(params) if params else None)


def test_a_clients_salt_is_replaced_only_when_there_are_tenants() -> None:
    """On both legs alike, never twice in one body."""
    request = read(COMPLETIONS, {"prompt": "x", "cache_salt": "mine"})
    assert orjson.loads(b"".join(request.decode_body(PARAMS, None)))["cache_salt"] == "mine"
    assert orjson.loads(request.prefill_body(PARAMS, None))["cache_salt"] == "mine"
    decode = b"".join(request.decode_body(PARAMS, "derived"))
    assert decode.count(b"cache_salt") == 1
    assert orjson.loads(decode)["cache_salt"] == "derived"
    assert orjson.loads(request.prefill_body(PARAMS, "derived"))["cache_salt"] == "derived"


def test_the_prefill_leg_keeps_only_what_shapes_the_prompt() -> None:
    """One greedy token, no stream, no parser, no grammar; ``tools`` stay and a forced choice does
    not.
    """
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = read(
        CHAT,
        {
            "model": "m",
            "messages": MESSAGES,
            "tools": tools,
            "tool_choice": "required",
            "chat_template_kwargs": {"a": 1},
            "max_completion_tokens": 50,
            "max_tokens": 60,
            "min_tokens": 10,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "stop": ["x"],
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
            "seed": 3,
            "n": 1,
            "ignore_eos": True,
        },
    )
    assert orjson.loads(request.prefill_body(PARAMS, None)) == {
        "model": "m",
        "messages": MESSAGES,
        "tools": tools,
        "tool_choice": "none",
        "chat_template_kwargs": {"a": 1},
        "max_tokens": 1,
        "stream": False,
        "temperature": 0,
        "kv_transfer_params": orjson.loads(PARAMS),
    }

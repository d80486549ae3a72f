"""A stream that is passed on without its token ids, and continued with another engine's events."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from splitserve.orchestrator.router.client_request import continued, read_client_request
from splitserve.orchestrator.router.sent_tokens import BrokenStreamError, SentTokens

DONE = b"data: [DONE]\n\n"


def chunk(
    text: str,
    ids: list[int] | None,
    *,
    prompt: list[int] | None = None,
    finish: str | None = None,
    usage: dict[str, int] | None = None,
    **head: Any,
) -> bytes:
    """A completion's event as vLLM writes it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    choice |= {"stop_reason": None, "prompt_token_ids": prompt, "token_ids": ids}
    event = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m"} | head
    event["choices"] = [choice]
    return b"data: " + orjson.dumps(event | ({"usage": usage} if usage else {})) + b"\n\n"


def usage_event(prompt: int, completion: int, **head: Any) -> bytes:
    """The event with the count of tokens."""
    event = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m"} | head
    usage = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    return b"data: " + orjson.dumps(event | {"choices": [], "usage": usage}) + b"\n\n"


PLAIN = [
    chunk("a", None),
    chunk('say "token_ids":[1,2]', None),
    chunk("", None),
    chunk("z", None, finish="length"),
    DONE,
]
WITH_IDS = [
    chunk("a", [5], prompt=[1, 2, 3]),
    chunk('say "token_ids":[1,2]', [6, 700]),
    chunk("", [8]),
    chunk("z", [9], finish="length"),
    DONE,
]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_the_ids_are_cut_out_wherever_the_reads_end(size: int) -> None:
    """The client's bytes are those of a stream that nobody asked for ids; text that looks like ids
    stays.
    """
    sent = SentTokens(has_usage=False)
    data = b"".join(WITH_IDS)
    first = len(WITH_IDS[0])
    parts = [data[:first], *(data[at : at + size] for at in range(first, len(data), size))]
    assert b"".join(map(sent.feed, parts)) == b"".join(PLAIN)
    assert (sent.sent, sent.is_finished, sent.is_complete) == (5, True, True)
    assert sent.ids() == b"[1,2,3,5,6,700,8,9]"


def test_only_what_the_client_has_counts() -> None:
    """Half an event is forgotten when another engine goes on."""
    sent = SentTokens(has_usage=False)
    sent.feed(WITH_IDS[0])
    assert sent.feed(WITH_IDS[1][:-1]) == b""
    sent.begin_anew()
    assert sent.ids() == b"[1,2,3,5]"
    rest = [chunk("b", [6], prompt=[1, 2, 3, 5], id="cmpl-2", created=9), DONE]
    assert [sent.feed(event) for event in rest] == [chunk("b", None), DONE]
    assert sent.ids() == b"[1,2,3,5,6]"


def test_tokens_are_counted_as_by_one_engine() -> None:
    """What the engine before has sent is answer, not prompt, in every count."""
    sent = SentTokens(has_usage=True)
    sent.feed(chunk("ab", [5, 6], prompt=[1, 2, 3]))
    sent.begin_anew()
    usage = {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1}
    passed = sent.feed(chunk("c", [7], finish="stop", usage=usage, created=9))
    right = {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3}
    assert passed == chunk("c", None, finish="stop", usage=right)
    assert sent.feed(usage_event(5, 1, created=9)) == usage_event(3, 3)


def test_a_second_role_is_not_sent() -> None:
    """Each engine begins a chat with a chunk that holds the role only, and the prompt's ids."""
    role: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1}
    role |= {"model": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    sent = SentTokens(has_usage=False)
    first = b"data: " + orjson.dumps(role | {"prompt_token_ids": [1, 2]}) + b"\n\n"
    null = b"data: " + orjson.dumps(role | {"prompt_token_ids": None}) + b"\n\n"
    assert sent.feed(first) == null
    sent.begin_anew()
    assert sent.feed(first) == b""
    assert sent.ids() == b"[1,2]"


@pytest.mark.parametrize("has_usage", [False, True])
def test_a_finished_answer_is_completed_without_an_engine(has_usage: bool) -> None:
    """The last token was sent, what follows it was not."""
    sent = SentTokens(has_usage=has_usage)
    sent.feed(chunk("a", [5], prompt=[1, 2, 3]) + chunk("b", [6], finish="length"))
    assert sent.tail() == (usage_event(3, 2) if has_usage else b"") + DONE


@pytest.mark.parametrize("is_later", [False, True])
def test_an_engines_error_is_not_passed_on(is_later: bool) -> None:
    """It ends this engine's part of the stream, together with what came in the same read."""
    sent = SentTokens(has_usage=False)
    sent.feed(WITH_IDS[0])
    if is_later:
        sent.begin_anew()
    error = b'data: {"error":{"message":"engine is dead","code":500}}\n\n'
    with pytest.raises(BrokenStreamError, match="engine is dead"):
        sent.feed(WITH_IDS[1] + error + DONE)


@pytest.mark.parametrize("bad", [b"data: {half\n\n", b'data: {"id":"x"}\n\n', b"data: 7\n\n"])
def test_what_a_later_engine_sends_must_be_chunks(bad: bytes) -> None:
    """Else its part ends, and nothing of that read counts as sent; comments are passed on."""
    sent = SentTokens(has_usage=False)
    sent.feed(WITH_IDS[0])
    sent.begin_anew()
    assert sent.feed(b": ping\n\n") == b": ping\n\n"
    with pytest.raises(BrokenStreamError, match="cannot be read"):
        sent.feed(chunk("b", [6]) + bad + DONE)
    assert (sent.ids(), sent.is_complete) == (b"[1,2,3,5]", False)


@pytest.mark.parametrize(
    "first",
    [
        b"data: hello\n\n",
        b"data: {}\r\n\r\n",
        b'data: {"prompt_token_ids":[1],\n\n',
        b'data: {"prompt_token_ids":[1]}\n\n',
        chunk("a", None),
    ],
)
def test_a_stream_without_ids_is_passed_on_as_it_comes(first: bytes) -> None:
    """An engine that does not know the question cannot be succeeded, but is served."""
    sent = SentTokens(has_usage=False)
    assert sent.feed(first) == first
    assert sent.feed(b"half an ev") == b"half an ev"
    assert not sent.can_continue


def test_what_is_left_is_asked_for() -> None:
    """Fewer tokens, prompt and answer so far as the prompt; all else as the client wrote it."""
    body = {"model": "m", "prompt": "hello", "stream": True, "max_tokens": 10, "min_tokens": 1}
    request = read_client_request("completions", orjson.dumps(body | {"stop": ["x"]}), MODELS)
    sent = SentTokens(has_usage=False)
    sent.feed(chunk("ab", [5, 6], prompt=[1, 2, 3]))
    rest = continued(request, sent)
    found = orjson.loads(b"".join(rest.decode_body(b"{}", "salt")))
    right = {"prompt": [1, 2, 3, 5, 6], "max_tokens": 8, "min_tokens": 0, "stop": ["x"]}
    right |= {"kv_transfer_params": {}, "cache_salt": "salt", "return_token_ids": True}
    assert found == body | right
    assert orjson.loads(rest.prefill_body(b"{}", None))["prompt"] == [1, 2, 3, 5, 6]


MODELS = frozenset({"m"})


@pytest.mark.parametrize(
    ("fields", "can_continue"),
    [
        ({}, True),
        ({"temperature": 0.9, "top_p": 0.5, "min_tokens": 3, "user": "u"}, True),
        ({"temperature": 0, "seed": 5}, True),
        ({"temperature": 0.5, "seed": 5}, False),
        ({"seed": 5}, False),
        ({"stream": False}, False),
        ({"n": 1, "presence_penalty": 0, "logprobs": None, "tools": None}, True),
        ({"n": 2}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -1}, False),
        ({"logprobs": 0}, False),
        ({"bad_words": ["x"]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"min_tokens": "3"}, False),
        ({"something_new": 1}, False),
        ({"kv_transfer_params": {"a": 1}}, True),
    ],
    ids=str,
)
def test_only_exact_continuations_are_made(fields: dict[str, Any], can_continue: bool) -> None:
    """A field that nobody has thought about keeps a request from being continued."""
    body = {"model": "m", "prompt": "p", "stream": True} | fields
    request = read_client_request("completions", orjson.dumps(body), MODELS)
    assert request.can_continue is can_continue


def test_tokens_before_a_later_engines_error_do_not_count() -> None:
    """They came in the same read as its error and were not passed on: a third engine sends them
    again, and an answer that ended there has not ended for the client.
    """
    sent = SentTokens(has_usage=False)
    sent.feed(WITH_IDS[0])
    sent.begin_anew()
    error = b'data: {"error":{"message":"engine is dead","code":500}}\n\n'
    with pytest.raises(BrokenStreamError):
        sent.feed(chunk("b", [6], id="cmpl-2", finish="length") + error + DONE)
    assert sent.ids() == b"[1,2,3,5]"
    assert (sent.sent, sent.is_finished, sent.is_complete) == (1, False, False)


@pytest.mark.parametrize("is_later", [False, True])
def test_the_count_of_tokens_is_sent_once(is_later: bool) -> None:
    """Also when it came in one read with the last token, and the end of the stream did not."""
    sent = SentTokens(has_usage=True)
    sent.feed(WITH_IDS[0])
    if is_later:
        sent.begin_anew()
    sent.feed(chunk("z", [9], finish="length") + usage_event(3, 2))
    assert sent.tail() == DONE

"""The conformance suite itself: what it would find, and what its tables promise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from end_to_end.conformance import table
from end_to_end.conformance.compare import EVENTS, Reply, differences, texts
from end_to_end.conformance.row import CHAT
from end_to_end.conformance.run import REAL, ROWS

from splitserve.orchestrator.router.client_request import read_client_request

JSON, SSE = "application/json", "text/event-stream; charset=utf-8"
LOGPROBS = {"tokens": ["a", "b"], "token_logprobs": [-1.5, -0.25], "text_offset": [0, 1]}
WHOLE: dict[str, Any] = {
    "id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m",
    "system_fingerprint": "a", "kv_transfer_params": None,
    "choices": [{"index": 0, "text": "ab", "logprobs": LOGPROBS, "finish_reason": "length",
                 "stop_reason": None}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2,
              "prompt_tokens_details": {"cached_tokens": 0}},
}  # fmt: skip


def whole(status: int = 200, **changes: Any) -> Reply:
    return Reply(status, JSON, json.dumps(WHOLE | changes).encode())


def choice(**changes: Any) -> Reply:
    return whole(choices=[WHOLE["choices"][0] | changes])


def event(text: str, index: int = 0, finish: str | None = None, **head: Any) -> str:
    """A completion's event."""
    part = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    return json.dumps({"id": "cmpl-1", "created": 5, "choices": [part]} | head)


def stream(*events: str, done: str = "[DONE]") -> Reply:
    lines = [*events, done] if done else events
    return Reply(200, SSE, "".join(f"data: {line}\n\n" for line in lines).encode())


USAGE = json.dumps({"id": "cmpl-1", "created": 5, "choices": [], "usage": {"prompt_tokens": 9}})
STREAM = stream(event("a"), event("b"), event("c", finish="stop"), USAGE)
ERROR = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}


def test_what_is_new_in_every_answer_does_not_matter() -> None:
    """Ids, times, the fingerprint of an engine's settings, and what rounding does to logprobs."""
    other = choice(logprobs=LOGPROBS | {"token_logprobs": [-1.5003, -0.2501]})
    aside = whole(id="cmpl-2", created=9, system_fingerprint="b")
    assert differences(whole(), other) == differences(aside, whole()) == []
    later = STREAM.raw.replace(b"cmpl-1", b"cmpl-2").replace(b'"created": 5', b'"created": 6')
    assert differences(Reply(200, SSE, later), STREAM) == []


@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        (whole(400), "status"),
        (Reply(200, SSE, whole().raw), "content type"),
        (whole(model="n"), "model"),
        (whole(id=None), "id"),
        (whole(system_fingerprint=None), "system_fingerprint"),
        (whole(kv_transfer_params={}), "kv_transfer_params"),
        (whole(more=1), "more"),
        (whole(choices=WHOLE["choices"] * 2), "choices"),
        (choice(text="ac"), "choices[0].text"),
        (choice(finish_reason="stop"), "choices[0].finish_reason"),
        (choice(stop_reason="b"), "choices[0].stop_reason"),
        (choice(logprobs=None), "choices[0].logprobs"),
        (
            choice(logprobs=LOGPROBS | {"token_logprobs": [-1.5, -0.3]}),
            "choices[0].logprobs.token_logprobs[1]",
        ),
        (choice(logprobs=LOGPROBS | {"tokens": ["a"]}), "choices[0].logprobs.tokens"),
        (
            whole(usage=WHOLE["usage"] | {"prompt_tokens_details": {"cached_tokens": 8}}),
            "usage.prompt_tokens_details.cached_tokens",
        ),
        (
            whole(usage=WHOLE["usage"] | {"prompt_tokens_details": {"cached_tokens": None}}),
            "usage.prompt_tokens_details.cached_tokens",
        ),
        (whole(usage=WHOLE["usage"] | {"prompt_tokens": 10}), "usage.prompt_tokens"),
    ],
)
def test_a_planted_difference_is_found(planted: Reply, kind: str) -> None:
    """In every field of an answer that is not streamed."""
    found = differences(planted, whole())
    assert len(found) >= 1
    assert found[0].startswith(kind)


@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        (stream(event("a"), event("x"), event("c", finish="stop"), USAGE), "event 1 of choice 0"),
        (stream(event("a"), event("b"), event("c", finish="length"), USAGE), "event 2 of choice 0"),
        (stream(event("a"), event("b"), event("c"), USAGE), "choice 0 has 0 finish reasons"),
        (
            stream(event("a"), event("b", finish="stop"), event("c", finish="stop"), USAGE),
            "choice 0 has 2 finish reasons",
        ),
        (stream(event("a"), event("b"), event("c", finish="stop")), "events: 0 of the usage"),
        (
            stream(event("a"), event("b"), event("c", finish="stop"), USAGE, USAGE),
            "events: 2 of the usage",
        ),
        (
            stream(event("a"), event("b"), event("c", finish="stop"), USAGE, done=""),
            "0 times [DONE]",
        ),
        (
            stream(event("a"), event("b"), event("c", finish="stop"), USAGE, "[DONE]"),
            "2 times [DONE]",
        ),
        (
            stream(event("a"), event("b", created=6), event("c", finish="stop"), USAGE),
            "its events have several ids",
        ),
        (stream(event("a"), event("b", more=1), event("c", finish="stop"), USAGE), "event 1 of"),
        (stream(event("a"), json.dumps(ERROR)), "an error event"),
        (whole(), "content type"),
    ],
)
def test_a_planted_difference_in_a_stream_is_found(planted: Reply, kind: str) -> None:
    """In every event, in their number, and in how the stream ends."""
    assert any(told.startswith(kind) for told in differences(planted, STREAM))


def test_events_that_were_joined_differ_in_their_number_alone() -> None:
    """What an engine sends as one event has the same text; another text is found all the same."""
    joined = stream(event("ab"), event("c", finish="stop"), USAGE)
    assert differences(joined, STREAM) == [f"{EVENTS}2 of choice 0, not 3"]
    other = differences(stream(event("ax"), event("c", finish="stop"), USAGE), STREAM)
    assert any("all events together: choices[0].text" in told for told in other)
    assert texts(joined) == texts(STREAM) == {0: ["abc", []]}
    elsewhere = stream(event("a"), event("bc", finish="stop"), USAGE)
    assert differences(joined, elsewhere) == [f"{EVENTS}2 of choice 0, joined at other places"]


def test_the_order_of_choices_is_not_promised() -> None:
    """Events of one choice stay in order."""
    one = stream(event("a"), event("x", 1), event("b", finish="stop"), event("y", 1, "stop"))
    other = stream(event("x", 1), event("a"), event("y", 1, "stop"), event("b", finish="stop"))
    swapped = stream(event("x", 1), event("y", 1, "stop"), event("b", finish="stop"), event("a"))
    assert differences(one, other) == []
    assert differences(one, swapped)


def test_a_stream_that_begins_with_an_error_has_its_status() -> None:
    """The router says so before it has promised success; the plain engine cannot."""
    right = stream(json.dumps(ERROR))
    assert differences(Reply(400, JSON, json.dumps(ERROR).encode()), right) == []
    assert differences(right, right)[0].startswith("status 200, not 400")


def test_rows_have_names_of_their_own() -> None:
    """A row that hides another one is not asked; those for the real model exist."""
    keys = {row.key for row in ROWS}
    assert len(keys) == len(ROWS)
    assert keys >= REAL


def test_each_row_says_why_it_is_not_split() -> None:
    """As the router does."""
    for row in ROWS:
        endpoint = "chat" if row.path == CHAT else "completions"
        for form in () if row.by_router else row.forms:
            body = json.dumps(row.body(form)).encode()
            read = read_client_request(endpoint, body, frozenset({"m"}))
            assert read.alone_because == row.alone, row.key


def test_the_page_shows_the_rows() -> None:
    """``python -m end_to_end.conformance.table`` in ``tests/`` writes it anew."""
    assert table.section_of(table.PAGE.read_text()) == table.rendered()

"""What the mock engine accepts, and its text."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from splitserve.orchestrator.engines.mock.front import MockFront
from splitserve.orchestrator.engines.mock.tokenizer import END, chat_prompt, decode, encode
from splitserve.orchestrator.engines.serving.protocol import ApiError, TextOf, limit_tokens

FRONT = MockFront()
prompts_of, read_tokenize = FRONT.prompts, FRONT.read_tokenize


def completion(**fields: Any) -> Any:
    return FRONT.read(orjson.dumps(fields), is_chat=False)


def chat(**fields: Any) -> Any:
    return FRONT.read(orjson.dumps(fields), is_chat=True)


def test_text_and_ids_are_the_same_prompt() -> None:
    """A string is its bytes; several prompts stay apart."""
    assert prompts_of(completion(prompt="ab"))[0].tokens == (97, 98)
    assert prompts_of(completion(prompt=[97, 98]))[0].tokens == (97, 98)
    assert [p.tokens for p in prompts_of(completion(prompt=["a", "b"]))] == [(97,), (98,)]
    assert [p.tokens for p in prompts_of(completion(prompt=[[97], [98]]))] == [(97,), (98,)]


def test_tokenising_is_what_requests_do() -> None:
    """A prompt or messages, told apart by their field."""
    messages = [{"role": "user", "content": "x"}]
    for fields in ({"prompt": "ab"}, {"messages": messages, "add_generation_prompt": True}):
        body = read_tokenize(orjson.dumps(fields))
        expected = prompts_of(chat(**fields) if "messages" in fields else completion(**fields))
        assert prompts_of(body) == expected
    with pytest.raises(ApiError):
        read_tokenize(b"[]")


def test_chat_is_rendered() -> None:
    """Roles, text parts and tools are part of the prompt, and the answer's place comes last."""
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    prompt = prompts_of(chat(messages=[{"role": "user", "content": parts}]))[0]
    assert prompt.text == "<user>hi\n<assistant>"
    assert chat_prompt([{"role": "user", "content": "x"}], ["tool"]).startswith("<tools>")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [512]},
        {"prompt": [-1]},
        {"prompt": [True]},
        {"prompt": {"a": 1}},
        {},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "max_tokens": 101},
        {"prompt": "a" * 100},
        {"prompt": "a", "max_tokens": "many"},
    ],
)
def test_bad_completions_are_refused(fields: dict[str, Any]) -> None:
    """Status 400 with vLLM's error object."""

    def read() -> None:
        body = completion(**fields)
        for prompt in prompts_of(body):
            limit_tokens(body, len(prompt.tokens), 100)

    with pytest.raises(ApiError) as raised:
        read()
    assert raised.value.status == 400
    assert raised.value.body()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    "messages",
    [[], ["x"], [{"content": "x"}], [{"role": "user", "content": 3}],
     [{"role": "user", "content": [{"type": "image_url"}]}]],
)  # fmt: skip
def test_bad_chats_are_refused(messages: list[Any]) -> None:
    """Status 400."""
    body = chat(messages=messages)
    with pytest.raises(ApiError) as raised:
        prompts_of(body)
    assert raised.value.status == 400


def test_the_answer_is_limited_by_the_context() -> None:
    """Completions get 16 tokens unless they ask, chats the rest of the context."""
    assert limit_tokens(completion(prompt="a"), 10, 100) == 16
    assert limit_tokens(completion(prompt="a", max_tokens=50), 90, 100) == 10
    assert limit_tokens(chat(messages=[]), 10, 100) == 90
    assert limit_tokens(chat(messages=[], max_completion_tokens=5), 10, 100) == 5


def test_answers_are_printable_and_can_be_sent_back() -> None:
    """The text of an answer tokenises to the same ids; the end token has no text."""
    assert encode(decode([72, 105])) == [72, 105]
    assert decode([72, END]) == "H"


def test_stop_strings_cut_the_text() -> None:
    """Also across tokens; what may begin one is held back until it does not."""
    text = TextOf(("bcd",))
    assert [text.feed(token, is_last=False) for token in "abcx"] == ["", "", "a", "b"]
    assert text.feed("bcd", is_last=False) == "cx"
    assert text.stop_reason == "bcd"
    whole = TextOf(("zz",))
    assert whole.feed("a", is_last=False) + whole.feed("z", is_last=True) == "az"
    assert whole.stop_reason is None


def test_no_text_leaves_before_it_cannot_begin_a_stop_string() -> None:
    """A stop string longer than what is held: nothing goes out yet; an answer that is taken over
    goes on as it would have.
    """
    text = TextOf(("seven77",))
    assert [text.feed(character, is_last=False) for character in "abcdefgh"] == [
        *[""] * 6,
        "a",
        "b",
    ]
    resumed = TextOf(("seven77",))
    resumed.resume("abcdefgh")
    assert resumed.feed("i", is_last=False) == text.feed("i", is_last=False) == "c"

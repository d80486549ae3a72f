"""Marks of prompts: what shares them, what does not, and that they are stable."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.kv_transfer.prefix_marks import split_digests
from splitserve.orchestrator.router.client_request import CHAT, COMPLETIONS
from splitserve.orchestrator.router.prompt_marks import NO_MARKS, PromptMarks

MARKS = PromptMarks(bytes(32))
LONG = "The quick brown fox jumps over the lazy dog. " * 100
OTHER = "Another sentence of about the same length here. " * 100


def of(endpoint: str, salt: str = "", because: str = "", **fields: Any) -> list[bytes]:
    """The digests of that request."""
    marks = MARKS.of(endpoint, fields, because, salt)
    assert split_digests(marks.joined) == list(marks.digests)
    return list(marks.digests)


def said(*contents: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def shared(one: list[bytes], other: list[bytes]) -> int:
    """How many marks two prompts have in common, from the first on."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    assert same == sorted(same, reverse=True), "marks agree again behind a difference"
    return sum(same)


def test_a_conversation_that_goes_on_has_all_earlier_marks() -> None:
    """Each turn's marks are the beginning of the next one's."""
    turns = ["Hello. " * 90, "Good day. " * 70, "And now? " * 80, "Nothing. " * 50, "Bye. " * 300]
    marks = [of(CHAT, messages=said(*turns[: n + 1])) for n in range(0, 5, 2)]
    assert 0 < len(marks[0]) < len(marks[1]) < len(marks[2])
    assert marks[1][: len(marks[0])] == marks[0]
    assert marks[2][: len(marks[1])] == marks[1]


def test_the_order_of_keys_in_a_message_does_not_matter() -> None:
    """Clients write role and content in either order."""
    turned = [dict(reversed(message.items())) for message in said(LONG)]
    assert of(CHAT, messages=turned) == of(CHAT, messages=said(LONG))


def test_prompts_share_the_marks_of_their_common_bytes() -> None:
    """And no mark behind the first byte that differs."""
    text = LONG + OTHER
    assert shared(of(COMPLETIONS, prompt=text), of(COMPLETIONS, prompt=LONG)) == len(LONG) // 512
    changed = text[:2_000] + "?" + text[2_001:]
    assert shared(of(COMPLETIONS, prompt=text), of(COMPLETIONS, prompt=changed)) == 3


def test_token_ids_are_four_bytes_each() -> None:
    """128 ids reach the first mark; one prompt in a list is that prompt."""
    ids = list(range(300))
    assert len(of(COMPLETIONS, prompt=ids)) == 2
    assert of(COMPLETIONS, prompt=[ids]) == of(COMPLETIONS, prompt=ids)
    assert of(COMPLETIONS, prompt=[LONG]) == of(COMPLETIONS, prompt=LONG)
    assert shared(of(COMPLETIONS, prompt=ids), of(COMPLETIONS, prompt=[*ids[:200], 7])) == 1


def test_what_shapes_the_template_comes_first() -> None:
    """Other tools, template or arguments of it: no mark in common."""
    plain = of(CHAT, messages=said(LONG))
    tool = {"type": "function", "function": {"name": "f"}}
    for more in (
        {"tools": [tool]},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "x"}]},
    ):
        assert shared(plain, of(CHAT, messages=said(LONG), **more)) == 0
    assert of(CHAT, messages=said(LONG), tools=None, temperature=1) == plain


def test_nobody_shares_a_mark_with_another_salt_model_kind_or_cluster() -> None:
    """Marks tell nothing across tenants, and cannot be made without the secret."""
    text = of(COMPLETIONS, prompt=LONG)
    assert shared(text, of(COMPLETIONS, prompt=LONG, salt="a")) == 0
    assert shared(text, of(COMPLETIONS, prompt=LONG, model="m")) == 0
    assert shared(text, of(COMPLETIONS, prompt=LONG, add_special_tokens=False)) == 0
    elsewhere = PromptMarks(b"\1" * 32).of(COMPLETIONS, {"prompt": LONG}, "", "")
    assert shared(text, list(elsewhere.digests)) == 0
    again = PromptMarks(bytes(32)).of(COMPLETIONS, {"prompt": LONG}, "", "")
    assert list(again.digests) == text


@pytest.mark.parametrize(
    ("because", "fields"),
    [
        ("", {"prompt": "short"}),
        ("", {"prompt": [-1, *range(300)]}),
        ("", {"prompt": [2**32, *range(300)]}),
        ("prompt_embeds", {"prompt": None}),
        ("empty prompt", {"prompt": []}),
        ("several prompts", {"prompt": [LONG, LONG]}),
        ("truncate_prompt_tokens", {"prompt": LONG}),
    ],
)
def test_prompts_without_marks(because: str, fields: dict[str, Any]) -> None:
    """What is short, no prompt, or not read from its beginning."""
    assert MARKS.of(COMPLETIONS, fields, because, "") == NO_MARKS


def test_seeds_of_salts_are_bounded_and_stable() -> None:
    """A client that sends ever new salts changes nothing for others."""
    marks = PromptMarks(bytes(32))
    first = marks.of(COMPLETIONS, {"prompt": LONG}, "", "s")
    for number in range(1_100):
        marks.of(COMPLETIONS, {"prompt": "x" * 512}, "", str(number))
    assert len(marks._seeds) <= 1_024
    assert marks.of(COMPLETIONS, {"prompt": LONG}, "", "s") == first

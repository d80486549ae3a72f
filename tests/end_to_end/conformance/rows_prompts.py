"""Rows about prompts: in which form they come, how long they are, and what of them is answered."""

from __future__ import annotations

import random

from end_to_end.conformance.row import ABSENT, CHAT, COMPLETIONS, STREAMED, WHOLE, Row, both
from end_to_end.conformance.sides import BLOCK, MAX_LENGTH

FORMS, LENGTHS, CHOICES, LOGPROBS, USAGE, CHATS = (
    "prompts", "lengths of prompts", "several answers", "logprobs and echo", "streams and usage",
    "chats",
)  # fmt: skip
EDGES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 16 * BLOCK + 1]


def ids(length: int, seed: int) -> list[int]:
    """Token ids."""
    draw = random.Random(seed)
    return [draw.randrange(0x20, 0x7F) for _ in range(length)]


def text(length: int, seed: int) -> str:
    """The same as text, of which each byte is a token."""
    return bytes(ids(length, seed)).decode()


def history(turns: int, seed: int) -> list[dict[str, str]]:
    """A chat of so many questions, all but the last one answered."""
    roles = ["user", "assistant"] * turns
    return [
        {"role": role, "content": text(20 + 7 * (n % 5), seed * 1000 + n)}
        for n, role in enumerate(roles[: 2 * turns - 1])
    ]


def completion(area: str, name: str, fields: dict[str, object], **rest: object) -> Row:
    return Row(area, name, COMPLETIONS, fields, **rest)  # type: ignore[arg-type]


def chat(name: str, fields: dict[str, object], **rest: object) -> Row:
    return Row(CHATS, name, CHAT, fields, **rest)  # type: ignore[arg-type]


SEVERAL = "several prompts"
COUNTED = {"stream_options": {"include_usage": True}}
ROWS = [
    completion(FORMS, "text", {"prompt": text(70, 1)}),
    completion(FORMS, "token ids", {"prompt": ids(70, 2)}),
    completion(FORMS, "one text in a list", {"prompt": [text(70, 3)]}),
    completion(FORMS, "one list of token ids in a list", {"prompt": [ids(70, 4)]}),
    completion(FORMS, "a list of texts", {"prompt": [text(40, 5), text(70, 6)]}, alone=SEVERAL),
    completion(FORMS, "a list of lists of token ids",
               {"prompt": [ids(9, 7), ids(70, 8), ids(33, 9)]}, alone=SEVERAL),
    completion(FORMS, "the same prompt twice", {"prompt": [ids(40, 10), ids(40, 10)]},
               alone=SEVERAL),
    completion(FORMS, "several prompts, two answers each",
               {"prompt": [text(40, 11), text(41, 12)], "n": 2, "temperature": 1, "seed": 5},
               alone=SEVERAL),
    completion(FORMS, "special tokens in a text",
               {"prompt": "<|im_start|>user\nhi 1<|im_end|>\n<|im_start|>assistant\n"}),
    completion(FORMS, "add_special_tokens false", {"add_special_tokens": False}),
    completion(FORMS, "characters of several bytes", {"prompt": "Grüße, 你好, 😀! " * 5}),
    completion(FORMS, "an empty text", {"prompt": ""}, alone="empty prompt", status=400),
    completion(FORMS, "no tokens", {"prompt": []}, alone="empty prompt", status=400),
    completion(FORMS, "a list with an empty text", {"prompt": [""]}, alone=SEVERAL, status=400),
    completion(FORMS, "a list without tokens", {"prompt": [[]]}, alone=SEVERAL, status=400),
    completion(FORMS, "a text and an empty one", {"prompt": [text(9, 13), ""]}, alone=SEVERAL,
               status=400),
    completion(FORMS, "a token outside the vocabulary", {"prompt": [5, 99_999]}, status=400),
    completion(FORMS, "a negative token", {"prompt": [5, -1]}, status=400),
    completion(FORMS, "prompt_embeds that are none", {"prompt": ABSENT, "prompt_embeds": "AAAA"},
               alone="prompt_embeds", status=400),
    *both(FORMS, "truncate_prompt_tokens", {"truncate_prompt_tokens": 20},
          alone="truncate_prompt_tokens"),
    *both(FORMS, "truncate_prompt_tokens -1, from the right",
          {"truncate_prompt_tokens": -1, "truncation_side": "right"},
          alone="truncate_prompt_tokens"),
    *both(FORMS, "truncate_prompt_tokens -2", {"truncate_prompt_tokens": -2},
          alone="truncate_prompt_tokens", status=400),
    *(completion(LENGTHS, f"{length} tokens", {"prompt": ids(length, 100 + length)})
      for length in EDGES),
    completion(LENGTHS, "as many as fit with one token more",
               {"prompt": ids(MAX_LENGTH - 1, 20), "max_tokens": 1}),
    completion(LENGTHS, "the limit cuts the answer", {"prompt": ids(MAX_LENGTH - 3, 21),
                                                       "max_tokens": 3}),
    completion(LENGTHS, "less room than is asked for", {"prompt": ids(MAX_LENGTH - 3, 22)}),
    completion(LENGTHS, "exactly the model's length", {"prompt": ids(MAX_LENGTH, 23)}, status=400),
    completion(LENGTHS, "too long, as token ids", {"prompt": ids(MAX_LENGTH + 900, 24)},
               status=400),
    completion(LENGTHS, "too long, as text", {"prompt": text(MAX_LENGTH + 900, 25)}, status=400),
    Row(LENGTHS, "a long chat", CHAT, {"messages": history(20, 1)}),
    Row(LENGTHS, "too long a chat", CHAT, {"messages": history(60, 2)}, status=400),
    *both(CHOICES, "n 2, a seed", {"n": 2, "temperature": 1, "seed": 20}, alone="n"),
    *both(CHOICES, "n 2, greedy", {"n": 2}, alone="n", status=400),
    *both(CHOICES, "n 3, a seed", {"n": 3, "temperature": 1, "seed": 21}, alone="n"),
    *both(CHOICES, "n 4, lengths differ",
          {"n": 4, "temperature": 1, "seed": 22, "stop": ["a", "e", "t"], "max_tokens": 30},
          alone="n"),
    *both(CHOICES, "n 2 and usage", {"n": 2, "temperature": 1, "seed": 23, **COUNTED}, alone="n",
          forms=STREAMED),
    *both(CHOICES, "n 1", {"n": 1}),
    *both(CHOICES, "best_of 2", {"best_of": 2}, alone="best_of"),
    *both(CHOICES, "n 0", {"n": 0}, alone="n", status=400),
    *both(CHOICES, "n as text", {"n": "2", "temperature": 1, "seed": 24}, alone="n"),
    *both(CHOICES, "n is no number", {"n": "many"}, alone="n", status=400),
    *(completion(LOGPROBS, f"logprobs {count}", {"logprobs": count})
      for count in (0, 1, 5, 20)),
    completion(LOGPROBS, "logprobs above the engine's limit", {"logprobs": 21}, status=400),
    completion(LOGPROBS, "logprobs -5", {"logprobs": -5}, status=400),
    completion(LOGPROBS, "logprobs is text", {"logprobs": "x"}, status=400),
    completion(LOGPROBS, "logprobs and a seed", {"logprobs": 3, "temperature": 1, "seed": 31}),
    completion(LOGPROBS, "logprobs and a stop string", {"logprobs": 2, "stop": ["e", "a"],
                                                        "max_tokens": 40}),
    completion(LOGPROBS, "logprobs and n", {"logprobs": 1, "n": 2, "temperature": 1, "seed": 32},
               alone="n"),
    completion(LOGPROBS, "return_tokens_as_token_ids",
               {"logprobs": 2, "return_tokens_as_token_ids": True}),
    completion(LOGPROBS, "logprob_token_ids", {"logprobs": 1, "logprob_token_ids": [65, 66]},
               by_itself=True),
    completion(LOGPROBS, "echo", {"echo": True}, alone="echo"),
    completion(LOGPROBS, "echo and logprobs", {"echo": True, "logprobs": 2}, alone="echo",
               scores_prompt=True),
    completion(LOGPROBS, "echo, nothing generated", {"echo": True, "max_tokens": 0}, alone="echo"),
    completion(LOGPROBS, "echo and logprobs, nothing generated",
               {"echo": True, "max_tokens": 0, "logprobs": 1}, alone="echo", scores_prompt=True),
    completion(LOGPROBS, "echo of token ids", {"echo": True, "prompt": ids(40, 26)}, alone="echo"),
    *both(LOGPROBS, "prompt_logprobs 0", {"prompt_logprobs": 0}, alone="prompt_logprobs",
          scores_prompt=True),
    completion(LOGPROBS, "prompt_logprobs 1", {"prompt_logprobs": 1}, alone="prompt_logprobs",
               streamed_status=400, scores_prompt=True),
    *both(LOGPROBS, "prompt_logprobs 5", {"prompt_logprobs": 5}, alone="prompt_logprobs",
          streamed_status=400, scores_prompt=True),
    completion(LOGPROBS, "prompt_logprobs above the engine's limit", {"prompt_logprobs": 999},
               alone="prompt_logprobs", status=400, scores_prompt=True),
    *(Row(LOGPROBS, f"top_logprobs {count}", CHAT, {"logprobs": True, "top_logprobs": count})
      for count in (0, 1, 5)),
    Row(LOGPROBS, "logprobs without top_logprobs", CHAT, {"logprobs": True}),
    Row(LOGPROBS, "top_logprobs without logprobs", CHAT, {"top_logprobs": 2}, status=400),
    Row(LOGPROBS, "top_logprobs above the engine's limit", CHAT,
        {"logprobs": True, "top_logprobs": 21}, status=400),
    Row(LOGPROBS, "echo", CHAT, {"echo": True}, alone="echo", scores_prompt=True),
    *both(LOGPROBS, "return_token_ids", {"return_token_ids": True}),
    Row(LOGPROBS, "return_prompt_text", CHAT, {"return_prompt_text": True}),
    *both(USAGE, "stream_options absent", {}, forms=STREAMED),
    *both(USAGE, "stream_options null", {"stream_options": None}, forms=STREAMED),
    *both(USAGE, "stream_options {}", {"stream_options": {}}, forms=STREAMED),
    *both(USAGE, "include_usage true, twice", COUNTED, forms=("streamed", "streamed")),
    *both(USAGE, "include_usage false", {"stream_options": {"include_usage": False}},
          forms=STREAMED),
    *both(USAGE, "include_usage true, one token", {**COUNTED, "max_tokens": 1}, forms=STREAMED),
    *both(USAGE, "continuous_usage_stats",
          {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
          forms=STREAMED),
    *both(USAGE, "continuous_usage_stats alone",
          {"stream_options": {"continuous_usage_stats": True}}, forms=STREAMED),
    *both(USAGE, "not streamed, three times", {}, forms=("whole", "whole", "whole")),
    *both(USAGE, "one token, twice", {"max_tokens": 1}, forms=("whole", "whole")),
    *both(USAGE, "stream_options without a stream", COUNTED, forms=WHOLE, status=400),
    *both(USAGE, "stream_options is text", {"stream_options": "x"}, forms=STREAMED, status=400),
    *both(USAGE, "stream null", {"stream": None}, forms=WHOLE),
    *both(USAGE, "stream_interval", {"stream_interval": 3}, forms=STREAMED),
    chat("a system message", {"messages": [{"role": "system", "content": text(30, 40)},
                                           {"role": "user", "content": text(30, 41)}]}),
    chat("content in parts", {"messages": [
        {"role": "user", "content": [{"type": "text", "text": text(30, 42)},
                                     {"type": "text", "text": text(9, 43)}]}]}),
    chat("an empty content", {"messages": [{"role": "user", "content": ""}]}),
    chat("a content of null", {"messages": [{"role": "assistant", "content": None},
                                            {"role": "user", "content": text(30, 44)}]}),
    chat("a name", {"messages": [{"role": "user", "name": "a", "content": text(30, 45)}]}),
    chat("an unknown role", {"messages": [{"role": "judge", "content": text(30, 46)}]}),
    chat("continue_final_message", {
        "messages": [*history(2, 3), {"role": "assistant", "content": text(12, 47)}],
        "add_generation_prompt": False, "continue_final_message": True}),
    chat("continue_final_message and add_generation_prompt",
         {"continue_final_message": True, "add_generation_prompt": True}, status=400),
    chat("add_generation_prompt false", {"add_generation_prompt": False}),
    chat("chat_template_kwargs", {"chat_template_kwargs": {"tools": None, "x": 1}}),
    chat("a chat_template of one's own", {"chat_template": "{{ messages[0]['content'] }}"},
         status=400),
    chat("documents", {"documents": [{"title": "a", "text": "b"}]}),
    chat("a picture", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
         alone="multimodal", status=400),
    chat("no messages", {"messages": []}, alone="messages", status=400),
    chat("a message without a role", {"messages": [{"content": "x"}]}, status=400),
    chat("a message with a number as content", {"messages": [{"role": "user", "content": 7}]},
         status=400),
]  # fmt: skip

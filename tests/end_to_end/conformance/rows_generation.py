"""Rows about the answer: its length, its end, and how its tokens are chosen."""

from __future__ import annotations

from end_to_end.conformance.row import ABSENT, CHAT, COMPLETIONS, STREAMED, WHOLE, Row, both

LENGTH, STOP, SAMPLING = "length of the answer", "where it stops", "sampling"
PRINTABLE = list(range(0x20, 0x7F))
SAID = {"structured_outputs": {"choice": ["one two three"]}, "max_tokens": 20}
"""An answer that is known beforehand."""


def stops(name: str, **fields: object) -> list[Row]:
    """Both endpoints, with an answer that would be ``one two three``."""
    return both(STOP, name, {**SAID, **fields})


ROWS = [
    *both(LENGTH, "max_tokens 0", {"max_tokens": 0}, alone="max_tokens", status=400),
    *both(LENGTH, "max_tokens 1", {"max_tokens": 1}),
    *both(LENGTH, "max_tokens 2", {"max_tokens": 2}),
    *both(LENGTH, "max_tokens 3", {"max_tokens": 3}),
    *both(LENGTH, "max_tokens 40", {"max_tokens": 40}),
    Row(LENGTH, "max_tokens absent", COMPLETIONS, {"max_tokens": ABSENT}),
    Row(LENGTH, "max_tokens null", COMPLETIONS, {"max_tokens": None}),
    *both(LENGTH, "max_tokens beyond the model's length", {"max_tokens": 5000}, status=400),
    *both(LENGTH, "max_tokens -1", {"max_tokens": -1}, alone="max_tokens", status=400),
    *(Row(LENGTH, f"max_completion_tokens {limit}", CHAT,
          {"max_tokens": ABSENT, "max_completion_tokens": limit}) for limit in (1, 3)),
    Row(LENGTH, "both limits", CHAT, {"max_tokens": 9, "max_completion_tokens": 4}),
    Row(LENGTH, "max_completion_tokens is unknown here", COMPLETIONS, {"max_completion_tokens": 3}),
    *both(LENGTH, "min_tokens 5, all tokens stop", {"min_tokens": 5, "stop_token_ids": PRINTABLE}),
    *both(LENGTH, "min_tokens 100 of 120", {"min_tokens": 100, "max_tokens": 120, "stop": ["e"]}),
    *both(LENGTH, "min_tokens above max_tokens", {"min_tokens": 9}, status=400),
    *both(LENGTH, "min_tokens -1", {"min_tokens": -1}, status=400),
    *both(LENGTH, "ignore_eos", {"ignore_eos": True, "logit_bias": {"257": 100}}),
    *both(LENGTH, "the end of sequence comes first", {"logit_bias": {"257": 100}}),
    *both(LENGTH, "min_tokens before the end of sequence",
          {"logit_bias": {"257": 100}, "min_tokens": 3}),
    *stops("a stop string", stop=["two"]),
    *stops("a stop string alone, not in a list", stop="two"),
    *stops("a stop string at the first token", stop=["o"]),
    *stops("a stop string over the first tokens", stop=["on"]),
    *stops("a stop string at the end", stop=["three"]),
    *stops("the first of several stop strings", stop=["three", "two", "wo t"]),
    *stops("a stop string that does not come", stop=["four"]),
    *stops("include_stop_str_in_output", stop=["two"], include_stop_str_in_output=True),
    *both(STOP, "the first token stops", {"stop_token_ids": PRINTABLE}),
    *both(STOP, "half of all tokens stop", {"stop_token_ids": PRINTABLE[::2], "max_tokens": 30}),
    *both(STOP, "a stop token that is shown", {"stop_token_ids": PRINTABLE[::3], "max_tokens": 30,
                                               "include_stop_str_in_output": True}),
    *both(STOP, "stop strings, not constrained", {"stop": ["a", "e", "i", "o"], "max_tokens": 40}),
    *both(STOP, "stop null", {"stop": None}),
    *both(STOP, "an empty stop string", {"stop": [""]}, status=400),
    *both(STOP, "stop is no list", {"stop": {"a": 1}}, status=400),
    *both(STOP, "stop holds numbers", {"stop": [1]}, status=400),
    *both(STOP, "stop_token_ids is no list", {"stop_token_ids": "x"}, status=400),
    *both(SAMPLING, "greedy", {"temperature": 0}),
    *both(SAMPLING, "top_k 1", {"temperature": 1, "top_k": 1}),
    *both(SAMPLING, "a seed", {"temperature": 0.8, "seed": 1234, "max_tokens": 16}),
    *both(SAMPLING, "a seed at the default temperature", {"temperature": ABSENT, "seed": 7}),
    *both(SAMPLING, "a seed and a high temperature", {"temperature": 2, "seed": -5}),
    *both(SAMPLING, "a seed and top_p", {"temperature": 1, "top_p": 0.5, "seed": 11}),
    *both(SAMPLING, "a seed and top_k", {"temperature": 1, "top_k": 5, "seed": 12}),
    *both(SAMPLING, "a seed and min_p", {"temperature": 1, "min_p": 0.2, "seed": 13}),
    *both(SAMPLING, "presence_penalty", {"presence_penalty": 1.9, "max_tokens": 24}),
    *both(SAMPLING, "negative presence_penalty", {"presence_penalty": -1.9, "max_tokens": 24}),
    *both(SAMPLING, "frequency_penalty", {"frequency_penalty": 1.5, "max_tokens": 24}),
    *both(SAMPLING, "repetition_penalty", {"repetition_penalty": 1.5, "max_tokens": 24}),
    *both(SAMPLING, "all penalties and a seed", {
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "temperature": 1, "seed": 3, "max_tokens": 24,
    }),
    *both(SAMPLING, "logit_bias", {"logit_bias": {"65": 5, "66": -100, "67": 4.5}}),
    *both(SAMPLING, "logit_bias outside the vocabulary", {"logit_bias": {"99999": 1}}, status=400),
    *both(SAMPLING, "bad_words", {"bad_words": ["a", "e", "he"], "max_tokens": 30}),
    *both(SAMPLING, "allowed_token_ids", {"allowed_token_ids": [65, 66, 67], "max_tokens": 12}),
    *both(SAMPLING, "allowed_token_ids, none", {"allowed_token_ids": []}, status=400),
    *both(SAMPLING, "temperature -1", {"temperature": -1}, status=400),
    *both(SAMPLING, "temperature is text", {"temperature": "hot"}, status=400),
    *both(SAMPLING, "temperature is a number as text", {"temperature": "0"}),
    *both(SAMPLING, "top_p 2", {"top_p": 2}, status=400),
    *both(SAMPLING, "top_k -2", {"top_k": -2}, status=400),
    *both(SAMPLING, "frequency_penalty 9", {"frequency_penalty": 9}, status=400),
    *both(SAMPLING, "a seed of 71 bits", {"seed": 2**70}, status=400),
    *both(SAMPLING, "beam search", {"use_beam_search": True, "n": 2, "temperature": 1}, alone="n",
          forms=WHOLE),
    Row(SAMPLING, "beam search, streamed", COMPLETIONS, {"use_beam_search": True, "n": 2},
        alone="n", forms=STREAMED, status=400),
    Row(SAMPLING, "beam search, streamed", CHAT,
        {"use_beam_search": True, "n": 2, "temperature": 1}, alone="n", forms=STREAMED),
    *both(SAMPLING, "beam search, one answer", {"use_beam_search": True, "n": 1},
          alone="use_beam_search", forms=WHOLE),
]  # fmt: skip

"""Marks of a request's prompt (``kv_transfer/prefix_marks.py``), made from the bytes that the
client sent; no tokenizer, one pass.

The *canonical bytes* of a completion are its text, or its token ids as four bytes each; of a chat,
what shapes the template (tools and the like) and then the messages, so that a conversation that
goes on has the earlier one as its beginning.

They are hashed with XXH3 under a secret seed that follows from the cluster secret, the salt and the
model: tenants share no mark, and nobody who does not know the seed can make one or aim at one. A
cryptographic hash would cost four times as much, of which a router under load feels each
microsecond, and buy nothing: whoever made two prompts share a mark would have their own requests
sent to the wrong node.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, NamedTuple

import orjson
from xxhash import xxh3_64

from splitserve.kv_transfer.channel import mac
from splitserve.kv_transfer.prefix_marks import MARK_OFFSETS
from splitserve.orchestrator.router.endpoints import CHAT, COMPLETIONS, MESSAGES, RESPONSES

SEEDS_LIMIT = 1_024
"""Seeds of salts that are kept; beyond that they are derived again."""

SEED_BYTES = 8

_PIECES: Final = tuple(slice(*ends) for ends in pairwise((0, *MARK_OFFSETS)))
"""What lies between two marks."""

_CONVERSATIONS: Final = {
    CHAT: (
        "messages",
        (
            "tools",
            "documents",
            "chat_template",
            "chat_template_kwargs",
            "reasoning_effort",
            "add_special_tokens",
        ),
    ),
    MESSAGES: ("messages", ("system", "tools", "thinking", "output_config")),
    RESPONSES: ("input", ("instructions", "tools", "reasoning", "chat_template_kwargs")),
}
"""Where a conversation lies, and the fields beside it that a template may see, in the order in
which they are hashed.
"""
_NO_MARKS_FOR: Final = frozenset(
    {
        "multimodal",
        "several prompts",
        "truncate_prompt_tokens",
        "input",
        "messages",
        "previous_response_id",
        "previous_input_messages",
        "prompt",
        "truncation",
        "model",
    }
)
"""Reasons not to split a request that also part its tokens from its bytes, or leave nothing to be
read.
"""


class Marks(NamedTuple):
    """Marks of one prompt."""

    digests: tuple[bytes, ...] = ()
    """From the first mark on; empty when the prompt is shorter than that."""
    joined: bytes = b""
    """The same in one piece, as legs carry them."""
    prompt_bytes: int = 0


NO_MARKS = Marks()


class PromptMarks:
    """Makes marks for one cluster."""

    def __init__(self, secret: bytes) -> None:
        self._secret = mac(secret, "prompt marks")
        self._seeds: dict[tuple[str, str, str], int] = {}

    def of(self, endpoint: str, fields: dict[str, Any], alone_because: str, salt: str) -> Marks:
        """The marks of that request's prompt; none for a prompt that is not one text, one list of
        tokens or one conversation of text.
        """
        if alone_because in _NO_MARKS_FOR:
            return NO_MARKS
        is_prompt = endpoint == COMPLETIONS
        found = _prompt_bytes(fields) if is_prompt else _conversation_bytes(endpoint, fields)
        if found is None:
            return NO_MARKS
        kind, data = found
        size = len(data)
        if size < MARK_OFFSETS[0]:
            return NO_MARKS
        hasher = xxh3_64(seed=self._seed(kind, salt, fields.get("model") or ""))
        update, digest = hasher.update, hasher.digest
        view, digests = memoryview(data), []
        for piece in _PIECES[: bisect_right(MARK_OFFSETS, size)]:
            update(view[piece])
            digests.append(digest())
        return Marks(tuple(digests), b"".join(digests), size)

    def _seed(self, kind: str, salt: str, model: str) -> int:
        name = (kind, salt, model)
        seed = self._seeds.get(name)
        if seed is None:
            if len(self._seeds) >= SEEDS_LIMIT:
                self._seeds.clear()
            derived = blake2b(orjson.dumps(name), key=self._secret, digest_size=SEED_BYTES)
            seed = self._seeds[name] = int.from_bytes(derived.digest(), "little")
        return seed


def _conversation_bytes(endpoint: str, fields: dict[str, Any]) -> tuple[str, bytes] | None:
    place, shaping = _CONVERSATIONS[endpoint]
    messages = orjson.dumps(fields[place], option=orjson.OPT_SORT_KEYS)
    shape = {name: fields[name] for name in shaping if fields.get(name) is not None}
    head = orjson.dumps(shape, option=orjson.OPT_SORT_KEYS) if shape else b""
    # Without the closing bracket: where this conversation ends, the next turn's goes on
    return endpoint, head + messages[:-1]


def _prompt_bytes(fields: dict[str, Any]) -> tuple[str, bytes] | None:
    prompt = fields.get("prompt")
    if type(prompt) is list and prompt and type(prompt[0]) is not int:
        prompt = prompt[0]
    if type(prompt) is str:
        kind = "bare text" if fields.get("add_special_tokens") is False else "text"
        return kind, prompt.encode()
    if type(prompt) is not list:
        return None
    try:
        ids = array("I", prompt)
    except OverflowError:  # No token: the engine will say so
        return None
    if sys.byteorder == "big":
        ids.byteswap()
    return "ids", ids.tobytes()

"""Marks of a request's prompt (``kv_transfer/prefix_marks.py``), made from the bytes that the
client sent; no tokenizer, one pass.

The *canonical bytes* of a completion are its text, or its token ids as four bytes each; of a chat,
what shapes the template (tools and the like) and then the messages, so that a conversation that
goes on has the earlier one as its beginning. They are hashed under a key that follows from the
cluster secret, the salt and the model: tenants share no mark, and nobody can make one without the
secret.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import orjson
from blake3 import blake3

from splitserve.kv_transfer.channel import mac
from splitserve.kv_transfer.prefix_marks import MARK_BYTES, MARK_OFFSETS
from splitserve.orchestrator.router.client_request import CHAT

KEYS_LIMIT = 1_024
"""Keys of salts that are kept; beyond that they are derived again."""

_SHAPES_A_CHAT: Final = (
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_special_tokens",
)
"""Fields beside the messages that a template may see, in the order in which they are hashed."""
_NO_MARKS_FOR: Final = frozenset({"multimodal", "several prompts", "truncate_prompt_tokens"})
"""Reasons not to split a request that also part its tokens from its bytes."""


class Marks(NamedTuple):
    """Marks of one prompt."""

    digests: bytes = b""
    """``MARK_BYTES`` each, from the first; empty when the prompt is shorter than the first."""
    prompt_bytes: int = 0


NO_MARKS = Marks()


class PromptMarks:
    """Makes marks for one cluster."""

    def __init__(self, secret: bytes) -> None:
        self._secret = mac(secret, "prompt marks")
        self._keys: dict[tuple[str, str, str], bytes] = {}

    def of(self, endpoint: str, fields: dict[str, Any], alone_because: str, salt: str) -> Marks:
        """The marks of that request's prompt; none for a prompt that is not one text, one list of
        tokens or one conversation of text.
        """
        if alone_because in _NO_MARKS_FOR:
            return NO_MARKS
        found = _chat_bytes(fields) if endpoint == CHAT else _prompt_bytes(fields)
        if found is None:
            return NO_MARKS
        kind, data = found
        size = len(data)
        if size < MARK_OFFSETS[0]:
            return NO_MARKS
        hasher = blake3(key=self._key(kind, salt, fields.get("model") or ""))
        update, digest = hasher.update, hasher.digest
        view, start, digests = memoryview(data), 0, []
        for end in MARK_OFFSETS:
            if end > size:
                break
            update(view[start:end])
            digests.append(digest(MARK_BYTES))
            start = end
        return Marks(b"".join(digests), size)

    def _key(self, kind: str, salt: str, model: str) -> bytes:
        name = (kind, salt, model)
        key = self._keys.get(name)
        if key is None:
            if len(self._keys) >= KEYS_LIMIT:
                self._keys.clear()
            key = blake2b(orjson.dumps(name), key=self._secret, digest_size=32).digest()
            self._keys[name] = key
        return key


def _chat_bytes(fields: dict[str, Any]) -> tuple[str, bytes] | None:
    messages = orjson.dumps(fields["messages"], option=orjson.OPT_SORT_KEYS)
    shape = {name: fields[name] for name in _SHAPES_A_CHAT if fields.get(name) is not None}
    head = orjson.dumps(shape, option=orjson.OPT_SORT_KEYS) if shape else b""
    # Without the closing bracket: where this conversation ends, the next turn's goes on
    return CHAT, head + messages[:-1]


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

"""The mock engine's tokenizer: one token per byte, and a chat template of one line per message.

Token ids 0 to 255 are bytes; ``END`` ends an answer and has no text. Prompts of ids may use the
whole vocabulary. An answer's tokens are printable ASCII, so an answer that is sent back as a prompt
gives the same ids again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VOCABULARY = 512
END = 256
PRINTABLE = range(0x20, 0x7F)


class PromptError(ValueError):
    """A prompt that cannot be tokenised; the message is for the client."""


def encode(text: str) -> list[int]:
    """One id per UTF-8 byte."""
    return list(text.encode())


def decode(token_ids: Iterable[int]) -> str:
    """The text of an answer's tokens."""
    return bytes(token for token in token_ids if token < END).decode("utf-8", "replace")


def chat_prompt(messages: Sequence[Any], tools: Any = None) -> str:
    """The text of a conversation, ready for the assistant's answer. Raises ``PromptError``."""
    if not messages:
        raise PromptError("'messages' must not be empty")
    lines = [f"<tools>{tools!r}\n"] if tools else []
    lines += [f"<{role}>{text}\n" for role, text in map(_message, messages)]
    return "".join([*lines, "<assistant>"])


def _message(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError("each message needs a 'role'")
    content = message.get("content") or ""
    if isinstance(content, str):
        return message["role"], content
    if not isinstance(content, list):
        raise PromptError("'content' must be a string or a list of parts")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise PromptError("this model takes text only")
        parts.append(str(part.get("text", "")))
    return message["role"], "".join(parts)

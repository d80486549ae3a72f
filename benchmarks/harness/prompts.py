"""Prompts as token ids: random ones for timing, English ones for equality. The same seed gives the
same prompt everywhere.
"""

from __future__ import annotations

import pydoc_data.topics
import random

FIRST_PLAIN_ID = 100
"""Below this the vocabulary holds special tokens."""
LAST_PLAIN_ID = 48_000


def random_prompt(length: int, *seed: object) -> list[int]:
    """``length`` token ids that no other seed shares a block with."""
    source = random.Random("/".join(map(str, seed)))
    return [source.randint(FIRST_PLAIN_ID, LAST_PLAIN_ID) for _ in range(length)]


def english_text() -> str:
    """About 700,000 characters of English prose: the language reference that Python's ``help``
    carries.
    """
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))

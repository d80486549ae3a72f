"""Marks: places in the bytes of a prompt by which router, engines and caches speak of a beginning
without its text.

A mark is a hash under a secret seed over all bytes before a fixed place. The places are the same
for every prompt (``MARK_OFFSETS``), so two prompts that begin alike have the same first marks. The
router makes them (``orchestrator/router/prompt_marks.py``), legs carry them, and an engine, which
alone knows the tokens, says where in its tokens each lies. That is an estimate: it takes tokens to
be spread evenly over the bytes. Nothing but the choice of a node may depend on it.
"""

from __future__ import annotations

MARK_BYTES = 8
"""Of one digest. Two that are equal by chance cost a wrong guess of where a prefix lies."""
SPACING_BYTES = 512
EVEN_MARKS = 256
DOUBLING_MARKS = 64
MARKS_LIMIT = 512


def _offsets() -> tuple[int, ...]:
    found = [SPACING_BYTES * (n + 1) for n in range(EVEN_MARKS)]
    spacing = SPACING_BYTES
    while len(found) < MARKS_LIMIT:
        if (len(found) - EVEN_MARKS) % DOUBLING_MARKS == 0:
            spacing *= 2
        found.append(found[-1] + spacing)
    return tuple(found)


MARK_OFFSETS = _offsets()
"""Bytes before each mark: every 512 up to 128 KiB, then with a spacing that doubles after each 64;
what lies behind the last, at about 1 MiB, has no mark.
"""


def split_digests(digests: bytes) -> list[bytes]:
    """Concatenated digests one by one."""
    return [digests[at : at + MARK_BYTES] for at in range(0, len(digests), MARK_BYTES)]


def tokens_at(mark: int, prompt_bytes: int, prompt_tokens: int) -> int:
    """Tokens before the mark of that number, in a prompt of so many bytes and tokens."""
    return MARK_OFFSETS[mark] * prompt_tokens // prompt_bytes


def mark_positions(
    digests: bytes, prompt_bytes: int, prompt_tokens: int
) -> tuple[tuple[bytes, int], ...]:
    """(digest, tokens before it) of each mark of a prompt, from the first; nothing for a length
    that does not fit the marks.
    """
    marks = split_digests(digests)
    if not marks or len(marks) > MARKS_LIMIT or prompt_bytes < MARK_OFFSETS[len(marks) - 1]:
        return ()
    return tuple(
        (digest, tokens_at(number, prompt_bytes, prompt_tokens))
        for number, digest in enumerate(marks)
    )

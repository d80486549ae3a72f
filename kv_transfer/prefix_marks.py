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
"""Between the first marks."""
SPACING_SHARE = 8
"""Further on the spacing grows: it is at most this part of what lies before."""
REACH_BYTES = 4 * 1024 * 1024
"""What lies behind has no mark."""


def _offsets() -> tuple[int, ...]:
    found, at = [], 0
    while at < REACH_BYTES:
        share = at // SPACING_SHARE
        at += max(SPACING_BYTES, 1 << share.bit_length() >> 1)
        found.append(at)
    return tuple(found)


MARK_OFFSETS = _offsets()
"""Bytes before each mark: every 512 up to 8 KiB, every 1,024 up to 16 KiB, and so on."""
MARKS_LIMIT = len(MARK_OFFSETS)


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

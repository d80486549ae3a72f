"""What to ask of running engines so that a profile can be fitted to their answers.

Lengths are spread evenly in their logarithm up to the model's limit. Prompts that just fill a
number of steps, and such that need one step more, tell a step's own time from that of a request;
where no prompt can be so long, several that fill a step each are sent together. A few of middling
size are made twice in a round where nodes share a host: the second time while another node of the
host computes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from splitserve.orchestrator.tuner.profile import EngineLimits

SHORTEST_TOKENS = 16
PROMPT_LENGTHS = 6
TOGETHER_LIMIT = 3
FULL_STEP = 0.7
"""Of a step's tokens: prompts this long cannot share a step, whichever of them comes first."""
STREAMS_LIMIT = 16
STREAM_TOKENS = 24
"""Of an answer whose gaps are measured."""
PREFILL_BESIDE, DECODE_BESIDE = (0.25, 0.5, 0.75), (0.0, 0.34, 0.67)
"""Which probes are made beside a busy neighbour too, as places in the order of their size: one
stream is what a node decodes most often.
"""
SPLIT_PARTS = (0.15, 0.3, 0.6)
"""Of the longest prompt: what is split to see what sending takes of the computing."""
COMPANION_PART = 8
"""What keeps a neighbour busy are streams behind prompts of the longest length by this."""
POOL_SHARE = 0.5
"""Of an engine's KV blocks that probes may take."""


@dataclass(frozen=True, order=True)
class PrefillProbe:
    """``prompts`` at a time, each of ``new`` tokens behind ``cached`` ones: until all have their
    first token.
    """

    new: int
    cached: int = 0
    prompts: int = 1

    @property
    def computed_tokens(self) -> int:
        """What the engine computes for it at most, with what has to be in its cache before."""
        return self.cached + self.new * self.prompts


@dataclass(frozen=True, order=True)
class DecodeProbe:
    """``streams`` at a time behind prompts of ``context`` tokens: the gaps between tokens."""

    streams: int
    context: int

    @property
    def mean_context(self) -> int:
        """Tokens of all streams together, half way through their answers."""
        return self.streams * (self.context + STREAM_TOKENS // 2)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine computes for it at most."""
        return self.streams * self.context


@dataclass(frozen=True, order=True)
class TransferProbe:
    """A prompt of so many tokens, which the prefill node has in its cache and the decode node has
    not: until the first token.
    """

    tokens: int

    @property
    def computed_tokens(self) -> int:
        """What the engine computes for it at most."""
        return self.tokens


@dataclass(frozen=True, order=True)
class SplitProbe:
    """Two prompts of so many tokens that no node has: one alone on the prefill node, then one that
    goes on to the decode node: until each has its first token.
    """

    tokens: int

    @property
    def computed_tokens(self) -> int:
        """What the engine computes for one of them."""
        return self.tokens


Probe = PrefillProbe | DecodeProbe | TransferProbe | SplitProbe
Measured = TypeVar("Measured", PrefillProbe, DecodeProbe)


def within(probe: Probe, limit_tokens: float, block_tokens: int) -> Probe | None:
    """The probe, or one like it of which an engine computes at most so many prompt tokens; None
    when there is none.
    """
    if probe.computed_tokens <= limit_tokens:
        return probe
    limit = int(limit_tokens)
    if isinstance(probe, DecodeProbe):
        context = limit // probe.streams
        return DecodeProbe(probe.streams, context) if context else None
    if isinstance(probe, SplitProbe):
        return SplitProbe(limit) if limit else None
    if isinstance(probe, TransferProbe):
        blocks = (limit - 1) // block_tokens
        return TransferProbe(blocks * block_tokens + 1) if blocks > 0 else None
    if probe.prompts > 1:
        return None
    if not probe.cached:
        return PrefillProbe(limit) if limit else None
    cached = (limit - probe.new) // block_tokens * block_tokens
    return PrefillProbe(probe.new, cached) if cached > 0 else None


@dataclass(frozen=True)
class Plan:
    """One round of probes, each kind in the order of its size."""

    prefill: tuple[PrefillProbe, ...]
    decode: tuple[DecodeProbe, ...]
    transfer: tuple[TransferProbe, ...]
    split: tuple[SplitProbe, ...] = ()
    beside: frozenset[PrefillProbe | DecodeProbe] = frozenset()
    """Of those, what is made once more while a node of the same host computes."""
    companion_tokens: int = SHORTEST_TOKENS
    """Of the prompts that keep it busy."""

    @property
    def size(self) -> int:
        """Number of probes, each counted once."""
        return len(self.prefill) + len(self.decode) + len(self.transfer) + len(self.split)


def plan_probes(limits: EngineLimits, *, has_prefix_cache: bool) -> Plan:
    """One round for engines with those limits. Without a prefix cache no probe has cached tokens;
    the times of transfers then contain the computing, and nothing else is split.
    """
    capacity = int(limits.total_blocks * limits.block_tokens * POOL_SHARE)
    longest = max(2, min(limits.max_model_len - STREAM_TOKENS - 2, capacity))
    prefill = [PrefillProbe(new) for new in _spread(min(SHORTEST_TOKENS, longest), longest)]
    full = min(limits.step_tokens, longest)
    border = [limits.step_tokens * steps for steps in (1, 2)]
    for new in (*border, *(full + SHORTEST_TOKENS for full in border)):
        prefill += [PrefillProbe(new)] if new <= longest else []
    if longest < 2 * limits.step_tokens and full >= FULL_STEP * limits.step_tokens:
        most = min(TOGETHER_LIMIT, capacity // full, limits.sequences)
        prefill += [PrefillProbe(full, prompts=count) for count in range(2, most + 1)]
    if has_prefix_cache:
        prefill += _behind_cached(limits, longest)
    decode = sorted(set(_decode(limits, longest, capacity)), key=lambda p: p.computed_tokens)
    plain = sorted(probe for probe in set(prefill) if probe.prompts == 1 and not probe.cached)
    return Plan(
        tuple(sorted(set(prefill), key=lambda probe: probe.computed_tokens)),
        tuple(decode),
        tuple(map(TransferProbe, _transfer_lengths(limits, longest))),
        tuple(map(SplitProbe, _split_lengths(longest))) if has_prefix_cache else (),
        frozenset((*_at(plain, PREFILL_BESIDE), *_at(decode, DECODE_BESIDE))),
        max(1, longest // COMPANION_PART),
    )


def _at(probes: list[Measured], parts: tuple[float, ...]) -> list[Measured]:
    """Those that stand at these parts of the way from the least to the greatest."""
    return [probes[int(part * len(probes))] for part in parts] if probes else []


def _spread(first: int, last: int, count: int = PROMPT_LENGTHS) -> list[int]:
    """Up to ``count`` lengths in a geometric row."""
    ratio = last / first
    return sorted({round(first * ratio ** (n / (count - 1))) for n in range(count)})


def _behind_cached(limits: EngineLimits, longest: int) -> list[PrefillProbe]:
    found = []
    for part, new in ((0.25, 32), (0.5, 32), (0.5, 128), (0.85, 48)):
        cached = int(longest * part) // limits.block_tokens * limits.block_tokens
        if cached and cached + new <= longest:
            found.append(PrefillProbe(new, cached))
    return found


def _decode(limits: EngineLimits, longest: int, capacity: int) -> list[DecodeProbe]:
    short = min(SHORTEST_TOKENS, longest)
    most = min(limits.sequences, STREAMS_LIMIT, max(1, capacity // (short + STREAM_TOKENS)))
    counts = [2**n for n in range(most.bit_length())]
    found = [DecodeProbe(streams, short) for streams in counts]
    found += [DecodeProbe(1, longest // 2), DecodeProbe(1, longest)]
    found += [DecodeProbe(streams, longest // 2) for streams in counts[1:3]]
    return [
        probe
        for probe in found
        if probe.streams * (probe.context + STREAM_TOKENS) <= capacity and probe.context
    ]


def _transfer_lengths(limits: EngineLimits, longest: int) -> list[int]:
    """Whole blocks and one token more: all but one block of the prompt is found in a cache."""
    block = limits.block_tokens
    blocks = [max(1, int(longest * part) // block) for part in (0.06, 0.3, 0.6, 1.0)]
    return sorted({min(count * block + 1, longest) for count in blocks})


def _split_lengths(longest: int) -> list[int]:
    return sorted({max(1, int(longest * part)) for part in SPLIT_PARTS})

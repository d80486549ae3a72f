"""A profile: how long engines of one model take for what, as a JSON file.

It is measured on running engines (``splitserve profile``) and read by the simulator, the search for
the best ratio and the controller. Times follow three small models:

* a step that computes ``new`` prompt tokens behind ``cached`` ones takes
  ``base + token * new + attention * new * (cached + new / 2)`` seconds;
* a step that samples a token for each of ``sequences`` with ``context`` tokens in all takes
  ``base + sequence * sequences + context * context`` seconds;
* a step that does both takes the sum, less the smaller of the two bases: the weights are read once;
* moving ``n`` bytes of KV takes ``latency + n / bandwidth`` seconds;
* a step over prompts for another node takes ``sending`` seconds more for each of their new tokens:
  what moving KV takes of the computing, and is not hidden behind it;
* each other node of the same host that computes meanwhile makes a step longer by ``neighbour``
  times its own time, for either kind: they share memory, caches and cores.

Pure: reading and writing files is the caller's.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

FORMAT_VERSION = 1

NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class ProfileError(ValueError):
    """A profile cannot be read, or says what cannot be; the message names the field."""


class Estimate(msgspec.Struct, frozen=True):
    """A fitted value and its 95 % band."""

    value: NotNegative
    low: NotNegative
    high: NotNegative

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a band that does not hold its value."""
        if not (self.low <= self.value <= self.high and math.isfinite(self.high)):
            raise ValueError(f"band {self.low:g} to {self.high:g} does not hold {self.value:g}")


def exactly(value: float) -> Estimate:
    """A value that is known, not measured."""
    return Estimate(value, value, value)


NOTHING = exactly(0.0)


class PrefillTime(msgspec.Struct, frozen=True):
    """Of a step over prompt tokens."""

    base_s: Estimate
    token_s: Estimate
    attention_s: Estimate
    """Per new token and token that it attends to."""
    error: NotNegative = 0.0
    """Median relative error on probes that were not fitted."""
    neighbour: Estimate = NOTHING
    """By which part of itself each busy node of the same host makes a step longer."""
    sending_s: Estimate = NOTHING
    """More per new token whose KV goes to another node; not in ``seconds``."""

    def seconds(self, new: float, cached: float) -> float:
        """A step that computes ``new`` tokens behind ``cached`` ones."""
        attended = new * (cached + new / 2)
        return self.base_s.value + self.token_s.value * new + self.attention_s.value * attended


class DecodeTime(msgspec.Struct, frozen=True):
    """Of a step that samples one token per sequence."""

    base_s: Estimate
    sequence_s: Estimate
    context_s: Estimate
    """Per token of context of any sequence."""
    error: NotNegative = 0.0
    """Median relative error on probes that were not fitted."""
    neighbour: Estimate = NOTHING
    """By which part of itself each busy node of the same host makes a step longer."""

    def seconds(self, sequences: float, context: float) -> float:
        """A step for ``sequences`` that have ``context`` tokens together."""
        per_sequence = self.sequence_s.value * sequences
        return self.base_s.value + per_sequence + self.context_s.value * context


class TransferTime(msgspec.Struct, frozen=True):
    """Of KV from one prefill node to one decode node."""

    prefill_node: str
    """Empty: any."""
    decode_node: str
    latency_s: Estimate
    """From the last computed layer to the decode engine's leave to start, for no bytes."""
    bytes_per_s: Estimate
    error: NotNegative = 0.0

    def seconds(self, size_bytes: float) -> float:
        """Until so many bytes have landed, when nothing was sent before."""
        return self.latency_s.value + size_bytes / max(self.bytes_per_s.value, 1e-9)


class EngineLimits(msgspec.Struct, frozen=True):
    """What bounds a step and a node; the engine's own settings."""

    step_tokens: Count
    """``max_num_batched_tokens``."""
    sequences: Count
    """``max_num_seqs``."""
    block_tokens: Count
    total_blocks: Count
    max_model_len: Count


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, on what."""

    version: int = FORMAT_VERSION
    model: str
    """The name clients use."""
    engine: str
    """Name and version, e.g. ``vllm 0.32.0``."""
    hardware: str
    """For people: CPU or GPU of the nodes, and how many each has."""
    fingerprint: dict[str, str] = {}
    """Of the engines; another one is another profile."""
    limits: EngineLimits
    kv_bytes_per_token: Count
    prefill: PrefillTime
    decode: DecodeTime
    transfers: tuple[TransferTime, ...]
    request_s: NotNegative = 0.0
    """Of a first token beyond steps and transfers: HTTP, tokenising, going between processes."""
    nodes_per_host: Count = 1
    """Engines that shared a machine, at most."""
    measured_unix_s: float = 0.0
    probes: int = 0
    """How many answers it was fitted to."""

    def transfer(self, prefill_node: str = "", decode_node: str = "") -> TransferTime:
        """Between these two; between any two when that pair was not measured."""
        for found in self.transfers:
            if (found.prefill_node, found.decode_node) == (prefill_node, decode_node):
                return found
        return self.transfers[0]

    def step_seconds(self, new: float, attended: float, sequences: float, context: float) -> float:
        """A step that computes ``new`` prompt tokens, which attend to ``attended`` tokens in sum,
        and samples for ``sequences`` with ``context`` tokens together. Zero when it does nothing.
        """
        prefill, decode = self.prefill, self.decode
        seconds = 0.0
        if new:
            seconds += prefill.base_s.value + prefill.token_s.value * new
            seconds += prefill.attention_s.value * attended
        if sequences:
            seconds += decode.seconds(sequences, context)
        if new and sequences:
            seconds -= min(prefill.base_s.value, decode.base_s.value)
        return seconds

    @property
    def has_neighbours(self) -> bool:
        """Whether nodes of one host are known to slow each other."""
        slowed = self.prefill.neighbour.value + self.decode.neighbour.value
        return self.nodes_per_host > 1 and slowed > 0

    def neighbour_seconds(
        self, new: float, attended: float, sequences: float, context: float
    ) -> float:
        """What each busy neighbour adds to the step of ``step_seconds``."""
        decode_s = self.decode.seconds(sequences, context) if sequences else 0.0
        prefill_s = self.step_seconds(new, attended, sequences, context) - decode_s
        slowed_s = prefill_s * self.prefill.neighbour.value
        return slowed_s + decode_s * self.decode.neighbour.value


_decoder = msgspec.json.Decoder(Profile)


def parse_profile(text: bytes, where: str) -> Profile:
    """The profile in a JSON file. Raises ``ProfileError`` that names ``where`` and the field."""
    try:
        found = _decoder.decode(text)
    except msgspec.ValidationError as error:
        raise ProfileError(f"{where}: {error}") from error
    except msgspec.DecodeError as error:
        raise ProfileError(f"{where} is no JSON: {error}") from error
    if found.version != FORMAT_VERSION:
        raise ProfileError(
            f"{where}: format version {found.version} is not known here, {FORMAT_VERSION} is;"
            " measure again with `splitserve profile`"
        )
    if not found.transfers:
        raise ProfileError(f"{where}: $.transfers is empty; one entry for any pair is needed")
    return found


def write_profile(profile: Profile) -> bytes:
    """As a JSON file for people to read."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"

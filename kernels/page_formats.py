"""How one head's slice of a KV block is ordered, as arithmetic that every kernel shares.

A *slice* is what one head holds of one block in one layer: ``block_tokens`` keys and as many
values. Engines order the numbers in it differently:

``rows``
    Token by token, each its key and then its value: ``[tokens, key_items + value_items]``. Pages of
    engines on GPUs, and of CPU engines that keep latent KV.
``vec``
    All keys with channels outermost, ``[key_items, tokens]``, then all values token by token,
    ``[tokens, value_items]``. vLLM's CPU attention for the instruction sets ``vec`` and ``vec16``.
``amx``
    Packed for the tiles of AMX: keys ``[tokens / 16, key_items / 2, 16, 2]`` (16 tokens abreast,
    channels in pairs), then values ``[value_items / 16, tokens / 2, 16, 2]`` (16 channels abreast,
    tokens in pairs). vLLM's CPU attention for ``amx``: bfloat16, and FP8 pages of bfloat16 models.

In each of them, where a number lies is a sum of steps over its token and its channel, once these
are split into groups: that is ``Placement``, and nothing else about orders is known elsewhere but
in ``reference.py``, which spells the shapes out again.
"""

from __future__ import annotations

from dataclasses import dataclass

ORDERS = ("rows", "vec", "amx")
ITEM_BYTES = (1, 2, 4)

_AMX_ABREAST = 16
_AMX_PAIR = 2


@dataclass(frozen=True)
class Placement:
    """Where the keys, or the values, of a slice lie; everything counts in numbers, not bytes.

    The number of token t and channel c lies ``t // token_group * token_group_step +
    t % token_group * token_step + c // channel_group * channel_group_step +
    c % channel_group * channel_step`` after ``first``.
    """

    first: int
    items: int
    """Channels of one token."""
    token_group_step: int
    channel_group_step: int
    token_group: int = 1
    token_step: int = 0
    channel_group: int = 1
    channel_step: int = 0

    def grouped(self, tokens: int, channels: int) -> Placement:
        """The same places, with tokens and channels in groups of these sizes.

        Sides that are in groups already keep theirs: the sizes must be equal then.
        """
        assert self.token_group in (1, tokens)
        assert self.channel_group in (1, channels)
        token_steps = (self.token_group_step, self.token_step)
        if self.token_group < tokens:
            token_steps = (self.token_group_step * tokens, self.token_group_step)
        channel_steps = (self.channel_group_step, self.channel_step)
        if self.channel_group < channels:
            channel_steps = (self.channel_group_step * channels, self.channel_group_step)
        return Placement(
            self.first,
            self.items,
            token_steps[0],
            channel_steps[0],
            tokens,
            token_steps[1],
            channels,
            channel_steps[1],
        )


@dataclass(frozen=True)
class PageFormat:
    """The order and size of one head's slice of a block."""

    block_tokens: int
    key_items: int
    """Numbers in one token's key in one head."""
    value_items: int
    """Numbers in one token's value in one head; 0 where keys and values are one (latent KV)."""
    item_bytes: int
    """One number: 1, 2 or 4."""
    order: str
    """One of ``ORDERS``."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for what cannot be: a format may come from a file."""
        if self.order not in ORDERS:
            raise ValueError(
                f"unknown order {self.order!r} of KV pages; known: {', '.join(ORDERS)}"
            )
        if self.item_bytes not in ITEM_BYTES:
            raise ValueError(f"numbers of {self.item_bytes} bytes: KV pages have 1, 2 or 4")
        if self.block_tokens < 1 or self.token_items < 1:
            raise ValueError("a block has at least one token, and a token at least one number")
        if min(self.key_items, self.value_items) < 0:
            raise ValueError("a key and a value have no negative size")
        if self.order == "amx":
            self._check_amx()

    def _check_amx(self) -> None:
        if self.item_bytes > 2:
            raise ValueError(f"order amx has numbers of 1 or 2 bytes, not {self.item_bytes}")
        if (
            self.block_tokens % _AMX_ABREAST
            or self.key_items % _AMX_PAIR
            or self.value_items % _AMX_ABREAST
        ):
            raise ValueError(
                "order amx has a multiple of 16 tokens in a block, of 2 numbers in a key and of 16 "
                f"in a value, not {self.block_tokens}, {self.key_items} and {self.value_items}"
            )

    @property
    def token_items(self) -> int:
        """Numbers of one token in one head."""
        return self.key_items + self.value_items

    @property
    def slice_items(self) -> int:
        """Numbers in a slice."""
        return self.block_tokens * self.token_items

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice."""
        return self.slice_items * self.item_bytes

    @property
    def keys(self) -> Placement:
        """Where keys lie."""
        if self.order == "rows":
            return Placement(0, self.key_items, self.token_items, 1)
        if self.order == "vec":
            return Placement(0, self.key_items, 1, self.block_tokens)
        return Placement(
            first=0,
            items=self.key_items,
            token_group=_AMX_ABREAST,
            token_group_step=_AMX_ABREAST * self.key_items,
            token_step=_AMX_PAIR,
            channel_group=_AMX_PAIR,
            channel_group_step=_AMX_ABREAST * _AMX_PAIR,
            channel_step=1,
        )

    @property
    def values(self) -> Placement:
        """Where values lie."""
        if self.order == "rows":
            return Placement(self.key_items, self.value_items, self.token_items, 1)
        first = self.block_tokens * self.key_items
        if self.order == "vec":
            return Placement(first, self.value_items, self.value_items, 1)
        return Placement(
            first=first,
            items=self.value_items,
            token_group=_AMX_PAIR,
            token_group_step=_AMX_PAIR * _AMX_ABREAST,
            token_step=1,
            channel_group=_AMX_ABREAST,
            channel_group_step=_AMX_ABREAST * self.block_tokens,
            channel_step=_AMX_PAIR,
        )


def same_numbers(one: PageFormat, other: PageFormat) -> bool:
    """Whether tokens of the two hold the same numbers, so that one can be turned into the other."""
    return (one.key_items, one.value_items, one.item_bytes) == (
        other.key_items,
        other.value_items,
        other.item_bytes,
    )


def require_same_numbers(one: PageFormat, other: PageFormat) -> None:
    """Raise ``ValueError`` that names both, unless ``same_numbers``."""
    if not same_numbers(one, other):
        raise ValueError(
            "pages can change their order and block size, not what a token holds: "
            f"{one.key_items}+{one.value_items} numbers of {one.item_bytes} bytes and "
            f"{other.key_items}+{other.value_items} of {other.item_bytes}"
        )

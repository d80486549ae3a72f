"""What transfer threads say to each other: frozen tagged structs, one union per direction.

The decode side opens every conversation (it knows the prefill side's address from the leg's
parameters, never the reverse):

    decode side                          prefill side
    Hello            ------------------>
                     <------------------ Welcome | TurnedAway
    Grant            ------------------>
                     <------------------ Writing      (before the first write; again with the last)
                     <------------------ Delivered | Fenced
    Landed | Cancel  ------------------>
                     <------------------ Fenced       (every Cancel is answered)

``Delivered`` and ``Fenced`` are both fences: after either, no write of that attempt will ever touch
the peer's memory again.
"""

from __future__ import annotations

import msgspec

from splitserve.kv_transfer.layout import PageLayout


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """Who a transfer thread is, for both ``Hello`` and ``Welcome``."""

    incarnation: str
    """Of the engine process; new at each start."""
    rank: int
    tensor_parallel: int
    fingerprint: dict[str, str]
    layout: PageLayout
    transport: str
    description: bytes
    """What the transport's ``connect`` needs."""
    process: ProcessIdentity


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Names a process well enough to watch its death on the same host."""

    boot_id: str
    """Of the kernel; processes with different boot ids do not share a host."""
    pid_namespace: int
    pid: int
    start_ticks: int


class Hello(Introduction, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection; nothing else is answered before it.

    ``mac`` proves knowledge of the cluster secret (over incarnation and rank).
    """

    mac: bytes


class Welcome(Introduction, frozen=True, kw_only=True, tag="welcome"):
    """The prefill side is ready to write into the pages that the Hello described."""


class TurnedAway(msgspec.Struct, frozen=True, kw_only=True, tag="turned_away"):
    """The prefill side cannot write to this peer (any more); the reason names both values that
    differ.

    The answer to a Hello, or the end of the introduction that a Welcome began: then a new Hello is
    due. No fence: what was granted before stays granted until it is fenced.
    """

    reason: str


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """These pages are yours to write, under this tag, until you fence."""

    transfer_id: str
    attempt: int
    tag: int
    """Chosen by the granting rank, unique in its life; transports carry it with each write."""
    first_block: int
    """Number (in the prompt) of the first block that is wanted; earlier ones are not sent."""
    block_ids: tuple[int, ...]
    """The granting rank's blocks for prompt blocks ``first_block`` and following."""
    prompt_tokens: int
    prompt_hash: bytes
    grants_expected: int
    """How many decode ranks grant pages for this transfer to the same prefill rank."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop writing this attempt and fence."""

    transfer_id: str
    attempt: int
    reason: str
    keeps: bool = False
    """Hold what was computed until the lease ends: another decode rank may ask for it. Only this
    one's request is over.
    """


class Landed(msgspec.Struct, frozen=True, kw_only=True, tag="landed"):
    """Every page of the attempt was counted and a token was computed from them; the writer may
    release its blocks.
    """

    transfer_id: str
    attempt: int


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """The decode side lives; answered with ``Pong``."""


FromDecode = Hello | Grant | Cancel | Landed | Ping


class Writing(msgspec.Struct, frozen=True, kw_only=True, tag="writing"):
    """Bytes are on their way: a receiver whose transport needs its help should poll."""

    transfer_id: str
    attempt: int
    last: bool
    """Nothing follows but ``Delivered``."""


class Delivered(msgspec.Struct, frozen=True, kw_only=True, tag="delivered"):
    """Every page is in the granted memory. A fence."""

    transfer_id: str
    attempt: int
    pages: int
    bytes: int


class Fenced(msgspec.Struct, frozen=True, kw_only=True, tag="fenced"):
    """No further write of this attempt will happen; what was written may be incomplete. A fence."""

    transfer_id: str
    attempt: int
    reason: str
    refused: bool = False
    """The grant does not fit what was computed: no other writer would be of use."""


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """The prefill side's thread lives."""


FromPrefill = Welcome | TurnedAway | Writing | Delivered | Fenced | Pong

encode = msgspec.msgpack.Encoder().encode
decode_from_decode = msgspec.msgpack.Decoder(FromDecode).decode
decode_from_prefill = msgspec.msgpack.Decoder(FromPrefill).decode

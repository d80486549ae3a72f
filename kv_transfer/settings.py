"""What a transfer thread is told when it starts."""

from __future__ import annotations

from typing import Any

import msgspec

MIB = 1024 * 1024


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one rank's transfer thread; durations in seconds, sizes in bytes."""

    incarnation: str
    """Of the engine; new at each start."""
    rank: int
    tensor_parallel: int
    secret: bytes
    control_address: str
    """Where this rank listens for decode ranks, ``tcp://host:port``."""
    transport: str
    transport_settings: dict[str, Any] = {}
    warm_addresses: tuple[str, ...] = ()
    """Control addresses of prefill ranks to introduce ourselves to at start, so that no request
    pays for first contact.
    """
    stream_min_bytes: int = MIB
    """Layers are grouped until one write has at least this size; a shorter prompt goes in one
    piece.
    """
    write_limit_bytes: int = 16 * MIB
    """Larger writes are cut, so that control messages are not kept waiting."""
    lease_s: float = 30.0
    """How long a finished prefill holds its blocks for a decode node that has not asked or not
    answered.
    """
    deadline_s: float = 120.0
    """How long a decode node waits for its pages before it takes them back and computes the prompt
    itself.
    """
    retarget_wait_s: float = 0.0
    """How long a decode node whose prefill node has failed waits to be told of another one, before
    it computes the prompt itself; 0 where nobody would tell.
    """
    fence_timeout_s: float = 30.0
    """How long a writer may owe a fence for pages that nobody wants any more, before it is reported
    as overdue.
    """
    quarantine_limit_bytes: int = 256 * MIB
    """Pages that may wait for fences together; the writers of more are overdue too."""
    peer_silence_s: float = 30.0
    """A decode rank that says nothing for this long is given up; it says something every two
    seconds.
    """
    preemption_fence_s: float = 2.0
    """How long an open write may delay the engine step that preempts its source."""

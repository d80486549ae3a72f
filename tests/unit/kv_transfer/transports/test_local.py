"""What only ``local`` promises: it proves which process it writes to, and says why it may not."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from support.transport_pair import TransportProcess, Variant

from splitserve.kv_transfer.transports import description as envelope
from splitserve.kv_transfer.transports.base import PagePairing, Region, TransportError
from splitserve.kv_transfer.transports.local import LocalTransport, _Description
from splitserve.kv_transfer.transports.settings import TransportSettings

PAGE_BYTES = 4096


def told_by(process_id: int, **changes: object) -> bytes:
    """A description of ``process_id`` that is right but for what is changed."""
    transport = LocalTransport(TransportSettings("other"))
    memory = ctypes.create_string_buffer(PAGE_BYTES)
    transport.register([Region(ctypes.addressof(memory), PAGE_BYTES)])
    told = envelope.unseal("local", transport.describe(), _Description)
    transport.close()
    return envelope.seal("local", msgspec.structs.replace(told, pid=process_id, **changes))


def connect(description: bytes) -> None:
    transport = LocalTransport(TransportSettings("writer"))
    memory = np.zeros(PAGE_BYTES, dtype=np.uint8)
    transport.register([Region(memory.ctypes.data, PAGE_BYTES)])
    remote = envelope.unseal("local", description, _Description).regions[0][0]
    pairing = PagePairing(np.array([memory.ctypes.data]), np.array([remote]), PAGE_BYTES)
    try:
        transport.connect("peer", description, pairing)
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"boot_id": "other"}, "another host"),
        ({"pid_namespace": 1}, "another PID namespace"),
        ({"start_ticks": 1}, "another process has its id"),
        ({"nonce": b"x" * 32}, "is not peer"),
        ({"nonce_address": 8}, "not mapped"),
        ({"nonce": b"short"}, "damaged"),
    ],
)
def test_a_process_that_is_not_the_described_one_is_refused(
    changes: dict[str, object], match: str
) -> None:
    """Each way of reaching a wrong process has its own sentence."""
    with pytest.raises(TransportError, match=match):
        connect(told_by(os.getpid(), **changes))


def test_a_process_that_has_ended_is_refused() -> None:
    """Its id names nobody."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(20)
    with pytest.raises(TransportError, match="has ended"):
        connect(told_by(ended.pid))


def test_missing_rights_are_explained_with_the_remedy() -> None:
    """The error names the capability, the setting and the other transport."""
    variant = Variant("local", "local")
    writer, receiver = TransportProcess(variant), TransportProcess(variant)
    try:
        writer.setup(pages=1, stride=PAGE_BYTES)
        receiver.setup(pages=1, stride=PAGE_BYTES)
        receiver.do("forbid_tracing")
        writer.do("forbid_tracing")
        with pytest.raises(TransportError, match=r"ptrace_scope.*SYS_PTRACE.*tcp"):
            writer.connect(receiver)
    finally:
        writer.end()
        receiver.end()

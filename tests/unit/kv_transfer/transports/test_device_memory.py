"""KV on a GPU: which transports take it, and what the others say. One test needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from splitserve.kv_transfer.transports.base import (
    PagePairing,
    Region,
    TransportError,
    WriteDone,
)
from splitserve.kv_transfer.transports.registry import create
from splitserve.kv_transfer.transports.settings import TransportSettings

PAGE_BYTES = 4096
PAGES = 8


@pytest.mark.parametrize("name", ["local", "tcp"])
def test_transports_for_host_memory_refuse_it(name: str) -> None:
    """With the transport that could take it."""
    transport = create(name, TransportSettings(incarnation="P/0"))
    try:
        with pytest.raises(TransportError, match=r"CUDA device 1.*use the transport 'nixl'"):
            transport.register([Region(1 << 20, PAGE_BYTES, device=1)])
    finally:
        transport.close()


def test_nixl_refuses_memory_of_several_devices() -> None:
    """A rank's KV lies on one."""
    transport = create("nixl", TransportSettings(incarnation="P/0"))
    try:
        with pytest.raises(TransportError, match="several devices"):
            transport.register([Region(1 << 20, 8, device=0), Region(2 << 20, 8, device=1)])
    finally:
        transport.close()


@pytest.mark.gpu
def test_nixl_moves_pages_between_device_buffers() -> None:
    """Scattered pages of one tensor arrive in another one's, on the same GPU."""
    import torch

    source = torch.arange(PAGES * PAGE_BYTES, dtype=torch.uint8, device="cuda").contiguous()
    target = torch.zeros_like(source)
    ends = {}
    for name, memory in (("P/0", source), ("D/0", target)):
        ends[name] = create("nixl", TransportSettings(incarnation=name))
        ends[name].register([Region(memory.data_ptr(), memory.numel(), memory.device.index)])
    pages = np.arange(PAGES, dtype=np.int64) * PAGE_BYTES
    pairing = PagePairing(pages + source.data_ptr(), pages + target.data_ptr(), PAGE_BYTES)
    ends["P/0"].connect("D/0", ends["D/0"].describe(), pairing)
    local, remote = np.array([0, 3, 5]), np.array([7, 1, 2])
    write_id = ends["P/0"].write("D/0", 1, local, remote)
    events = []
    while not events:
        events = ends["P/0"].poll()
        ends["D/0"].poll()
    assert events == [WriteDone(write_id)]
    found, sent = target.view(PAGES, -1).cpu(), source.view(PAGES, -1).cpu()
    assert torch.equal(found[remote], sent[local])
    for end in ends.values():
        end.close()

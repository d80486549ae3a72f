"""A transport that writes wrongly on demand, to prove that the equality benchmark would notice.

Every write passes through; what the file ``PLANTED_FAULT_FILE`` says at that moment is done to it:

``none``   nothing: the control that the wrapper itself changes no answer
``swap``   the first and last block of the write's first layer trade places. The last block is a
           partly filled one: two *full* blocks of a layer may trade places without effect on the
           answer, because attention does not depend on the order of its keys
``zero``   the first page of the write is taken from the engine's null block
``shift``  every page but the last of a layer is that of the block behind it: the KV of other
           positions
``layer``  the first page of the write lands in the next layer's place (the first layer's for the
           last); its own place keeps what an earlier request left there
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitserve.kv_transfer.transports.base import PageIndices, PagePairing, Transport


class FaultyTransport:
    """The wrapped transport; ``write`` and ``connect`` are the only methods that do more."""

    def __init__(self, inner: Transport, fault_file: Path, layers: int) -> None:
        self._inner = inner
        self._fault_file = fault_file
        self._layers = layers
        self._blocks: dict[str, tuple[int, int]] = {}
        """Per peer: number of blocks here and there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect(self, peer: str, description: bytes, pairing: PagePairing) -> None:
        """Connects, and remembers the shape of both sides."""
        self._blocks[peer] = (
            len(pairing.local_addresses) // self._layers,
            len(pairing.remote_addresses) // self._layers,
        )
        self._inner.connect(peer, description, pairing)

    def write(self, peer: str, tag: int, local: PageIndices, remote: PageIndices) -> int:
        """Writes with the fault of the moment."""
        fault = self._fault_file.read_text().strip()
        here, there = self._blocks[peer]
        local, remote = local.copy(), remote.copy()
        if fault == "swap":
            last = int((remote // there == remote[0] // there).nonzero()[0][-1])
            remote[[0, last]] = remote[[last, 0]]
        elif fault == "zero":
            local[0] = local[0] // here * here
        elif fault == "shift":
            same_layer = local[1:] // here == local[:-1] // here
            local[:-1][same_layer] = local[1:][same_layer]
        elif fault == "layer":
            remote[0] = (remote[0] + there) % (there * self._layers)
        return self._inner.write(peer, tag, local, remote)


def wrap_create(create: Callable[..., Transport]) -> Callable[..., Any]:
    """The registry's factory, with every transport wrapped."""
    fault_file = Path(os.environ["PLANTED_FAULT_FILE"])
    layers = int(os.environ["PLANTED_FAULT_LAYERS"])

    def create_faulty(*arguments: Any, **named: Any) -> Any:
        return FaultyTransport(create(*arguments, **named), fault_file, layers)

    return create_faulty

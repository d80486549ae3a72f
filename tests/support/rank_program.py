"""One rank as a process that does what its standard input says: ``rank_program.py INCARNATION PORT
TRANSPORT``.

Each line in is a JSON list ``[name, ...arguments]``, each line out its result. A rank that was told
to ``stop_at_the_next_write`` stops itself (SIGSTOP) when its transfer thread has decided to write,
checked the attempt, and has not yet called the transport.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from splitserve.kv_transfer import transfer_thread
from splitserve.kv_transfer.orders import StepOrders
from splitserve.kv_transfer.transports.registry import create
from support.kv_rank import LAYERS, KvRank, opened

PROMPT = list(range(8))
SOURCE = [3, 4]
P_SEED = 1
MARK = 0xA5
"""What a block is filled with by its next owner."""


class StoppingTransport:
    """A transport whose owner stops before a write."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.stops = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, *arguments: Any) -> int:
        if self.stops:
            self.stops = False
            # To this thread: one that is sent to the process may stop it a moment later
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return int(self._transport.write(*arguments))


class RankProgram:
    """The rank, and the orders that a test may give."""

    def __init__(self, incarnation: str, port: int, transport: str) -> None:
        self.made: list[StoppingTransport] = []
        transfer_thread.create = self._create
        self.rank = KvRank(incarnation, port, transport=transport, stream_min_bytes=1)
        self.rank.fill(P_SEED if incarnation == "P" else P_SEED + 1)
        self.expected = self.rank.pages.copy()
        self.rank.thread.start()

    def _create(self, *arguments: Any) -> Any:
        self.made.append(StoppingTransport(create(*arguments)))
        return self.made[-1]

    def do_begin(self, transfer_id: str) -> None:
        """The first layer of a prompt is computed."""
        self.rank.step(transfer_id, SOURCE, 0, 2, layers=1, opens=(opened(transfer_id, PROMPT),))

    def do_stop_at_the_next_write(self) -> None:
        self.made[0].stops = True

    def do_finish(self) -> None:
        """The other layers are."""
        for layer in range(1, LAYERS):
            self.rank.thread.layer_done(layer)
        self.rank.thread.end_step()

    def do_release(self, transfer_id: str) -> None:
        self.rank.close(transfer_id, aborted=True)

    def do_has_sent(self, transfer_id: str) -> bool:
        return self.rank.has_sent(f"p-{transfer_id}")

    def do_receive(self, transfer_id: str, blocks: list[int], port: int) -> str:
        return self.rank.receive(transfer_id, PROMPT, blocks, _address_of(port))

    def do_cancel(self, request_id: str) -> None:
        self.rank.thread.begin_step(StepOrders(cancels=((request_id, "the client is gone"),)))

    def do_has_received(self, request_id: str) -> bool:
        return self.rank.has_received(request_id)

    def do_has_failed(self, request_id: str) -> bool:
        return request_id in self.rank.failed

    def do_states(self) -> list[str]:
        return [held.state for held in self.rank.thread.holdings().held]

    def do_layers_of(self, blocks: list[int]) -> list[str]:
        """Per layer what the blocks hold: ``old``, ``new`` (what P sends), ``mark``, ``mixed``."""
        new = np.random.default_rng(P_SEED).integers(0, 256, self.expected.shape, np.uint8)
        return [
            next(
                (
                    name
                    for name, pages in (
                        ("old", self.expected[layer, blocks]),
                        ("new", new[layer, SOURCE]),
                        ("mark", np.full_like(new[layer, SOURCE], MARK)),
                    )
                    if np.array_equal(self.rank.pages[layer, blocks], pages)
                ),
                "mixed",
            )
            for layer in range(LAYERS)
        ]

    def do_use(self, blocks: list[int]) -> None:
        """The blocks have another owner, who writes to them."""
        self.rank.pages[:, blocks] = MARK

    def do_untouched_except(self, blocks: list[int]) -> bool:
        others = [block for block in range(self.rank.pages.shape[1]) if block not in blocks]
        return np.array_equal(self.rank.pages[:, others], self.expected[:, others])


def _address_of(port: int) -> KvRank:
    """Another process's rank, as far as a grant has to know it; it is not started."""
    return KvRank("P", port)


def main(incarnation: str, port: str, transport: str) -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print must not be taken for an answer.
    program = RankProgram(incarnation, int(port), transport)
    answers.write("null\n")
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answers.write(json.dumps(getattr(program, f"do_{name}")(*arguments)) + "\n")
    program.rank.thread.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

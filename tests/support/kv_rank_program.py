"""One rank as a process of its own: ``kv_rank_program.py ROLE PORT PEER_PORT``, killed by the test.

It begins one transfer and says so with a line; it ends when its input does.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from support.kv_rank import KvRank, opened, until

PROMPT = list(range(8))
SOURCE = [3, 4]
TARGET = [5, 6]


def main(role: str, port: int, peer_port: int) -> None:
    rank = KvRank(role, port, stream_min_bytes=1)
    rank.fill(1 if role == "P" else 2)
    rank.thread.start()
    if role == "P":
        rank.step("t", SOURCE, 0, 2, layers=1, opens=(opened("t", PROMPT),))
    else:
        untouched = rank.pages.copy()
        rank.receive("t", PROMPT, TARGET, KvRank("P", peer_port))
        until(lambda: not np.array_equal(untouched, rank.pages), "a layer has arrived")
    print("begun", flush=True)
    sys.stdin.read()
    rank.thread.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

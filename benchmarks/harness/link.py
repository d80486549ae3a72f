"""A shaped link between two engines: two network namespaces, a veth pair, a token bucket on both
ends.

    prefill namespace            decode namespace
      data 10.77.0.1  <--- shaped --->  data 10.77.0.2      KV pages and transfer control
      mgmt 10.77.1.2                    mgmt 10.77.2.2      HTTP of the engines, not shaped
           |                                 |
      10.77.1.1  (the caller's namespace)  10.77.2.1

Needs root. Everything is removed when the block is left; only these 10.77 addresses are used.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFIX = "ssb"
_SIDES = ("p", "d")


class LinkError(Exception):
    """The namespaces cannot be made here; the message holds the command and its output."""


@dataclass(frozen=True)
class Namespace:
    """One end of the link."""

    name: str
    data_device: str
    data_address: str
    management_address: str

    def wrap(self, command: Sequence[str]) -> list[str]:
        """``command``, to be run inside."""
        return ["ip", "netns", "exec", self.name, *command]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip()}")


class ShapedLink(contextlib.AbstractContextManager["ShapedLink"]):
    """Both namespaces exist inside the block."""

    def __init__(self, rate: str = "1gbit", burst: str = "256kb", latency: str = "50ms") -> None:
        self.rate = rate
        self.burst = burst
        self.latency = latency
        self.prefill, self.decode = (
            Namespace(
                name=f"{_PREFIX}-{side}-{os.getpid()}",
                data_device=f"{_PREFIX}{side}data",
                data_address=f"10.77.0.{index}",
                management_address=f"10.77.{index}.2",
            )
            for index, side in enumerate(_SIDES, start=1)
        )

    def __enter__(self) -> ShapedLink:
        if os.geteuid() != 0:
            raise LinkError("a shaped link needs root (network namespaces and tc)")
        try:
            self._build()
        except LinkError:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        ends = (self.prefill, self.decode)
        for end in ends:
            _run("ip", "netns", "add", end.name)
            _run(*end.wrap(("ip", "link", "set", "lo", "up")))
        names = [end.data_device for end in ends]
        _run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for index, end in enumerate(ends, start=1):
            _run("ip", "link", "set", end.data_device, "netns", end.name)
            self._address(end, end.data_device, f"{end.data_address}/24")
            shape = ("root", "tbf", "rate", self.rate, "burst", self.burst)
            qdisc = ("tc", "qdisc", "add", "dev", end.data_device, *shape, "latency", self.latency)
            _run(*end.wrap(qdisc))
            outer, inner = f"{_PREFIX}m{index}", f"{_PREFIX}n{index}"
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
            _run("ip", "link", "set", inner, "netns", end.name)
            _run("ip", "addr", "add", f"10.77.{index}.1/24", "dev", outer)
            _run("ip", "link", "set", outer, "up")
            self._address(end, inner, f"{end.management_address}/24")

    def _address(self, end: Namespace, device: str, address: str) -> None:
        _run(*end.wrap(("ip", "addr", "add", address, "dev", device)))
        _run(*end.wrap(("ip", "link", "set", device, "up")))

    def __exit__(self, *_: object) -> None:
        """Deleting a namespace deletes the devices in it and their peers."""
        for end in (self.prefill, self.decode):
            with contextlib.suppress(LinkError):
                _run("ip", "netns", "del", end.name)
        for index in (1, 2):
            with contextlib.suppress(LinkError):
                _run("ip", "link", "del", f"{_PREFIX}m{index}")

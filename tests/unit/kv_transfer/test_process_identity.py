"""Naming processes, and watching their death."""

from __future__ import annotations

import os
import select

import msgspec
import pytest
from support.kv_peers import Sleeper

from splitserve.kv_transfer.process_identity import DeathWatch, own_identity, watch


def is_readable(pidfd: int, timeout_s: float) -> bool:
    """Whether the pidfd says that its process is gone."""
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def test_a_death_makes_the_pidfd_readable() -> None:
    """Not before, and at once afterwards."""
    sleeper = Sleeper()
    pidfd = watch(sleeper.identity)
    assert pidfd is not None
    assert not is_readable(pidfd, 0)
    sleeper.kill()
    assert is_readable(pidfd, 5)
    os.close(pidfd)
    with pytest.raises(ProcessLookupError):
        watch(sleeper.identity)


def test_a_process_elsewhere_is_not_watched() -> None:
    """Another host or another pid namespace: the pid means nothing here."""
    own = own_identity()
    assert watch(msgspec.structs.replace(own, boot_id="other")) is None
    assert watch(msgspec.structs.replace(own, pid_namespace=1)) is None


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"pid": -5}, {"pid": 1 << 40}, {"pid": 0}])
def test_a_pid_that_names_no_process_or_another(change: dict[str, int]) -> None:
    """A reused pid and an impossible one are both a process that is gone."""
    with pytest.raises(ProcessLookupError):
        watch(msgspec.structs.replace(own_identity(), **change))


def test_a_death_watch_tells_the_key_once() -> None:
    """Keys are watched once, told once, and can be forgotten."""
    watching = DeathWatch()
    sleeper = Sleeper()
    watching.add(("address", "P"), sleeper.identity)
    watching.add(("address", "P"), sleeper.identity)
    watching.add(("address", "Q"), sleeper.identity)
    watching.add(("far", "R"), msgspec.structs.replace(sleeper.identity, boot_id="other"))
    assert len(watching.pidfds) == 2
    watching.keep(lambda key: key[1] == "P")
    (pidfd,) = watching.pidfds
    sleeper.kill()
    assert is_readable(pidfd, 5)
    assert watching.take(pidfd) == ("address", "P")
    assert watching.take(pidfd) is None
    assert watching.pidfds == []
    with pytest.raises(ProcessLookupError):
        watching.add(("address", "P"), sleeper.identity)

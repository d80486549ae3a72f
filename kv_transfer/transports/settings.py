"""What a transport is told when it is made, besides its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransportSettings:
    """Settings that all transports share; each one reads what concerns it."""

    incarnation: str
    """Id of this process, never reused; peers know this end of a connection by it."""
    host: str = "127.0.0.1"
    """Address to listen on, and the one that peers are told (``tcp``, ``ucx``)."""
    advertised_host: str = ""
    """Address that peers are told instead of ``host``; needed when ``host`` is a wildcard."""
    port: int = 0
    """Port on which pages are received (``tcp``, ``local``); 0 takes a free one."""
    net_devices: str = ""
    """UCX network devices (``nixl``, ``ucx``), e.g. ``eth0`` or ``mlx5_0:1``. Empty: loopback,
    unless the environment already sets ``UCX_NET_DEVICES``."""
    connect_timeout_s: float = 10.0
    """A connection that is not ready to write after this time is a lost peer (``tcp``, ``ucx``)."""
    authentication_timeout_s: float = 5.0
    """An incoming connection that has not proved the token after this time is closed (``tcp``)."""

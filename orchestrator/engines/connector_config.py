"""The connector's settings inside an engine's ``kv_connector_extra_config``, read in one place."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from splitserve.kv_transfer.cache.settings import CacheClientConfig
from splitserve.kv_transfer.channel import SECRET_ENV, SECRET_FILE_ENV, secret_in, tcp_address
from splitserve.kv_transfer.settings import MIB, TransferSettings


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the launcher tells the connector; the cluster secret comes in the environment."""

    incarnation: str
    endpoint_port: int
    """Loopback port of the scheduler half's endpoint for the agent."""
    control_host: str = "127.0.0.1"
    control_port_base: int
    """Rank r's transfer thread listens on ``control_port_base + r``."""
    advertise_host: str = ""
    """Where peers find this engine, when that is not where it listens."""
    data_port_base: int = 0
    """Rank r receives pages on ``data_port_base + r``, where the transport listens for them; 0: on
    any port.
    """
    transport: str = "nixl"
    transport_settings: dict[str, Any] = {}
    warm_addresses: tuple[str, ...] = ()
    stream_min_bytes: int = MIB
    lease_s: float = 30.0
    transfer_deadline_s: float = 120.0
    retarget_wait_s: float = 0.0
    fence_timeout_s: float = 30.0
    quarantine_limit_bytes: int = 256 * MIB
    experimental_cuda: bool = False
    node: str = ""
    role: str = ""
    cache: CacheClientConfig | None = None
    """The cache of this engine's host; None where there is none."""

    @property
    def endpoint_address(self) -> str:
        """Where the agent finds the scheduler half."""
        return tcp_address("127.0.0.1", self.endpoint_port)

    def control_address(self, rank: int) -> str:
        """Where this engine's rank listens for decode ranks."""
        return tcp_address(self.control_host, self.control_port_base + rank)

    def advertised_address(self, rank: int) -> str:
        """Where decode ranks find this engine's rank."""
        host = self.advertise_host or self.control_host
        return tcp_address(host, self.control_port_base + rank)

    def transfer_settings(self, rank: int, tensor_parallel: int) -> TransferSettings:
        """Settings of one rank's transfer thread."""
        return TransferSettings(
            incarnation=self.incarnation,
            rank=rank,
            tensor_parallel=tensor_parallel,
            secret=cluster_secret(),
            control_address=self.control_address(rank),
            transport=self.transport,
            transport_settings={
                "host": self.control_host,
                "advertised_host": self.advertise_host,
                "port": self.data_port_base + rank if self.data_port_base else 0,
                **self.transport_settings,
            },
            warm_addresses=self.warm_addresses,
            stream_min_bytes=self.stream_min_bytes,
            lease_s=self.lease_s,
            deadline_s=self.transfer_deadline_s,
            retarget_wait_s=self.retarget_wait_s,
            fence_timeout_s=self.fence_timeout_s,
            quarantine_limit_bytes=self.quarantine_limit_bytes,
        )


def cluster_secret() -> bytes:
    """The cluster secret from the environment. Raises ``ValueError`` when it is missing or
    malformed.
    """
    found = secret_in(os.environ)
    if found is None:
        raise ValueError(
            "the engine needs the cluster secret in the file that the environment variable "
            f"{SECRET_FILE_ENV} names, or in {SECRET_ENV}"
        )
    return found


def connector_config(extra_config: dict[str, Any]) -> ConnectorConfig:
    """The settings in ``kv_connector_extra_config``. Raises ``ValueError`` naming what is wrong."""
    try:
        return msgspec.convert(extra_config, ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config of SplitserveConnector: {error}") from error

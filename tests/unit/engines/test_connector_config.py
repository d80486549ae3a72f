"""The connector's settings: strict, and the secret only from the environment."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.kv_transfer.channel import SECRET_ENV
from splitserve.orchestrator.engines.connector_config import (
    cluster_secret,
    connector_config,
)

SETTINGS = {"incarnation": "P", "endpoint_port": 5000, "control_port_base": 6000}


def test_each_rank_has_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r listens on the base port plus r; the endpoint stays on loopback."""
    monkeypatch.setenv(SECRET_ENV, "ab" * 16)
    config = connector_config(
        {**SETTINGS, "control_host": "10.0.0.1", "warm_addresses": ["tcp://h:1"]}
    )
    assert config.endpoint_address == "tcp://127.0.0.1:5000"
    rank = config.transfer_settings(1, 2)
    assert rank.control_address == "tcp://10.0.0.1:6001"
    assert (rank.rank, rank.tensor_parallel, rank.secret) == (1, 2, bytes([0xAB]) * 16)
    assert rank.warm_addresses == ("tcp://h:1",)


def test_another_address_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens where it is told and says the advertised address, on the control channel and for
    data; without one both are the same.
    """
    monkeypatch.setenv(SECRET_ENV, "ab" * 16)
    told = {"control_host": "10.0.0.1", "advertise_host": "192.0.2.7", "data_port_base": 7000}
    config = connector_config({**SETTINGS, **told})
    assert config.advertised_address(1) == "tcp://192.0.2.7:6001"
    rank = config.transfer_settings(1, 2)
    assert rank.control_address == "tcp://10.0.0.1:6001"
    assert rank.transport_settings == {
        "host": "10.0.0.1",
        "advertised_host": "192.0.2.7",
        "port": 7001,
    }
    plain = connector_config(SETTINGS)
    assert plain.advertised_address(0) == plain.control_address(0)
    assert plain.transfer_settings(0, 1).transport_settings["port"] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"leese_s": 3}, "unknown field `leese_s`"),
        ({"endpoint_port": "5000"}, "endpoint_port"),
        ({"lease_s": "long"}, "lease_s"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], words: str) -> None:
    """Unknown and mistyped keys are errors with their path."""
    with pytest.raises(ValueError, match=words):
        connector_config({**SETTINGS, **change})


def test_the_secret_must_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its absence names the variable."""
    monkeypatch.delenv(SECRET_ENV, raising=False)
    with pytest.raises(ValueError, match=SECRET_ENV):
        cluster_secret()

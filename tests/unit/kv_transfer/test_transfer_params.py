"""Sealed transfer parameters: only those made with the secret are believed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.kv_transfer.transfer_params import (
    KEY,
    BadTransferParamsError,
    TransferParams,
    seal,
    unseal,
)

SECRET = b"0123456789abcdef"
PARAMS = TransferParams(
    transfer_id="t", role="decode", peer_incarnation="P", peer_addresses=("tcp://127.0.0.1:1",)
)


def test_what_was_sealed_is_unsealed() -> None:
    """Through JSON, as it travels in a request body."""
    assert unseal(json.loads(json.dumps(seal(PARAMS, SECRET))), SECRET) == PARAMS


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, [], "splitserve", 3])
def test_a_request_without_a_transfer(params: Any) -> None:
    """Parameters that are not ours are no transfer and no error."""
    assert unseal(params, SECRET) is None


@pytest.mark.parametrize(
    "sealed",
    [
        None,
        "text",
        [],
        {},
        {"leg": "{}"},
        {"leg": 1, "mac": "x"},
        {"leg": "{}", "mac": None},
        {"leg": "{}", "mac": ""},
        {"leg": "{}", "mac": "é"},
        {"leg": "\ud800", "mac": "\udfff"},
    ],
)
def test_forged_parameters_raise(sealed: Any) -> None:
    """Whatever a client writes, also text that is no text, is one kind of error."""
    with pytest.raises(BadTransferParamsError):
        unseal({KEY: sealed}, SECRET)


@given(st.dictionaries(st.sampled_from(["leg", "mac"]), st.text() | st.integers() | st.none()))
def test_any_forgery_raises(sealed: dict[str, Any]) -> None:
    """No input is believed or ends in another error."""
    with pytest.raises(BadTransferParamsError):
        unseal({KEY: sealed}, SECRET)


def test_another_secret_or_another_leg_is_refused() -> None:
    """The MAC binds the content to the cluster."""
    sealed = seal(PARAMS, SECRET)
    with pytest.raises(BadTransferParamsError, match="MAC"):
        unseal(sealed, b"fedcba9876543210")
    sealed[KEY]["leg"] = sealed[KEY]["leg"].replace("decode", "prefill")
    with pytest.raises(BadTransferParamsError, match="MAC"):
        unseal(sealed, SECRET)

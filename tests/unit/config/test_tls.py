"""Contexts from ``security.tls``: what is trusted under which name, and how a failure is told."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING

import pytest
from support.certificates import Authority, Files

from splitserve.orchestrator.config import ConfigError, TlsConfig
from splitserve.orchestrator.config.tls import (
    ServerTls,
    client_context,
    handshake_problem,
    server_context,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def tls_of(files: Files, **changes: object) -> TlsConfig:
    """The section with those files."""
    named = {name: str(getattr(files, name)) for name in ("cert_file", "key_file", "ca_file")}
    return TlsConfig.model_validate(named | changes)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """A CA."""
    return Authority(tmp_path)


def shown_by(context: ssl.SSLContext, tls: TlsConfig) -> bytes:
    """The certificate that a server with ``context`` shows."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    trusting = client_context(tls)
    assert trusting is not None
    client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["127.0.0.1", "::1", "localhost"])
def test_each_name_of_the_certificate_is_trusted(authority: Authority, name: str) -> None:
    """Addresses of both families and names."""
    assert handshake_problem(tls_of(authority.issue("good")), name) == ""


@pytest.mark.parametrize(
    ("days", "name", "expected"),
    [
        ((-9, -1), "localhost", "has expired; renew it"),
        ((1, 2), "localhost", "is not valid yet; compare the clocks"),
        ((-1, 1), "elsewhere.example", "for other names; issue one with this name"),
        ((-1, 1), "10.1.2.3", "for other addresses; issue one with this address"),
    ],
)
def test_a_certificate_that_is_not_trusted_says_why(
    authority: Authority, days: tuple[int, int], name: str, expected: str
) -> None:
    """In time or in name."""
    assert expected in handshake_problem(tls_of(authority.issue("bad", days=days)), name)


def test_another_ca_is_not_trusted(authority: Authority, tmp_path: Path) -> None:
    """Whatever the certificate says."""
    other = Authority(tmp_path, "other")
    tls = tls_of(authority.issue("good"), ca_file=str(other.path))
    assert "a CA that is not in security.tls.ca_file" in handshake_problem(tls, "localhost")


def test_clients_show_a_certificate_where_it_is_asked_for(
    authority: Authority, tmp_path: Path
) -> None:
    """The cluster's own processes have to pass as clients too."""
    files = authority.issue("good")
    assert handshake_problem(tls_of(files, client_ca_file=str(files.ca_file)), "localhost") == ""
    other = Authority(tmp_path, "other")
    refused = handshake_problem(tls_of(files, client_ca_file=str(other.path)), "localhost")
    assert refused.startswith("the router would refuse it as a client's")


def _foreign_key(files: Files, authority: Authority) -> None:
    files.key_file.write_bytes(authority.issue("another").key_file.read_bytes())


def _no_key(files: Files, _: Authority) -> None:
    files.key_file.unlink()


def _no_ca(files: Files, _: Authority) -> None:
    files.ca_file.write_text("nothing")


def _locked_key(files: Files, _: Authority) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files.key_file.read_bytes(), None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"phrase"),
    )
    files.key_file.write_bytes(sealed)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_foreign_key, "security.tls.key_file: .* does not belong to the certificate"),
        (_no_key, "security.tls.key_file: .* cannot be read .*every machine needs the file"),
        (_no_ca, "security.tls.ca_file: .* holds no certificate"),
        (_locked_key, "security.tls.key_file: .* has a pass phrase"),
    ],
)
def test_files_that_cannot_be_used_name_their_key(
    authority: Authority, spoil: Callable[[Files, Authority], None], expected: str
) -> None:
    """With what to do."""
    files = authority.issue("good")
    spoil(files, authority)
    with pytest.raises(ConfigError, match=expected):
        handshake_problem(tls_of(files), "localhost")


def test_a_renewed_certificate_is_shown_without_a_restart(authority: Authority) -> None:
    """Half-renewed files change nothing: the last certificate that fits its key is shown on."""
    files = authority.issue("site")
    tls = tls_of(files)
    server = ServerTls(tls)
    first = shown_by(server.context, tls)
    old_key = files.key_file.read_bytes()
    authority.issue("site")
    new_key = files.key_file.read_bytes()
    files.key_file.write_bytes(old_key)
    server.refresh()
    assert shown_by(server.context, tls) == first
    files.key_file.write_bytes(new_key)
    os.utime(files.key_file, ns=(1, 1))
    server.refresh()
    assert shown_by(server.context, tls) != first


def test_old_protocols_are_not_spoken(authority: Authority) -> None:
    """On either side."""
    tls = tls_of(authority.issue("good"))
    client = client_context(tls)
    assert client is not None
    for context in (server_context(tls), client):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2

"""Certificates for tests: a CA, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_DAY = datetime.timedelta(days=1)
LOCAL_NAMES = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Files:
    """As ``security.tls`` names them."""

    cert_file: Path
    key_file: Path
    ca_file: Path

    @property
    def yaml(self) -> str:
        """The section's value."""
        named = [f"{name}: {getattr(self, name)}" for name in ("cert_file", "key_file", "ca_file")]
        return f"{{{', '.join(named)}}}"


class Authority:
    """A CA of its own, in ``folder``."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.path = folder / f"{name}.pem"
        public = self._key.public_key()
        usage = x509.KeyUsage(True, *(False,) * 4, True, True, False, False)
        certificate = (
            _builder(self._name, self._name, public, days=(-10, 10))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, hosts: Sequence[str] = LOCAL_NAMES, *, days: tuple[int, int] = (-1, 2)
    ) -> Files:
        """A certificate for ``hosts`` in ``NAME.pem`` and its key in ``NAME.key``; ``days`` from
        now are its beginning and end.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(subject, self._name, key.public_key(), days=days)
            .add_extension(x509.SubjectAlternativeName([_named(h) for h in hosts]), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = Files(self._folder / f"{name}.pem", self._folder / f"{name}.key", self.path)
        files.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key_file.touch(mode=0o600)
        files.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: tuple[int, int]
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * _DAY)
        .not_valid_after(now + days[1] * _DAY)
    )


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

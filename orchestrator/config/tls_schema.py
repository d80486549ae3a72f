"""The section ``security.tls`` of the cluster YAML; ``tls`` makes contexts of it."""

from __future__ import annotations

from pydantic import Field

from splitserve.orchestrator.config.fields import Section


class TlsConfig(Section):
    """Certificates as PEM files. With this section the router and the engines speak HTTPS, agents
    wss, and each process verifies whom it connects to. Paths are the same on every machine, what is
    in `cert_file` and `key_file` need not be.
    """

    cert_file: str = Field(min_length=1)
    """Certificate of this machine's router and engines, with the intermediate ones after it. It
    names the addresses by which they are reached (subjectAltName). Read again when it changes.
    """

    key_file: str = Field(min_length=1)
    """Its private key, readable by its owner only, without a pass phrase."""

    ca_file: str = Field(min_length=1)
    """Certificates of the CAs by which agents, the router and `splitserve`'s commands verify each
    other.
    """

    client_ca_file: str | None = None
    """Certificates of the CAs whose certificates the router and the engines ask their clients for;
    agents, the router and commands show `cert_file`. Without it clients need none.
    """

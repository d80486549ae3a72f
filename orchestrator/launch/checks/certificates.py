"""Whether the certificates of ``security.tls`` do what the cluster needs of them on this machine.

Each name is tried by a handshake in memory between the two contexts that the processes would use,
so what passes here passes between them, as far as it is this machine's.
"""

from __future__ import annotations

import datetime
import stat
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cryptography import x509

from splitserve.orchestrator.config import ConfigError, router_url
from splitserve.orchestrator.config.checks import is_loopback
from splitserve.orchestrator.config.tls import handshake_problem
from splitserve.orchestrator.launch.finding import Finding, failure, told, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitserve.orchestrator.config import TlsConfig
    from splitserve.orchestrator.launch.checks.subject import Subject
    from splitserve.orchestrator.launch.finding import Problem

SOON_DAYS = 14
"""A certificate that ends sooner is warned of."""


def certificates(subject: Subject) -> Finding:
    """The files are there, fit each other, and are trusted under each name that is used."""
    check, tls = "certificates", subject.config.security.tls
    if tls is None:
        return Finding(check, "no TLS", tuple(_in_the_clear(subject)))
    names = _names(subject)
    problems: list[Problem] = []
    try:
        for name, whose in names.items():
            if why := handshake_problem(tls, name):
                problems.append(
                    failure(
                        "security.tls.cert_file",
                        f"{tls.cert_file} would not be trusted as {name}'s ({whose}): {why}",
                        f"look at it with `openssl x509 -noout -text -in {tls.cert_file}`",
                    )
                )
    except ConfigError as error:
        return Finding(check, "cannot be used", told(error.problems))
    days, ends = _days_left(tls)
    if not problems and days < SOON_DAYS:
        problems.append(
            warning(
                "security.tls.cert_file",
                f"{tls.cert_file} ends in {days:.1f} days ({ends:%Y-%m-%d %H:%M} UTC)",
                "renew it in place: it is read again when the files change",
            )
        )
    problems += _open_key(tls)
    return Finding(
        check, f"as {', '.join(names)}, until {ends:%Y-%m-%d}", tuple(problems), {"days_left": days}
    )


def _names(subject: Subject) -> dict[str, str]:
    """By which name what of this machine is reached."""
    names: dict[str, str] = {}
    if subject.has_router:
        names[urlsplit(router_url(subject.config)).hostname or ""] = "the router"
    for node in subject.nodes:
        names.setdefault(urlsplit(node.advertised_url).hostname or "", node.name)
    return names


def _days_left(tls: TlsConfig) -> tuple[float, datetime.datetime]:
    """How long the certificate, or one of those that it hangs on, is valid."""
    chain = x509.load_pem_x509_certificates(Path(tls.cert_file).expanduser().read_bytes())
    ends = min(certificate.not_valid_after_utc for certificate in chain)
    return (ends - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1), ends


def _open_key(tls: TlsConfig) -> Iterator[Problem]:
    path = Path(tls.key_file).expanduser()
    found = path.stat()
    if found.st_mode & stat.S_IRWXO:
        yield warning(
            "security.tls.key_file", f"{path} can be read by others", f"run `chmod 600 {path}`"
        )


def _in_the_clear(subject: Subject) -> Iterator[Problem]:
    """What crosses a network without TLS."""
    hosts = {urlsplit(node.advertised_url).hostname or "": node for node in subject.nodes}
    for host, node in hosts.items():
        if not is_loopback(host):
            key = "hosts" if node.settings.hosts is not None else "host"
            yield warning(
                f"{node.pool}.{key}",
                f"prompts, answers and the engine's key cross the network to {host} in the clear",
                "set security.tls, or keep that network to yourself",
            )
            return

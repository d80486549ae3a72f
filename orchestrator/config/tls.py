"""TLS between the processes of a cluster, and towards its clients: contexts from the files of
``security.tls``.

A server shows ``cert_file``; whoever connects verifies it with ``ca_file``, the name included. TLS
1.2 is the least. A server's certificate is read again when its files change
(``ServerTls.refresh``), so renewing one restarts nothing; connections that are open keep the old
one.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.orchestrator.config.errors import ConfigError

if TYPE_CHECKING:
    from splitserve.orchestrator.config.tls_schema import TlsConfig

_log = logging.getLogger(__name__)

HANDSHAKE_LIMIT_S = 10.0
"""For a client that connects, until both sides have agreed."""
SHUTDOWN_LIMIT_S = 5.0
"""For the other side's farewell, when a connection is closed."""
_KEY = "security.tls"
_SAYINGS = {
    9: "the certificate is not valid yet; compare the clocks of both machines",
    10: "the certificate has expired; renew it",
    18: "the certificate is self-signed and not the one in security.tls.ca_file",
    19: "it was issued by a CA that is not in security.tls.ca_file",
    20: "it was issued by a CA that is not in security.tls.ca_file, or an intermediate certificate "
    "is missing in security.tls.cert_file",
    21: "it was issued by a CA that is not in security.tls.ca_file",
    62: "the certificate is for other names; issue one with this name in subjectAltName",
    64: "the certificate is for other addresses; issue one with this address in subjectAltName",
}
"""By OpenSSL's verify code."""


class ServerTls:
    """A server's side. ``context`` is one object for good: what it shows follows the files."""

    def __init__(self, tls: TlsConfig) -> None:
        """Raises ``ConfigError`` for files that cannot be used."""
        self._tls = tls
        self._stamps = self._read_stamps()
        self.context = server_context(tls)

    @property
    def listening(self) -> dict[str, Any]:
        """Arguments of ``loop.create_server``."""
        return {
            "ssl": self.context,
            "ssl_handshake_timeout": HANDSHAKE_LIMIT_S,
            "ssl_shutdown_timeout": SHUTDOWN_LIMIT_S,
        }

    def refresh(self) -> None:
        """The certificate of the files is shown from now on; while they do not fit, the last one
        that did. Cheap: call it every few seconds.
        """
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            server_context(self._tls)
            self.context.load_cert_chain(*_chain(self._tls))
        except (ConfigError, OSError) as error:
            _log.error("the last certificate is shown on: %s", error)
        else:
            _log.info("the certificate of %s is shown from now on", self._tls.cert_file)

    def _read_stamps(self) -> tuple[tuple[int, int], ...]:
        stamps = []
        for path in _chain(self._tls):
            try:
                found = path.stat()
            except OSError:
                stamps.append((0, 0))
            else:
                stamps.append((found.st_mtime_ns, found.st_ino))
        return tuple(stamps)


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """What a server shows and asks for. Raises ``ConfigError`` naming the key and the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_chain(context, tls)
    if tls.client_ca_file is not None:
        _load_ca(context, tls.client_ca_file, f"{_KEY}.client_ca_file")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TlsConfig | None, *, checks_name: bool = True) -> ssl.SSLContext | None:
    """How a process of the cluster verifies another one, and shows its own certificate where it is
    asked for; None without TLS. Raises ``ConfigError``.

    ``checks_name`` False is for a process that talks to its own child, on whatever address.
    """
    return _client_context(tls, checks_name) if tls is not None else None


def _client_context(tls: TlsConfig, checks_name: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = checks_name
    _load_ca(context, tls.ca_file, f"{_KEY}.ca_file")
    if tls.client_ca_file is not None:
        _load_chain(context, tls)
    return context


def handshake_problem(tls: TlsConfig, name: str) -> str:
    """Why a client of the cluster would not trust this machine's certificate as ``name``'s; empty
    when it would. Tried in memory, so it is what really happens. Raises ``ConfigError``.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context(tls).wrap_bio(to_server, to_client, server_side=True)
    client = _client_context(tls, True).wrap_bio(to_client, to_server, server_hostname=name)
    waiting = [client, server]
    for _ in range(_HANDSHAKE_ROUNDS):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                who = "" if side is client else "the router would refuse it as a client's: "
                return who + tls_reason(error)
            waiting.remove(side)
        if not waiting:
            return ""
    return "the handshake does not end"


_HANDSHAKE_ROUNDS = 10


def tls_reason(error: BaseException) -> str:
    """An error of a TLS connection in words, with what to do where that is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _SAYINGS.get(error.verify_code, error.verify_message)
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if "wrong version" in reason or "http request" in reason:
            return "the other side does not speak TLS; give both the same security.tls"
        return f"TLS failed: {reason}"
    return str(error)


def certificate_error(error: BaseException) -> ssl.SSLError | None:
    """The TLS failure behind an exception, None when it is none."""
    seen: BaseException | None = error
    while seen is not None:
        inner = getattr(seen, "certificate_error", None) or getattr(seen, "os_error", None)
        for candidate in (seen, inner):
            if isinstance(candidate, ssl.SSLError):
                return candidate
        seen = seen.__cause__
    return None


def _chain(tls: TlsConfig) -> tuple[Path, Path]:
    return Path(tls.cert_file).expanduser(), Path(tls.key_file).expanduser()


def _load_chain(context: ssl.SSLContext, tls: TlsConfig) -> None:
    cert, key = _chain(tls)
    for path, name in ((cert, "cert_file"), (key, "key_file")):
        _check_file(path, f"{_KEY}.{name}")
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            problem = f"{_KEY}.key_file: {key} does not belong to the certificate in {cert}"
            fix = "give the key it was made with"
        else:
            problem = f"{_KEY}.cert_file, {_KEY}.key_file: {cert} or {key} is no PEM file with them"
            fix = f"look at both with `openssl x509 -in {cert}` and `openssl pkey -in {key}`"
        raise ConfigError([f"{problem}; {fix}"]) from error
    except ValueError as error:
        raise ConfigError(
            [f"{_KEY}.key_file: {key} has a pass phrase, which nobody could type; remove it"]
        ) from error


def _no_password() -> str:
    raise ValueError("no pass phrase")


def _load_ca(context: ssl.SSLContext, file: str, key: str) -> None:
    path = Path(file).expanduser()
    _check_file(path, key)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(
            [f"{key}: {path} holds no certificate in PEM form; write the CA's into it"]
        ) from error


def _check_file(path: Path, key: str) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            [f"{key}: {path} cannot be read ({why}); every machine needs the file there"]
        ) from error

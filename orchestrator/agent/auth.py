"""How an agent proves to the router that it belongs to the cluster, and an operator that it runs
it. Neither token reveals the cluster secret, nor the other one.
"""

from __future__ import annotations

import hashlib
import hmac

HOST_HEADER = "X-Splitserve-Host"
"""With it an agent says on which machine it is. Only told to people: nobody has proved it."""


def agent_token(secret: bytes) -> str:
    """The bearer token of ``/internal/agents``; it follows from the cluster secret and does not
    reveal it.
    """
    digest = hashlib.blake2b(b"agent", key=secret[:64], person=b"splitserve-agent", digest_size=16)
    return digest.hexdigest()


def operator_token(secret: bytes) -> str:
    """The bearer token for operators' routes; `up` leaves it in a file for its owner."""
    digest = hashlib.blake2b(
        b"operator", key=secret[:64], person=b"splitserve-agent", digest_size=16
    )
    return digest.hexdigest()


def is_operator_token(authorization: str | None, secret: bytes) -> bool:
    """Whether an ``Authorization`` header carries the operators' token, in constant time."""
    return _is_bearer(authorization, operator_token(secret))


def is_agent_token(authorization: str | None, secret: bytes) -> bool:
    """Whether an ``Authorization`` header carries that token, in constant time."""
    return _is_bearer(authorization, agent_token(secret))


def _is_bearer(authorization: str | None, token: str) -> bool:
    given = (authorization or "").encode(errors="surrogatepass")
    return hmac.compare_digest(given, f"Bearer {token}".encode())

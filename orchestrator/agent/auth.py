"""How an agent proves to the router that it belongs to the cluster."""

from __future__ import annotations

import hashlib
import hmac


def agent_token(secret: bytes) -> str:
    """The bearer token of ``/internal/agents``; it follows from the cluster secret and does not
    reveal it.
    """
    digest = hashlib.blake2b(b"agent", key=secret[:64], person=b"splitserve-agent", digest_size=16)
    return digest.hexdigest()


def is_agent_token(authorization: str | None, secret: bytes) -> bool:
    """Whether an ``Authorization`` header carries that token, in constant time."""
    expected = f"Bearer {agent_token(secret)}"
    given = (authorization or "").encode(errors="surrogatepass")
    return hmac.compare_digest(given, expected.encode())

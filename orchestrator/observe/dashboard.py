"""The page at ``/dashboard``: one file with its own style and script, which asks the router it came
from for everything it shows, and nobody else.

The headers hold the page to that: only the style and the script whose hashes they name run, text
never becomes markup, and connections go to the page's own origin only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

DASHBOARD_PATH = "/dashboard"
_FILE = "dashboard.html"


@dataclass(frozen=True)
class Dashboard:
    """The page, and the headers that it is sent with."""

    body: bytes
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def read(cls) -> Dashboard:
        """The page that came with this package."""
        body = resources.files(__package__).joinpath(_FILE).read_bytes()
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"content-security-policy", _policy(body)),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-opener-policy", b"same-origin"),
        ]
        return cls(body, headers)


def _policy(body: bytes) -> bytes:
    rules = [
        b"default-src 'none'",
        b"script-src " + _hashes(body, b"script"),
        b"style-src " + _hashes(body, b"style"),
        b"connect-src 'self'",
        b"img-src data:",
        b"base-uri 'none'",
        b"form-action 'none'",
        b"frame-ancestors 'none'",
        b"require-trusted-types-for 'script'",
        b"trusted-types 'none'",
    ]
    return b"; ".join(rules)


def _hashes(body: bytes, tag: bytes) -> bytes:
    """What the page has between these tags, each as a source of the policy."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    assert found, f"the page has no <{tag.decode()}>"
    digests = [base64.b64encode(hashlib.sha256(text).digest()) for text in found]
    return b" ".join(b"'sha256-%b'" % digest for digest in digests)

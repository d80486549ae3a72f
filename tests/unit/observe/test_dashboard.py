"""The dashboard as the router sends it; what it shows is tested in a browser (tests/browser)."""

from __future__ import annotations

import base64
import hashlib
import re

from router_stubs.cluster import stub_cluster

from splitserve.orchestrator.observe.dashboard import DASHBOARD_PATH, Dashboard


async def test_the_page_is_open_and_bound_by_its_headers() -> None:
    """Also where API keys are needed: it holds nothing. Its policy names the hashes of its style
    and script and allows no other source.
    """
    async with stub_cluster("d0", keys={"k1": "team"}) as cluster:
        answer = await cluster.session.get(cluster.url + DASHBOARD_PATH)
        body, headers = await answer.read(), answer.headers
        assert answer.status == 200
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "unsafe" not in policy
        for tag in ("script", "style"):
            (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), body, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy


def test_the_page_needs_nothing_from_anywhere() -> None:
    """No address of another machine, no attribute that the policy forbids, nothing read as
    markup.
    """
    text = Dashboard.read().body.decode()
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\s(style|on[a-z]+)=", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert re.findall(r"(?:fetch|EventSource)\(\"([^\"]*)\"", text) == ["internal/events"]

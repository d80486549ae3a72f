"""The dashboard in a real browser: in front of a cluster of mock engines, and of routers with stub
engines where a test makes things happen that a cluster does seldom.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from router_stubs.cluster import SECRET, stub_cluster, until
from support.browser import CONTRASTS, DESKTOP, TOO_WIDE, open_tab, running_browser
from support.mock_cluster import Cluster, prompt_of, running_cluster

from splitserve.orchestrator.agent.auth import operator_token
from splitserve.orchestrator.observe.dashboard import DASHBOARD_PATH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from playwright.async_api import Browser
    from support.browser import Tab

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CLUSTER = """
name: mock-dashboard
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 4 MiB
  engine_args: {block_size: 32, max_model_len: 1024}
  transfer: {transport: tcp, stream_min_bytes: 4096}
decode: *pool
supervision: {restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3}
cache:
  chunk_tokens: 64
  tiers: [{type: cpu, capacity_bytes: 16 MiB}]
"""
PARTS = {"queue", "reserve", "prefill", "transfer_exposed", "first_step", "answer", "decode"}
PHONE = {"width": 360, "height": 740}
LIVE = "#live.is-ok"


def _node(**changes: Any) -> dict[str, Any]:
    closed = {"state": "closed", "openings": 0, "latest_fault": ""}
    node: dict[str, Any] = {
        "role": "decode",
        "pool": "decode",
        "phase": "ready",
        "is_usable": True,
        "is_draining": False,
        "is_flipping": False,
        "owed": {"legs": 0, "transfers": 0, "leased_blocks": 0},
        "is_connected": True,
        "is_silent": False,
        "model": "m",
        "engine": "",
        "hardware": "",
        "transport": "tcp",
        "total_blocks": 100,
        "prefill_legs": 0,
        "decode_legs": 0,
        "breakers": {"prefill": closed, "decode": closed},
        "running": 1,
        "waiting": 0,
        "free_blocks": 60,
        "open_transfers": 2,
        "leased_blocks": 10,
        "quarantined_blocks": 5,
        "counters": {},
    }
    return node | changes


def _request(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "request_id": name,
        "received_unix_s": 1_790_000_000.0,
        "streaming": True,
        "decision": "split",
        "status": 200,
        "outcome": "ok",
    } | changes


OPEN = {"state": "open", "openings": 3, "latest_fault": "it answered 500"}
UNKNOWN = dict.fromkeys(
    ("running", "waiting", "free_blocks", "open_transfers", "leased_blocks", "quarantined_blocks")
)
SELDOM: dict[str, Any] = {
    "is_stopping": False,
    "requests": {
        "waiting": 3,
        "running": 1,
        "waiting_by_tenant": {"team-a": 2, "team-b": 1},
        "queue_limit_requests": 256,
    },
    "nodes": {
        "new": _node(phase="loading", is_usable=False, **UNKNOWN),
        "shut": _node(breakers={"prefill": OPEN, "decode": OPEN}),
        "turned": _node(
            pool="prefill", is_flipping=True, owed={"legs": 2, "transfers": 0, "leased_blocks": 7}
        ),
        "mute": _node(is_silent=True, is_usable=False),
        "gone": _node(is_connected=False, is_usable=False),
        "leaving": _node(is_draining=True, is_usable=False),
    },
    "loading": {"young": {"stage": "loads weights", "elapsed_s": 12.3}},
    "returning": ["back-soon"],
    "refused": {"other": "fingerprint weights differs: other has w2, shut has w1"},
    "last_death": {
        "back-soon": {"exit_status": 0, "likely_cause": "it was told to end"},
        "dead": {"exit_status": -9, "likely_cause": "killed for lack of memory"},
    },
    "autotune": {
        "mode": "advise",
        "decisions": [
            {
                "at_unix_s": 1_790_000_000.0,
                "why": "shut stays: nothing is gained",
                "node": "",
                "role": "",
                "plans": {"current": {"split": "1:2", "share_in_time": 0.97}},
            }
        ],
    },
    "cache": {"trouble": "the cache server has not answered within 5 s"},
    "ended": {
        "requests": 9,
        "failed": 2,
        "left_out": 7,
        "prompt_tokens": 0,
        "expected_cached_tokens": 0,
        "output_tokens": 0,
    },
    "timelines": [
        _request("old", dispatched_ms=5.0, first_data_ms=20.0, last_data_ms=90.0),
        _request(
            "strange",
            parts={"queue": 5.0, "new_part": 3.0},
            last_data_ms=8.0,
            transfer_hidden_ms=30.0,
            transfer_exposed_ms=10.0,
            layer_writes=[{"layers": [0, 3], "ms": 2.5, "pages": 4, "bytes": 2048}],
        ),
    ],
    "incidents": [
        {
            "id": "1",
            "kind": "not_known_yet",
            "node": "shut",
            "text": "shut did something",
            "at_unix_s": 1_790_000_000.0,
            "count": 4,
        }
    ],
}
REFUSED = _request("refused", decision="", status=429, outcome="refused", dispatched_ms=None)
SELDOM_SHOWN = (
    ("article[data-node=new] .badge", "loading"),
    ("article[data-node=new]", "100 of 100 blocks free"),
    ("article[data-node=shut]", "breaker of decode legs is open: it answered 500"),
    ("article[data-node=shut]", "60 of 100 blocks free, 10 leased, 5 in quarantine"),
    ("article[data-node=turned]", "still owes 2 legs, 7 leased blocks"),
    ("article[data-node=mute] .badge.is-bad", "silent"),
    ("article[data-node=gone] .badge.is-bad", "agent gone"),
    ("article[data-node=leaving] .badge", "draining"),
    ("#absent li", "loads weights (12 s)"),
    ("#absent li:has-text('other') .badge", "refused"),
    ("#absent li:has-text('back-soon') .badge", "restarting"),
    ("#absent li:has-text('dead') .badge", "not there"),
    ("#tenants", "team-a 2, team-b 1"),
    ("#autotune", "nothing is gained"),
    ("#autotune", "current 1:2: 97 % in time"),
    ("#cache-trouble", "has not answered"),
    ("#left-out", "7 more"),
    ("#overlap", "75 %"),
    ("#incident-list li", "did something (4 times)"),
    ("#request-list .took.is-warn", "refused 429"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One Chromium for all tests."""
    async with running_browser() as browser:
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two prefill and two decode nodes, and a cache, behind a router."""
    async with running_cluster(tmp_path_factory.mktemp("dashboard"), CLUSTER) as cluster:
        yield cluster


def assert_clean(tab: Tab, url: str) -> None:
    """The page asked its own router only, and nothing went wrong in it."""
    assert tab.complaints == []
    asked = [asked for asked in tab.asked if not asked.startswith("data:")]
    assert asked
    assert all(asked.startswith(f"{url}/") for asked in asked)


async def test_a_cluster_at_work(browser: Browser, cluster: Cluster) -> None:
    """Nodes by role with their free blocks; requests as they end, split and in parts, with their
    numbers behind a click; load; the cache's tier; a role change and an engine's death by
    themselves.
    """
    async with open_tab(browser, cluster.url + DASHBOARD_PATH) as tab:
        await tab.sees(LIVE, "live")
        for role in ("prefill", "decode"):
            assert await tab.count(f"#pool-{role} article") == 2
        await tab.sees("article[data-node=decode-0]", "blocks free")
        prompts = [prompt_of(200, start=number) for number in range(4)]
        await asyncio.gather(*(cluster.text(prompt) for prompt in prompts))
        await tab.sees("#tile-rate dd", re.compile("[1-9]"))
        await tab.sees("#request-list li:nth-child(4) .badge", "split")
        first = tab.page.locator("#request-list li").first
        assert await _part_names(tab, "#request-list li:first-child .bar") <= PARTS
        label = await first.locator(".bar").get_attribute("aria-label")
        assert label is not None
        assert "prefill" in label
        assert "decode" in label
        await first.locator("summary").focus()
        await tab.page.keyboard.press("Enter")
        await tab.sees("#request-list li:first-child dl", "prefill node")
        await tab.sees("#tier-list article", "cpu")
        await asyncio.to_thread(cluster.up.run, "flip", "decode-1", "prefill")
        await tab.sees("#pool-prefill article[data-node=decode-1]", "of pool decode")
        await tab.sees("#incident-list li", "decode-1 takes prefill work")
        await cluster.kill_engine("prefill-0")
        await tab.sees("#incident-list li:has-text('engine died')", "prefill-0")
        await tab.sees("#pool-prefill article[data-node=prefill-0]", "ready")
        assert_clean(tab, cluster.url)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_it_can_be_read(browser: Browser, cluster: Cluster, size: dict[str, int]) -> None:
    """In both schemes and on a phone: enough contrast, nothing beyond the edge, names for what is
    drawn; the schemes differ.
    """
    await cluster.text(prompt_of(100, start=9_000))
    async with open_tab(browser, cluster.url + DASHBOARD_PATH, viewport=size) as tab:
        await tab.sees("#request-list li")
        await tab.page.locator("#request-list summary").first.click()
        await tab.page.locator("#pools summary").first.click()
        assert await tab.page.evaluate(TOO_WIDE) == []
        grounds = []
        for scheme in ("light", "dark"):
            await tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert await tab.page.evaluate(CONTRASTS) == []
            grounds.append(
                await tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
            )
        assert grounds == ["rgb(244, 246, 248)", "rgb(15, 19, 24)"]
        nameless = "[role=img]:not([aria-label]), [role=img][aria-label='']"
        assert await tab.count(nameless) == 0
        assert [await tab.count(mark) for mark in ("h1", "header", "main", "footer")] == [1] * 4
        assert_clean(tab, cluster.url)


async def test_the_token_is_asked_for(browser: Browser) -> None:
    """Where API keys are on: a wrong one is said, the right one shows everything and outlasts a
    reload; it is in no address and in no other tab, and can be forgotten.
    """
    token = operator_token(SECRET)
    async with stub_cluster("d0", keys={"k1": "team"}) as cluster:
        async with open_tab(browser, cluster.url + DASHBOARD_PATH) as tab:
            for given, told in (("schlüssel", "letters"), ("k1", "not accept"), (token, "")):
                await tab.sees("#token-form")
                assert not await tab.page.locator("#main").is_visible()
                await tab.page.fill("#token", given)
                await tab.page.keyboard.press("Enter")
                await tab.sees("#token-error" if told else LIVE, told)
            await tab.sees("article[data-node=d0]")
            await tab.page.reload()
            await tab.sees(LIVE)
            assert not any(token in asked for asked in tab.asked)
            assert await tab.page.evaluate("localStorage.length") == 0
            await tab.page.click("#forget")
            await tab.sees("#token-form")
            assert await tab.page.evaluate("sessionStorage.length") == 0
            assert await tab.count("article[data-node=d0]") == 0
            assert all("401" in complaint for complaint in tab.complaints)
        async with open_tab(browser, cluster.url + DASHBOARD_PATH) as other:
            await other.sees("#token-form")


async def test_what_clients_send_is_text(browser: Browser) -> None:
    """A request id that is markup is shown as it is, and does nothing."""
    name = "<svg/onload=window.hit=1><b>x</b>"
    async with (
        stub_cluster("d0") as cluster,
        open_tab(browser, cluster.url + DASHBOARD_PATH) as tab,
    ):
        await tab.sees(LIVE)
        await (await cluster.post(headers={"X-Request-Id": name})).read()
        await tab.sees("#request-list .id", name)
        await tab.page.locator("#request-list summary").first.click()
        await tab.sees("#request-list dd", name)
        assert await tab.count("#request-list svg, #request-list b") == 0
        assert await tab.page.evaluate("window.hit") is None
        assert_clean(tab, cluster.url)


async def test_it_comes_back_with_the_router(
    browser: Browser, free_port: Callable[[], int]
) -> None:
    """While the router is away the page says since when; with the next router it goes on, and what
    it knew is still there.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with stub_cluster("d0", port=port) as cluster:
        await (await cluster.post(headers={"X-Request-Id": "of-the-first"})).read()
        tab_context = open_tab(browser, url + DASHBOARD_PATH)
        tab = await tab_context.__aenter__()
        await tab.sees("#request-list .id", "of-the-first")
    try:
        await tab.sees("#live.is-bad", "not live")
        assert "(not live)" in await tab.page.title()
        async with stub_cluster("d1", port=port) as cluster:
            await tab.sees(LIVE)
            await tab.sees("article[data-node=d1]")
            assert await tab.count("article[data-node=d0]") == 0
            await (await cluster.post(headers={"X-Request-Id": "of-the-second"})).read()
            await tab.sees("#request-list li:first-child .id", "of-the-second")
            await tab.sees("#request-list .id", "of-the-first")
            assert await tab.count("#incident-list li:has-text('router started')") == 2
        refused = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET")
        assert all(any(word in text for word in refused) for text in tab.complaints)
    finally:
        await tab_context.__aexit__(None, None, None)


async def test_requests_can_be_held_and_chosen(browser: Browser) -> None:
    """A list that is held does not move, and catches up; only failed ones are shown on demand."""
    async with (
        stub_cluster("d0") as cluster,
        open_tab(browser, cluster.url + DASHBOARD_PATH) as tab,
    ):
        await tab.sees(LIVE)
        await (await cluster.post(headers={"X-Request-Id": "good"})).read()
        await tab.sees("#request-list .id", "good")
        await tab.page.click("#hold")
        await cluster.engines["d0"].stop()
        await (await cluster.post(headers={"X-Request-Id": "bad"})).read()
        await tab.sees("#tile-failed dd", "1")
        assert await tab.count("#request-list li") == 1
        await tab.page.click("#hold")
        await tab.sees("#request-list .id", "bad")
        await tab.page.check("#only-failed")
        await tab.page.locator("#request-list .id", has_text="good").wait_for(state="hidden")
        await tab.sees("#request-list .took.is-bad", "error")
        assert_clean(tab, cluster.url)


async def test_a_tab_at_which_nobody_looks(browser: Browser) -> None:
    """After two minutes it lets go of its connection; it is live again when somebody looks."""
    async with (
        stub_cluster("d0") as cluster,
        open_tab(browser, cluster.url + DASHBOARD_PATH) as tab,
    ):
        await tab.sees(LIVE)
        await tab.page.clock.install()
        await _look(tab, is_hidden=True)
        await tab.page.clock.fast_forward(110_000)
        assert cluster.router.events.are_on
        await tab.page.clock.fast_forward(11_000)
        await tab.sees("#live", "while nobody looks")
        await until(lambda: not cluster.router.events.are_on)
        await _look(tab, is_hidden=False)
        await tab.sees(LIVE)
        assert_clean(tab, cluster.url)


async def _look(tab: Tab, *, is_hidden: bool) -> None:
    await tab.page.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


async def test_what_is_seldom(browser: Browser) -> None:
    """Nodes of which little is known, that load, are refused or died; a breaker, a flip that is
    owed for, autotune's decision, a cache that is silent, tenants that wait; requests without
    parts, with unknown ones, that were never dispatched. And an event that cannot be read ends the
    connection, not the page.
    """
    told = b"".join(
        b"event: %b\ndata: %b\n\n" % (name, json.dumps(data).encode())
        for name, data in ((b"status", SELDOM), (b"request", REFUSED))
    )
    async with (
        stub_cluster("d0") as cluster,
        open_tab(
            browser, cluster.url + DASHBOARD_PATH, told=told + b"event: x\ndata: {\n\n"
        ) as tab,
    ):
        await tab.sees("#live.is-bad", "not live")
        for selector, text in SELDOM_SHOWN:
            await tab.sees(selector, text)
        bars = "#request-list li:has-text('%s') .bar"
        assert await _part_names(tab, bars % "old") == {"queue", "prefill", "decode"}
        assert await _part_names(tab, bars % "strange") == {"queue", "other"}
        assert await _part_names(tab, bars % "refused") == set()
        for scheme in ("light", "dark"):
            await tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            assert await tab.page.evaluate(CONTRASTS) == []
        await tab.page.set_viewport_size(PHONE)  # type: ignore[arg-type]
        assert await tab.page.evaluate(TOO_WIDE) == []
        assert_clean(tab, cluster.url)


async def _part_names(tab: Tab, selector: str) -> set[str]:
    segments = await tab.page.locator(f"{selector} i").evaluate_all(
        "all => all.map(e => e.className)"
    )
    return set(segments)


async def test_a_tab_that_closes_is_forgotten(browser: Browser) -> None:
    """The router does nothing for it any more."""
    async with stub_cluster("d0") as cluster:
        async with open_tab(browser, cluster.url + DASHBOARD_PATH) as tab:
            await tab.sees(LIVE)
            assert cluster.router.events.are_on
        await until(lambda: not cluster.router.events.are_on)

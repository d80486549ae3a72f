"""``PYTHONPATH=tests python -m browser.picture FOLDER``: pictures of the dashboard in front of mock
engines at work, for the docs (``docs/dashboard.png``) and for whoever changes the page to look at.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.browser import open_tab, running_browser
from support.mock_cluster import Cluster, prompt_of, running_cluster

from splitserve.orchestrator.observe.dashboard import DASHBOARD_PATH

if TYPE_CHECKING:
    from playwright.async_api import Browser

CLUSTER = """
name: pictured
engine: mock
model: {path: mock}
router: {port: 0}
prefill: &pool
  replicas: 2
  kv_cache_bytes: 16 MiB
  engine_args:
    {block_size: 32, max_model_len: 2048, seconds_per_prompt_token: 0.0004, seconds_per_step: 0.012}
  transfer: {transport: tcp, stream_min_bytes: 4096}
decode: *pool
supervision: {restart_delay_s: 0.1, drain_timeout_s: 2, stop_timeout_s: 3}
cache:
  chunk_tokens: 64
  tiers: [{type: cpu, capacity_bytes: 16 MiB}, {type: disk, capacity_bytes: 64 MiB}]
"""
LOAD_S = 25.0
CLIENTS = 6
PICTURES: tuple[tuple[str, str, dict[str, int], bool], ...] = (
    ("light", "light", {"width": 1280, "height": 1300}, False),
    ("dark", "dark", {"width": 1280, "height": 1000}, False),
    ("phone-light", "light", {"width": 360, "height": 740}, True),
    ("phone-dark", "dark", {"width": 360, "height": 740}, True),
)
"""Name, scheme, size, and whether the whole page is to be seen."""


async def ask(cluster: Cluster, number: int) -> None:
    """One client with prompts of all lengths, some asked before; ends by cancellation."""
    chance = random.Random(number)
    while True:
        start = chance.randrange(12) if chance.random() < 0.5 else chance.randrange(10**6)
        stream: Any = await cluster.client.completions.create(
            model="mock",
            prompt=prompt_of(chance.choice((20, 300, 600, 1200)), start=start),
            max_tokens=chance.choice((8, 20, 60)),
            stream=True,
        )
        async for _ in stream:
            pass


async def take(browser: Browser, cluster: Cluster, folder: Path) -> None:
    """All pictures, each of a page that has watched for a while."""
    for name, scheme, size, is_whole in PICTURES:
        settings = {"viewport": size, "color_scheme": scheme}
        async with open_tab(browser, cluster.url + DASHBOARD_PATH, **settings) as tab:
            await tab.sees("#live.is-ok")
            await asyncio.sleep(LOAD_S / len(PICTURES))
            await tab.page.click("#hold")
            await tab.page.screenshot(path=folder / f"{name}.png", full_page=is_whole)
            await tab.page.locator("#request-list summary").nth(2).click()
            await tab.page.screenshot(path=folder / f"{name}-open.png", full_page=is_whole)


async def main(folder: Path) -> None:
    """The pictures lie in ``folder``."""
    with tempfile.TemporaryDirectory() as state:
        async with running_cluster(Path(state), CLUSTER) as cluster, running_browser() as browser:
            clients = [asyncio.create_task(ask(cluster, number)) for number in range(CLIENTS)]
            await asyncio.to_thread(cluster.up.run, "flip", "decode-1", "prefill")
            await asyncio.to_thread(cluster.up.run, "flip", "decode-1", "decode")
            await cluster.kill_engine("prefill-1")
            await cluster.engine("prefill-1")
            await take(browser, cluster, folder)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    chosen.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(chosen))

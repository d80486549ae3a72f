"""Debian's Chromium, and one page of it that remembers what it asked for and what it complained
about.
"""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from playwright.async_api import async_playwright

if TYPE_CHECKING:
    import re
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Page

LIMIT_MS = 30_000
DESKTOP = {"width": 1280, "height": 900}

CONTRASTS = """() => {
  const parsed = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parsed(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((each) => each.nodeType === 3)
      .map((each) => each.data.trim()).join("");
    if (!text || !element.getClientRects().length) continue;
    const [a, b] = [parsed(getComputedStyle(element).color), ground(element)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
"""Every text that is shown with less contrast than WCAG's AA asks for."""

TOO_WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.querySelectorAll("body *")]
    .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => `${each.tagName}.${each.className} in #${each.closest("[id]")?.id}`)"""
"""What makes the page scroll sideways."""


@dataclass
class Tab:
    """One page in a context of its own."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings in the console, and what the script did not catch."""
    asked: list[str] = field(default_factory=list)
    """Every URL that was asked for."""

    async def count(self, selector: str) -> int:
        return await self.page.locator(selector).count()

    async def sees(self, selector: str, text: str | re.Pattern[str] = "") -> None:
        """Wait until that is visible, with that text in it."""
        found = self.page.locator(selector, has_text=text or None).first
        await found.wait_for(state="visible", timeout=LIMIT_MS)


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Chromium without a window."""
    path = shutil.which("chromium")
    assert path, "install Debian's package chromium: the dashboard's tests drive it"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def open_tab(
    browser: Browser, url: str, *, told: bytes | None = None, **settings: Any
) -> AsyncIterator[Tab]:
    """A page of its own that has loaded ``url``. The router's live events are ``told``, if given,
    and not its own.
    """
    context = await browser.new_context(**({"viewport": DESKTOP, "locale": "en-GB"} | settings))
    page = await context.new_page()
    if told is not None:
        await page.route(
            "**/internal/events",
            lambda route: route.fulfill(body=told, content_type="text/event-stream"),
        )
    tab = Tab(page)

    def complain(text: str) -> None:
        tab.complaints.append(text)

    page.on("console", lambda m: complain(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complain(str(error)))
    page.on("request", lambda request: tab.asked.append(request.url))
    try:
        await page.goto(url)
        yield tab
    finally:
        await context.close()

"""Pages in headless Chromium: when the first content is painted, and when all of it is there."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

_PAINTED = """() => new Promise(done => {
  const found = () => performance.getEntriesByName("first-contentful-paint")[0];
  if (found()) return done(found().startTime);
  new PerformanceObserver((_, self) => {
    if (found()) { self.disconnect(); done(found().startTime); }
  }).observe({type: "paint", buffered: true});
})"""
_LOADED = "() => performance.getEntriesByType('navigation')[0].loadEventEnd"
_DRAWN = "() => performance.getEntriesByName('heat-drawn')[0].startTime"
_BYTES = """() => performance.getEntriesByType("navigation").concat(
  performance.getEntriesByType("resource")).reduce((sum, one) => sum + one.transferSize, 0)"""


@dataclass
class Loads:
    """Milliseconds of each load of a page, and the bytes of the first one."""

    painted_ms: list[float] = field(default_factory=list)
    complete_ms: list[float] = field(default_factory=list)
    first_bytes: int = 0


@asynccontextmanager
async def browser(url: str, token: str) -> AsyncIterator[Any]:
    """A page that is logged in. Raises where no Chromium is installed."""
    from playwright.async_api import async_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise FileNotFoundError("there is no chromium here")
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        page = await (await chromium.new_context(base_url=url)).new_page()
        await page.goto("/login")
        await page.fill("#token", token)
        await page.click("button.primary")
        await page.wait_for_url(f"{url}/")
        yield page
        await chromium.close()


async def loads(page: Any, paths: Sequence[str], times: int, drawn: str = "") -> Loads:
    """Load each path `times` times; a selector in `drawn` says when the picture is there."""
    found = Loads()
    for _ in range(times):
        for path in paths:
            await page.goto(path, wait_until="load")
            found.painted_ms.append(await page.evaluate(_PAINTED))
            if drawn:
                await page.wait_for_selector(drawn, timeout=60_000)
            found.complete_ms.append(await page.evaluate(_DRAWN if drawn else _LOADED))
            found.first_bytes = found.first_bytes or await page.evaluate(_BYTES)
    return found

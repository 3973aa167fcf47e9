"""The dashboard in a real Chromium: every page, both themes, three widths, and no complaint."""

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.integration.history.dashboard.fleet_facts import (
    JOB,
    KILLED,
    STALLED,
    UNRIGHT,
    UNRIGHT_JOB,
    node,
)

pytest.importorskip("playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here"),
    pytest.mark.timeout(300),
]
PICTURES = os.environ.get("EVERSTEP_TEST_PICTURES", "")
"""The folder for screenshots; none are written without it."""
WIDTHS = {"phone": 390, "tablet": 834, "desk": 1440}
THEMES = ("light", "dark")
PAGES = {
    "fleet": "/",
    "jobs": "/jobs",
    "job": f"/jobs/{JOB}",
    "job-numerics": f"/jobs/{UNRIGHT_JOB}",
    "incident-numerics": f"/incidents/{UNRIGHT}",
    "ranks": f"/jobs/{JOB}/ranks?rank=93",
    "logs": f"/jobs/{JOB}/logs",
    "logs-search": f"/jobs/{JOB}/logs?find=loss&rank=0-3",
    "logs-none": "/jobs/moe-8x7b-sft/logs",
    "stragglers": f"/jobs/{JOB}/stragglers",
    "checkpoints": f"/jobs/{JOB}/checkpoints",
    "holders": f"/jobs/{JOB}/checkpoints/holders?step=57500&tier=peer",
    "incidents": "/incidents",
    "incident": f"/incidents/{KILLED}",
    "incident-stall": f"/incidents/{STALLED}",
    "nodes": "/nodes",
    "node": f"/nodes/{node(18)}",
    "facts": "/facts",
    "control": "/control",
    "action": f"/do/stop?job={JOB}",
    "not-found": "/jobs/no-such-job",
}


@dataclass
class Site:
    """A served fleet, and a token for it."""

    url: str
    token: str


@dataclass
class Heard:
    """What a page asked for and complained about."""

    url: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def listen(self, page: Any) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: self.requests.append(asked.url))

    def _on_console(self, said: Any) -> None:
        if said.type in {"error", "warning"} and "status of 404" not in said.text:
            self.complaints.append(said.text)

    @property
    def foreign(self) -> list[str]:
        return [url for url in self.requests if not url.startswith((self.url, "data:", "blob:"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from served(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def empty_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from served(tmp_path_factory.mktemp("empty"), "--empty")


def served(folder: Path, *more: str) -> Iterator[Site]:
    command = [
        sys.executable,
        "-m",
        "tests.integration.history.dashboard.dashboard_story",
        str(folder),
        "0",
        *more,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, _, token = process.stdout.readline().split()
        yield Site(url, token)
        process.terminate()


@asynccontextmanager
async def chromium(site: Site, width: int, theme: str) -> AsyncIterator[Any]:
    """A page of a browser of its own, where nobody is logged in."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser: Any = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        context = await browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, base_url=site.url
        )
        yield await context.new_page()
        await browser.close()


@asynccontextmanager
async def logged_in(site: Site, width: int = 1440, theme: str = "light") -> AsyncIterator[Any]:
    """The fleet, in a browser that is logged in."""
    async with chromium(site, width, theme) as page:
        await page.goto("/login")
        await page.fill("#token", site.token)
        await page.click("button.primary")
        await page.wait_for_url(f"{site.url}/")
        yield page


async def keep(page: Any, name: str, *, is_whole: bool = True) -> None:
    if PICTURES:
        await page.screenshot(path=f"{PICTURES}/{name}.png", full_page=is_whole)


async def is_scrolled_sideways(page: Any) -> bool:
    found: bool = await page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    return found


async def test_every_page_stands_without_a_complaint(site: Site) -> None:
    """No console error, no request elsewhere, and nothing wider than the screen."""
    async with logged_in(site) as page:
        heard = Heard(site.url)
        heard.listen(page)
        for name, path in PAGES.items():
            await page.goto(path)
            if name == "ranks":
                await page.wait_for_selector("#heat-map[data-drawn]")
            for (width, wide), theme in product(WIDTHS.items(), THEMES):
                await page.set_viewport_size({"width": wide, "height": 900})
                await page.emulate_media(color_scheme=theme)
                await keep(page, f"{name}-{width}-{theme}")
                assert not await is_scrolled_sideways(page), (name, width, theme)
    assert heard.complaints == []
    assert heard.foreign == []


WIDE = ".wide[aria-label^=Nodes]"
WITHOUT_STREAM = "window.EventSource = class { addEventListener() {} close() {} }"
"""No fact arrives, so that the page does not change."""


@pytest.mark.parametrize("theme", THEMES)
async def test_a_table_that_is_cut_shows_where_it_goes_on(site: Site, theme: str) -> None:
    """A shadow at the edge, which is gone at the end; the arrow keys scroll the table."""
    async with logged_in(site, WIDTHS["phone"], theme) as page:
        await page.add_init_script(WITHOUT_STREAM)
        await page.goto("/nodes")
        table = page.get_by_role("region", name="Nodes, table", exact=True)
        await table.scroll_into_view_if_needed()
        await table.evaluate("box => box.firstElementChild.style.visibility = 'hidden'")
        right, middle = await stripe(page, table, 0.99), await stripe(page, table, 0.5)
        assert right != middle
        await table.evaluate("box => box.scrollLeft = box.scrollWidth")
        assert await stripe(page, table, 0.99) == middle
        assert await stripe(page, table, 0.001) != middle
        await table.evaluate("box => box.scrollLeft = 0")
        await table.focus()
        await page.keyboard.press("ArrowRight")
        await page.wait_for_function(f"() => document.querySelector('{WIDE}').scrollLeft > 0")


async def test_a_table_that_fits_has_no_shadow(site: Site) -> None:
    async with logged_in(site, 2400) as page:
        await page.add_init_script(WITHOUT_STREAM)
        await page.goto("/jobs")
        table = page.get_by_role("region", name="Jobs, table", exact=True)
        await table.evaluate("box => box.firstElementChild.style.visibility = 'hidden'")
        middle = await stripe(page, table, 0.5)
        assert await stripe(page, table, 0.001) == middle
        assert await stripe(page, table, 0.99) == middle


async def stripe(page: Any, box: Any, part: float) -> bytes:
    """A picture of three columns of a box, at a part of its width."""
    inside = await box.bounding_box()
    x = inside["x"] + part * (inside["width"] - 3)
    clip = {"x": x, "y": inside["y"], "width": 3, "height": min(inside["height"], 200)}
    picture: bytes = await page.screenshot(clip=clip)
    return picture


async def test_empty_pages_name_the_command_to_run(empty_site: Site) -> None:
    async with logged_in(empty_site) as page:
        for name in ("", "jobs", "incidents", "nodes", "facts"):
            await page.goto(f"/{name}")
            await keep(page, f"empty-{name or 'fleet'}")
            assert "everstep " in await page.inner_text(".empty"), name


@pytest.mark.parametrize("theme", THEMES)
async def test_whoever_is_not_logged_in_comes_to_the_login(site: Site, theme: str) -> None:
    async with chromium(site, 1440, theme) as page:
        await page.goto("/jobs")
        assert page.url.endswith("/login?next=/jobs")
        await keep(page, f"login-{theme}", is_whole=False)


async def test_a_theme_that_was_chosen_stays(site: Site) -> None:
    async with logged_in(site) as page:
        await page.click("#theme")
        assert await page.get_attribute("html", "data-theme") == "dark"
        await page.goto("/jobs")
        assert await page.get_attribute("html", "data-theme") == "dark"


async def test_a_page_is_live(site: Site) -> None:
    """The stream is open, and the page shows it."""
    async with logged_in(site) as page:
        await page.wait_for_selector("#live[data-state=on]")


async def test_lines_of_logs_appear_as_ranks_write_them(site: Site) -> None:
    """Also with colours, and markup stays text (A13.3)."""
    async with logged_in(site) as page:
        heard = Heard(site.url)
        heard.listen(page)
        await page.goto(f"/jobs/{JOB}/logs?rank=0")
        await page.wait_for_selector("#live[data-state=on]")
        before = await page.locator("#rank-log li").count()
        await page.wait_for_function(
            "count => document.querySelectorAll('#rank-log li').length > count + 1", arg=before
        )
        line = page.locator("#rank-log li").last
        assert await line.locator("code .ansi-green").inner_text() == "loss"
        assert "<b>" in await line.locator("code").inner_text()
        assert await page.locator("#rank-log :is(b, script)").count() == 0
        assert "new line" in await page.inner_text("#log-says")
    assert heard.complaints == []


async def test_the_script_writes_a_line_as_the_server_does(site: Site) -> None:
    """A line is the same whether it was there or arrives."""
    async with logged_in(site) as page:
        await page.goto(f"/jobs/{JOB}/logs?rank=0")
        await page.wait_for_function(
            "() => document.querySelector('#log-says').textContent.length > 5"
        )
        arrived = await page.locator("#rank-log li").last.evaluate(_SHAPE)
        await page.click("#follow")
        await page.reload()
        texts = await page.locator("#rank-log li").evaluate_all(f"all => all.map({_SHAPE})")
        assert arrived in texts


_SHAPE = """item => [item.className, item.querySelector('code').innerHTML,
    item.querySelector('.log-at').textContent, item.querySelector('.log-rank').textContent,
    item.querySelector('.log-at').title.slice(0, 19)].join('|')"""


async def test_the_heat_map_is_read_with_the_keyboard(site: Site) -> None:
    async with logged_in(site) as page:
        await page.goto(f"/jobs/{JOB}/ranks")
        await page.wait_for_selector("#heat-map[data-drawn]")
        await page.focus("#heat-map")
        await page.keyboard.press("ArrowDown")
        said = await page.inner_text("#heat-says")
        assert said.startswith("Rank 1 on gpu-000, steps ")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**rank=1")


@pytest.mark.skipif(not PICTURES, reason="nobody wants pictures")
async def test_pictures_of_the_guide(site: Site) -> None:
    """`docs/images/dashboard-*.png` come from here, by `python docs/pictures.py`."""
    async with logged_in(site, 1120) as page:
        for name in ("fleet", "job", "incident", "ranks", "stragglers"):
            await page.set_viewport_size({"width": 1120, "height": 760})
            await page.goto(PAGES[name])
            await page.wait_for_selector("#live[data-state=on]")
            if name == "ranks":
                await page.wait_for_selector("#heat-map[data-drawn]")
                await page.evaluate("scrollTo(0, document.querySelector('#heat').offsetTop - 70)")
            await keep(page, f"dashboard-{name}", is_whole=False)

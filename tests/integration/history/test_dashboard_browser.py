"""The dashboard in a real Chromium: every page, both themes, three widths, and no complaint."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.history.dashboard_story import JOB, KILLED, STALLED, node

pytest.importorskip("playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here"),
    pytest.mark.timeout(300),
]
PICTURES = os.environ.get("EVERSTEP_TEST_PICTURES", "")
"""The folder for screenshots; none are written without it."""
WIDTHS = {"phone": 390, "tablet": 834, "desk": 1440}
PAGES = {
    "fleet": "/",
    "jobs": "/jobs",
    "job": f"/jobs/{JOB}",
    "ranks": f"/jobs/{JOB}/ranks?rank=93",
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
        "tests.integration.history.dashboard_story",
        str(folder),
        "0",
        *more,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, _, token = process.stdout.readline().split()
        yield Site(url, token)
        process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def logged_in(browser: Any, site: Site, width: int, theme: str) -> Any:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, base_url=site.url
    )
    page = context.new_page()
    page.goto("/login")
    page.fill("#token", site.token)
    page.click("button.primary")
    page.wait_for_url(f"{site.url}/")
    return page


def keep(page: Any, name: str) -> None:
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{PICTURES}/{name}.png", full_page=True)


def is_scrolled_sideways(page: Any) -> bool:
    found: bool = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_stands_without_a_complaint(
    browser: Any, site: Site, width: str, theme: str
) -> None:
    """No console error, no request elsewhere, and nothing wider than the screen."""
    page = logged_in(browser, site, WIDTHS[width], theme)
    heard = Heard(site.url)
    heard.listen(page)
    for name, path in PAGES.items():
        page.goto(path)
        if name == "ranks":
            page.wait_for_selector("#heat-map[data-drawn]")
        keep(page, f"{name}-{width}-{theme}")
        assert not is_scrolled_sideways(page), name
    assert heard.complaints == []
    assert heard.foreign == []
    page.context.close()


def test_empty_pages_name_the_command_to_run(browser: Any, empty_site: Site) -> None:
    page = logged_in(browser, empty_site, WIDTHS["desk"], "light")
    for name, path in (("fleet", "/"), ("jobs", "/jobs"), ("incidents", "/incidents"),
                       ("nodes", "/nodes"), ("facts", "/facts")):  # fmt: skip
        page.goto(path)
        keep(page, f"empty-{name}")
        assert "everstep " in page.inner_text(".empty"), name
    page.context.close()


def test_the_login_page_looks_the_same_without_a_session(browser: Any, site: Site) -> None:
    for theme in ("light", "dark"):
        context = browser.new_context(
            viewport={"width": 1440, "height": 900}, color_scheme=theme, base_url=site.url
        )
        page = context.new_page()
        page.goto("/jobs")
        assert page.url.endswith("/login?next=/jobs")
        keep(page, f"login-{theme}")
        context.close()


def test_a_theme_that_was_chosen_stays(browser: Any, site: Site) -> None:
    page = logged_in(browser, site, WIDTHS["desk"], "light")
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.goto("/jobs")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.context.close()


def test_a_page_is_live(browser: Any, site: Site) -> None:
    """The stream is open, and the page says so."""
    page = logged_in(browser, site, WIDTHS["desk"], "light")
    page.wait_for_selector("#live[data-state=on]")
    page.context.close()


def test_the_heat_map_is_read_with_the_keyboard(browser: Any, site: Site) -> None:
    page = logged_in(browser, site, WIDTHS["desk"], "light")
    page.goto(f"/jobs/{JOB}/ranks")
    page.wait_for_selector("#heat-map[data-drawn]")
    page.focus("#heat-map")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#heat-says").startswith("Rank 1 on gpu-000, steps ")
    page.keyboard.press("Enter")
    page.wait_for_url("**rank=1")
    page.context.close()

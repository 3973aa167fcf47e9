"""Each page, in both themes, before axe-core in a real Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.history.dashboard.test_dashboard_browser import (
    CHROMIUM,
    PAGES,
    Site,
    logged_in,
    served,
)

axe = pytest.importorskip("axe_playwright_python")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here"),
    pytest.mark.timeout(600),
    pytest.mark.variant,  # some seconds of a processor for each page
]
_ALSO = {"landmark-unique"}
"""Regions with tables: each needs a name of its own."""
SCRIPT = (Path(axe.__file__).parent / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def axe_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from served(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_axe_has_no_serious_finding_on_any_page(axe_site: Site, theme: str) -> None:
    """Contrast, names, roles and landmarks; each region has a name of its own."""
    found: list[str] = []
    async with logged_in(axe_site, theme=theme) as page:
        for name, path in PAGES.items():
            await page.goto(path)
            await page.evaluate(SCRIPT)
            result: dict[str, Any] = await page.evaluate("axe.run()")
            found += [
                f"{name}: {violation['id']}: {node['html'][:200]}"
                for violation in result["violations"]
                if violation["impact"] in {"serious", "critical"} or violation["id"] in _ALSO
                for node in violation["nodes"]
            ]
            assert result["passes"], name
    assert found == []

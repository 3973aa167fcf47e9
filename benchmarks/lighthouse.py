"""What Lighthouse says about each page of the dashboard, in both themes.

    npm install --prefix ~/lighthouse lighthouse@12
    python -m benchmarks.lighthouse --program ~/lighthouse/node_modules/.bin/lighthouse

The pages are those of the test that makes screenshots, served by the product with the same made-up
fleet. Lighthouse needs Node 20 and Chromium, and is not installed by `make`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.history.dashboard.test_dashboard_browser import CHROMIUM, PAGES, Site, served

CATEGORIES = ("accessibility", "best-practices")
LEAST = 95
_FLAGS = "--headless=new --no-sandbox --disable-gpu"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def session_cookie(site: Site) -> str:
    """Log in, as the form does."""
    form = urllib.parse.urlencode({"token": site.token}).encode()
    request = urllib.request.Request(f"{site.url}/login", form, {"Origin": site.url})
    try:
        urllib.request.build_opener(_NoRedirect).open(request)
    except urllib.error.HTTPError as error:
        return str(error.headers["Set-Cookie"]).partition(";")[0]
    raise RuntimeError("the login has no cookie")


def examined(program: str, url: str, cookie: str) -> Mapping[str, Any]:
    """Lighthouse's report of one page."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [
            program, url, "--quiet", "--output=json", f"--output-path={out}",
            f"--only-categories={','.join(CATEGORIES)}", "--preset=desktop",
            f"--extra-headers={json.dumps({'Cookie': cookie})}", f"--chrome-flags={_FLAGS}",
            "--max-wait-for-load=60000", "--ignore-status-code",
        ]  # fmt: skip
        environ = {**os.environ, "CHROME_PATH": str(CHROMIUM)}
        subprocess.run(command, env=environ, check=True, timeout=300)
        report: Mapping[str, Any] = json.loads(out.read_text())
    return report


def failed_audits(report: Mapping[str, Any]) -> Iterator[str]:
    """What costs points, and where."""
    for category in CATEGORIES:
        for reference in report["categories"][category]["auditRefs"]:
            audit = report["audits"][reference["id"]]
            if reference["weight"] and audit["score"] is not None and audit["score"] < 1:
                items = (audit.get("details") or {}).get("items") or [{}]
                where = (items[0].get("node") or {}).get("snippet") or json.dumps(items[0])[:160]
                yield f"{category}: {audit['id']}: {where}"


@contextmanager
def fleet() -> Iterator[Site]:
    """The made-up fleet, served."""
    with tempfile.TemporaryDirectory() as folder:
        running = served(Path(folder))
        try:
            yield next(running)
        finally:
            next(running, None)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each page and theme; 1 when a page has fewer points than it must have."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lighthouse")
    parser.add_argument("--program", default=shutil.which("lighthouse") or "")
    parser.add_argument("--pages", nargs="*", default=list(PAGES), choices=list(PAGES))
    parser.add_argument("--themes", nargs="*", default=["light", "dark"], choices=["light", "dark"])
    asked = parser.parse_args(arguments)
    if not asked.program or CHROMIUM is None:
        print("skipped: Lighthouse needs Chromium, and `npm install lighthouse@12`: see --program")
        return 0
    too_few = 0
    with fleet() as site:
        cookie = session_cookie(site)
        for theme in asked.themes:
            for name in asked.pages:
                url = f"{site.url}{PAGES[name]}"
                report = examined(asked.program, url, f"{cookie}; everstep_theme={theme}")
                points = {
                    one: round(100 * (report["categories"][one]["score"] or 0))
                    for one in CATEGORIES
                }
                too_few += any(point < LEAST for point in points.values())
                print(f"{name:<16}{theme:<7}{'  '.join(f'{a} {b}' for a, b in points.items())}")
                for line in failed_audits(report):
                    print(f"    {line}")
                sys.stdout.flush()
    return 1 if too_few else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Makes the pictures of the dashboard in docs/images, by the test that makes screenshots.

    python docs/pictures.py

It needs Chromium, and what `make setup` installs. The pictures show a fleet that
`tests/integration/history/dashboard/dashboard_story.py` makes up; times in them are relative, so
that two runs differ a little.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST = "tests/integration/history/dashboard/test_dashboard_browser.py::test_pictures_of_the_guide"


def main() -> int:
    """The exit code of the test."""
    environ = {**os.environ, "EVERSTEP_TEST_PICTURES": str(ROOT / "docs/images")}  # noqa: TID251
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", TEST]
    return subprocess.run(command, env=environ, cwd=ROOT, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())

"""The examples of the guide to frameworks run as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/guides/frameworks.md"
WITHIN_S = 500.0


def examples() -> dict[str, str]:
    """The Python of each section that has any."""
    sections = re.split(r"^## ", GUIDE.read_text(encoding="utf-8"), flags=re.M)[1:]
    by_name = {}
    for section in sections:
        name, _, body = section.partition("\n")
        code = "\n".join(re.findall(r"^```python\n(.*?)^```$", body, re.M | re.S))
        if code:
            by_name[name] = code
    return by_name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", examples())
def test_the_example_runs_as_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(examples()[name])
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "libs", "services"))
    done = subprocess.run(
        [sys.executable, "example.py"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    if "No module named" in done.stderr and "trainer_sdk" not in done.stderr.splitlines()[-1]:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr

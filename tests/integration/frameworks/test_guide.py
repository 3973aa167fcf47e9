"""The examples of the guide to frameworks run as written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from trainer_sdk import layout
from trainer_sdk.checkpoint.job_context import read_job_context

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
    run(name, tmp_path)


@pytest.mark.timeout(600)
def test_the_example_of_dcp_runs_in_a_round_that_an_agent_counts(tmp_path: Path) -> None:
    """After a load without `keep_memory`, states that are kept in memory are found (A8.8)."""
    environ = {layout.ROUND_VARIABLE: "1", "EVERSTEP_JOB": f"guide-{uuid4().hex[:8]}"}
    try:
        run("torch.distributed.checkpoint", tmp_path, **environ)
    finally:
        shutil.rmtree(read_job_context(environ).images, ignore_errors=True)


def run(name: str, tmp_path: Path, **environ: str) -> None:
    (tmp_path / "example.py").write_text(examples()[name])
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "libs", "services"))
    done = subprocess.run(
        [sys.executable, "example.py"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ},
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

"""`everstep logs analyze` on what real gloo ranks and torchrun wrote when a rank failed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep_services.cli.__main__ import main

_SCRIPT = Path(__file__).parents[1] / "scripts/failing_ranks.py"
pytestmark = pytest.mark.timeout(180)  # each rank imports torch


@pytest.mark.parametrize(
    ("fault", "failure_class"),
    [("raise", "python_exception"), ("segfault", "segfault"), ("kill", "killed")],
)
def test_a_real_failure_is_named(
    fault: str, failure_class: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A4.5: the rank that failed, from the output of all, without @record."""
    log = tmp_path / "job.log"
    words = ["--standalone", "--nproc-per-node=3", str(_SCRIPT), fault, "1"]
    with log.open("wb") as file:
        code = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
    assert code != 0
    assert main(["logs", "analyze", str(log), "-o", "json"]) == 3
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["cause"]["failure_class"] == failure_class
    assert report["culprits"] == [1], log.read_text()

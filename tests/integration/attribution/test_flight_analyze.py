"""`everstep fr analyze` on dumps that real gloo ranks wrote while they hung."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from everstep_services.cli.__main__ import main

_ROOT = Path(__file__).parents[3]
_SCRIPT = _ROOT / "tests/integration/scripts/hung_ranks.py"
pytestmark = pytest.mark.timeout(180)  # each rank imports torch


def hang(fault: str, world: int, folder: Path) -> None:
    environ = {
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "libs"), str(_ROOT / "services")]),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as started:
        ranks = []
        for rank in range(world):
            words = [fault, str(rank), str(world), str(folder)]
            process = subprocess.Popen([sys.executable, _SCRIPT, *words], env=environ)
            ranks.append(started.enter_context(process))
            started.callback(process.kill)
        assert [rank.wait(timeout=150) for rank in ranks] == [0] * world


def analyze(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = main(["fr", "analyze", *arguments, "-o", "json"])
    return code, json.loads(capsys.readouterr().out)["report"]


def test_a_rank_that_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A7.1: with real dumps, pickle and JSON, of ranks that hang (A7.5)."""
    hang("leave", 3, tmp_path)
    past = tmp_path.stat().st_mtime - 60
    for path in (*tmp_path.glob("dump_*"), *tmp_path.glob("json_*")):
        os.utime(path, (past + 120, past + 120))  # as if they had hung for a minute
    for prefix in ("dump_", "json_"):
        code, report = analyze([str(tmp_path), "-p", prefix], capsys)
        assert (code, report["verdict"], report["dumps"]) == (3, "culprits", 3)
        (fault,) = report["faults"]
        assert (fault["kind"], [one["rank"] for one in fault["suspects"]]) == ("never_joined", [1])
        assert fault["waiting"] == [0, 2]
    assert main(["fr", "analyze", str(tmp_path), "-p", "dump_"]) == 3
    text = capsys.readouterr().out
    assert text.startswith("rank 1 never joined all_reduce of 4x3 Float")
    assert "hung_ranks.py:" in text


def test_two_groups_in_another_order_are_a_circle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real ranks hang in gloo (A7.1, A7.5)."""
    hang("order", 2, tmp_path)
    later = tmp_path.stat().st_mtime + 60
    for path in tmp_path.glob("dump_*"):
        os.utime(path, (later, later))
    code, report = analyze([str(tmp_path), "-p", "dump_"], capsys)
    assert (code, report["faults"][0]["kind"]) == (3, "cycle")
    assert [one["rank"] for one in report["faults"][0]["suspects"]] == [0, 1]


def test_dumps_that_were_taken_in_passing_accuse_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hang("leave", 2, tmp_path)
    for path in tmp_path.glob("json_*"):  # written as soon as everybody stood
        newest = max(one["time_created_ns"] for one in json.loads(path.read_bytes())["entries"])
        os.utime(path, ns=(newest + 1_000_000, newest + 1_000_000))
    code, report = analyze([str(tmp_path), "-p", "json_"], capsys)
    assert (code, report["verdict"], report["faults"]) == (1, "inconclusive", [])


def test_what_is_wrong_with_a_folder_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fr", "analyze", str(tmp_path)]) == 2
    assert "pass the folder of the dumps" in capsys.readouterr().err

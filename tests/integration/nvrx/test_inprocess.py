"""NVRx's in-process restart with real gloo ranks: the processes stay, and the function restarts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ports import free_port
from trainer_sdk.nvrx import aliases

SCRIPT = Path(__file__).parent / "scripts" / "wrapped_ranks.py"
WITHIN_S = 400
STEPS = 6


def trained(folder: Path, fault: str, ranks: int) -> list[int]:
    """The exit codes of the ranks of a training without an agent."""
    codes: list[int] = printed(SCRIPT, str(folder), str(ranks), fault, str(free_port()))
    return codes


def printed(script: Path, *arguments: str, **environ: str) -> Any:
    """The last line that a script prints, which is JSON."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([aliases.FOLDER, str(SCRIPT.parents[4])]),
            "EVERSTEP_ATTACH": "off",
            "OMP_NUM_THREADS": "1",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def ends(folder: Path) -> dict[int, list[int]]:
    """Iteration, number, number of ranks, and sum, which each initial rank has seen last."""
    return {
        int(path.name.removeprefix("end-")): json.loads(path.read_text())
        for path in sorted(folder.glob("end-*"))
    }


@pytest.mark.timeout(WITHIN_S + 60)
def test_all_ranks_restart_in_their_processes_when_one_raises(tmp_path: Path) -> None:
    """Rank 1 raises while the others wait for it in a collective; all begin again."""
    assert trained(tmp_path, "raises", 2) == [0, 0]
    assert ends(tmp_path) == {0: [1, 0, 2, 2 * STEPS], 1: [1, 1, 2, 2 * STEPS]}
    finalized = [(tmp_path / f"finalized-{rank}").read_text() for rank in range(2)]
    assert finalized == ["0 NoneType\n", "0 RuntimeError\n"]  # a consequence is not a fault
    assert [(tmp_path / f"result-{rank}").read_text() for rank in range(2)] == ["0", "1"]


@pytest.mark.variant
@pytest.mark.timeout(WITHIN_S + 60)
@pytest.mark.parametrize(
    ("fault", "codes", "expected"),
    [
        ("excluded", [0, 1, 0], {0: [1, 0, 2, 2 * STEPS], 2: [1, 1, 2, 2 * STEPS]}),
        ("reserve", [0, 1, 0], {0: [1, 0, 2, 2 * STEPS], 2: [1, 1, 2, 2 * STEPS]}),
        ("killed", [0, -9, 0], {0: [1, 0, 2, 2 * STEPS], 2: [1, 1, 2, 2 * STEPS]}),
        ("stuck", [0, -15, 0], {0: [1, 0, 2, 2 * STEPS], 2: [1, 1, 2, 2 * STEPS]}),
        ("hung", [0, 0, 0], {rank: [1, rank, 3, 3 * STEPS] for rank in range(3)}),
    ],
)
def test_the_others_train_on(
    tmp_path: Path, fault: str, codes: list[int], expected: dict[int, list[int]]
) -> None:
    """A rank that ends is replaced or left out; one that hangs takes part again."""
    assert trained(tmp_path, fault, 3) == codes
    assert ends(tmp_path) == expected


@pytest.mark.timeout(WITHIN_S + 60)
def test_the_others_train_on_without_ranks_that_are_gone_with_their_monitors(
    tmp_path: Path,
) -> None:
    """As with a node: the kernel tells the monitor of the first rank, although a fork remains."""
    assert trained(tmp_path, "vanished", 4) == [0, -9, -9, 0]
    assert ends(tmp_path) == {0: [1, 0, 2, 2 * STEPS], 3: [1, 1, 2, 2 * STEPS]}


@pytest.mark.variant
@pytest.mark.timeout(WITHIN_S + 60)
def test_a_hundred_restarts_leave_no_files_threads_or_objects() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    script = SCRIPT.with_name("restarting.py")
    held = printed(script, "100", **rank, MASTER_PORT=str(free_port()))
    assert len(held) == 101
    assert held[100] == held[5]

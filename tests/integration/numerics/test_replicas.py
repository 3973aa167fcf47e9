"""Which ranks' parameters are compared, on real gloo ranks with the wrappers that torch has."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("replicas.py")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Sequence[dict[str, Any]]:
    """What each rank says of each kind of wrapper."""
    folder = tmp_path_factory.mktemp("replicas")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize(
    ("kind", "ranks", "group"),
    [
        ("ddp", [3], "module.0.up.weight"),
        ("given", [3], "0.up.weight"),
        ("replicate", [3], "0.up.weight"),
        # Two replicas of each part: nothing tells which of them is right.
        ("stages", [2, 3], "module.up.weight"),
        ("hsdp", [1, 3], "0.up.weight"),
        ("tp", [2, 3], "0.norm.weight"),
        # Each rank has a part of its own, or nobody says whether the parts are equal.
        ("fsdp", None, None),
        ("none", None, None),
    ],
)
def test_only_true_replicas_are_compared(
    kind: str, ranks: list[int] | None, group: str | None, results: Sequence[dict[str, Any]]
) -> None:
    judged = [None, *[["replica_differs", ranks, group]] * 2] if ranks else []
    expected = {"has": ranks is not None, "judged": judged}
    assert [result[kind] for result in results] == [expected] * 4

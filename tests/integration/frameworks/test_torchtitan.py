"""torchtitan's checkpoint manager saves and loads through Everstep; its trainer needs a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.frameworks.ranks import ROOT, launch

RELEASE = "torchtitan==0.3.0"
NEEDED = (
    *("datasets", "dill", "docstring_parser", "fsspec", "multiprocess", "pandas", "pyarrow"),
    *("tensorboard", "torchdata", "triton", "typeguard", "tyro", "xxhash"),
)
WITHIN_S = 400.0


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torchtitan in a folder of its own, without the torch that it asks for."""
    folder = tmp_path_factory.mktemp("torchtitan")
    pip = [sys.executable, "-m", "pip", "-qq", "install", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, RELEASE, *NEEDED], check=True, timeout=WITHIN_S)
    return folder


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_its_manager_saves_loads_verified_and_ends_at_a_preemption(
    titan: Path, tmp_path: Path, mode: str
) -> None:
    """A damaged step 11 is passed over for step 10; a preemption saves and ends (A8.8, A12.1)."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "libs", ROOT / "services", titan]))
    printed = launch("titan.py", str(tmp_path), mode, PYTHONPATH=path)
    assert "the training is preempted: it has saved step 11" in printed

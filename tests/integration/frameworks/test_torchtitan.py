"""torchtitan's checkpoint manager saves and loads through Everstep; its trainer needs a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from tests.integration.frameworks.ranks import ROOT, launch
from trainer_sdk.checkpoint.job_context import read_job_context

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
    printed = launch("titan.py", str(tmp_path), mode, PYTHONPATH=path_with(titan))
    assert "the training is preempted: it has saved step 11" in printed


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_with_keep_memory_it_loads_from_the_memory_of_the_node(
    titan: Path, tmp_path: Path, mode: str
) -> None:
    """Also a step whose folder is gone; a damaged image is passed over (A8.8, A9.1)."""
    job = f"titan-{uuid4().hex[:8]}"
    images = Path(read_job_context({"EVERSTEP_JOB": job}).images)
    path = path_with(titan)
    try:
        launch(*("titan.py", str(tmp_path), mode, "keep_memory"), PYTHONPATH=path, EVERSTEP_JOB=job)
    finally:
        shutil.rmtree(images, ignore_errors=True)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_that_breaks_the_loss_is_gone_back_over_and_skipped(
    titan: Path, tmp_path: Path, ranks: int
) -> None:
    """The suspect checkpoint is not loaded; no other batch is left out."""
    launch("titan_numerics.py", str(tmp_path), ranks=ranks, PYTHONPATH=path_with(titan))


def path_with(titan: Path) -> str:
    return os.pathsep.join(map(str, [ROOT, ROOT / "libs", ROOT / "services", titan]))

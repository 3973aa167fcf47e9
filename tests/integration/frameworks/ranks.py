"""Ranks of a script, as processes that a launcher without an agent would start."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[3]
WITHIN_S = 500.0


def launch(script: str, *arguments: str, ranks: int = 1, **environ: str) -> str:
    """Run a script on `ranks` ranks; returns what they have printed, once all have succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPTS / script), *arguments],
                env={**os.environ, **_place(rank, ranks, folder), **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            printed = [process.communicate(timeout=WITHIN_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    whole = "\n".join(printed)
    assert [process.returncode for process in processes] == [0] * ranks, whole
    return whole


def _place(rank: int, ranks: int, folder: str) -> dict[str, str]:
    """The environment of a rank; ranks meet by a file, so that no port is needed.

    A single rank has the environment of a plain `python script.py`.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {
        **({name: str(value) for name, value in place.items()} if ranks > 1 else {}),
        "EVERSTEP_TEST_STORE": f"{folder}/store",
        "EVERSTEP_ATTACH": "off",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "libs"), str(ROOT / "services")]),
        "PYTHONWARNINGS": "default",
    }

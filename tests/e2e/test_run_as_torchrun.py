"""What a script can see of its process: under torchrun, cold, warm. Differences have a reason."""

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import ROOT, SCRIPTS, environment
from tests.integration.cli.test_run_environment import ADDED, OTHERWISE

RANKS = 2
LIBRARY = """
import os, random, warnings
RANK = None
DRAWN, GIVEN = random.Random(), random.Random(7)
warnings.filterwarnings("ignore", message="of a library's own")
warnings.warn("seen while it is imported", FutureWarning)
os.environ["NOISY_WAS_HERE"] = "1"
WARNED = True
"""
PIPED = ("sh", "-c", 'echo "a line" | "$@"', "sh")
SHELL = {"_", "SHLVL", "PWD", "OLDPWD"}

ALL_WAYS = {
    "environ": "see test_run_environment; and what arms torch's flight recorder",
    "line by line": "lines are written as they end; torchrun's -u writes each part of a line",
    "orig_argv": "-u, as above",
    "command line": "the same; a cold rank's shows the bootstrap, which it is too slim to hide",
    "modules": "the bootstrap's own modules are there, and a warm rank has what the forge imported",
    "import hooks": "steps are counted, and stalls seen, once torch is imported",
    "exit handlers": "one more waits for threads of torch that could abort the exit",
    "masks": "faulthandler is enabled, which catches SIGSEGV and its like",
    "descriptors": "output goes to files, and a socket leads to the agent",
    "dies with its parent": "no rank outlives its agent, also after SIGKILL",
}
"""What differs from torchrun on purpose, cold and warm."""
COLD: dict[str, str] = {}
WARM = {"collector": "what the forge imported is kept from the garbage collector, and shared"}
DRAWN = ("drawn", "key", "torch seed", "names")
"""Another in each process."""


def read(into: Path) -> list[dict[str, Any]]:
    """What the ranks wrote; the next ones write there, too."""
    files = [into / f"{rank}.json" for rank in range(RANKS)]
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


def by_torchrun(into: Path, environ: dict[str, str], words: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), *words],
        env=environ, cwd=into.parent, input="a line\n", capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read(into)


@pytest.mark.timeout(400)
def test_a_script_sees_what_it_sees_under_torchrun(cluster: Cluster) -> None:
    """Whatever it looks at, but for what is listed above, with a reason for each."""
    place, into = cluster.folder / "library", cluster.folder / "seen"
    for folder in (place, into):
        folder.mkdir()
    (place / "noisy_library.py").write_text(LIBRARY)
    own = {"PYTHONPATH": f"{ROOT}:{place}", "PYTHONHASHSEED": "0"}
    words = [str(SCRIPTS / "probing.py"), str(into), "word"]
    theirs = by_torchrun(into, environment(cluster.folder, cluster.tag, **own), words)
    ranks = list(theirs)
    for option, reasons in (("--cold", COLD), ("--warm", WARM)):
        agent = cluster.run(
            *[option, "--preload", "noisy_library,numpy", "--nproc-per-node", str(RANKS)], *words,
            node=f"node{option}", within=PIPED, **own,
        )  # fmt: skip
        assert agent.wait() == 0
        # In each rank, and in the process that each of them spawns.
        assert agent.said.count("FutureWarning: seen while it is imported") == 2 * RANKS
        ours = read(into)
        compare(theirs, ours, ALL_WAYS.keys() | reasons.keys())
        ranks += ours
        cluster.job += "2"
    for name in DRAWN:
        assert len({str(rank[name]) for rank in ranks}) == len(ranks), name


def compare(
    theirs: list[dict[str, Any]], ours: list[dict[str, Any]], allowed: Collection[str]
) -> None:
    for one, other in zip(theirs, ours, strict=True):
        different = {name for name in one if one[name] != other[name]} - set(DRAWN)
        shown = {name: (one[name], other[name]) for name in different - set(allowed)}
        assert not shown
        assert other["exit handlers"] == one["exit handlers"] + 1
        assert set(allowed) <= different, "a reason for a difference that is none"
        names = {
            name
            for name in one["environ"].keys() | other["environ"].keys()
            if one["environ"].get(name) != other["environ"].get(name)
        }
        names = {name for name in names if not name.startswith(("EVERSTEP_", "TORCH_FR_"))}
        recording = {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_INCLUDE_STACK_TRACE"}
        assert names <= OTHERWISE.keys() | ADDED.keys() | SHELL | recording
        assert set(one["modules"]) - set(other["modules"]) == set()

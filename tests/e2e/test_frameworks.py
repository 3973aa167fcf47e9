"""Each framework under `everstep run`: unmodified, killed, hanging and preempted.

The table of `docs/guides/frameworks.md` has what these tests prove.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.processes import ROOT, environment
from tests.waiting import until

SCRIPTS = ROOT / "tests/integration/frameworks/scripts"
FRAMEWORKS = {
    "torch": "torch_toy.py",
    "lightning": "lightning_toy.py",
    "transformers": "hugging_face.py",
    "accelerate": "accelerate_toy.py",
    "deepspeed": "deepspeed_toy.py",
}
OF_DEEPSPEED = ("deepspeed==0.19.8", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")
BUILD_OP = """
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
ShareMemCommBuilder().load()
"""
WITHIN_S = 400.0
SET_UP_WITHIN_S = 3000.0
EVERY, FAULT_AT, STEPS = 5, 12, 20
STUCK_S = 10.0

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(7200)]


@pytest.fixture(scope="session")
def deepspeed_environ(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """DeepSpeed in a folder of its own: no other test should import it.

    Ranks without a GPU load an extension that DeepSpeed compiles where it is missing, in a minute
    of two processors. It is compiled here, so that the deadline of a training is for the training.
    """
    folder, built = tmp_path_factory.mktemp("deepspeed"), tmp_path_factory.mktemp("extensions")
    path = [str(ROOT)]
    if importlib.util.find_spec("deepspeed") is None:
        pip = [sys.executable, "-m", "pip", "-qq", "install", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *OF_DEEPSPEED], check=True, timeout=SET_UP_WITHIN_S)
        path.append(str(folder))
    programs = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    environ = {
        "DS_ACCELERATOR": "cpu",
        "PATH": os.pathsep.join(programs),
        "PYTHONPATH": os.pathsep.join(path),
        "TORCH_EXTENSIONS_DIR": str(built),
    }
    as_ranks = environment(tmp_path_factory.mktemp("home"), "deepspeed", **environ)
    build = [sys.executable, "-c", BUILD_OP]
    subprocess.run(build, env=as_ranks, check=True, timeout=SET_UP_WITHIN_S)
    return environ


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "deepspeed":
        pytest.importorskip(name, reason=f"{name} is not installed")
    return name


class Toy:
    """The toy training of a framework, on two ranks of one node."""

    def __init__(self, cluster: Cluster, framework: str, environ: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._script = str(SCRIPTS / FRAMEWORKS[framework])
        self._environ = environ

    def run(self, *options: str, steps: int = STEPS, **environ: str) -> Agent:
        own = ("--nproc-per-node", "2", *options, self._script)
        return self._cluster.run(
            *own, str(self._cluster.folder), str(steps), **{**self._environ, **environ}
        )

    def steps(self, rank: int = 0) -> list[tuple[int, int]]:
        """The rounds and numbers of the steps that a rank has finished, in order."""
        lines = (self._cluster.folder / f"steps-{rank}").read_text().splitlines()
        return [(int(round_), int(step)) for round_, step in map(str.split, lines)]

    def until_step(self, step: int) -> None:
        until(
            lambda: self.steps()[-1][1],
            f"step {step} is finished",
            holds=lambda last: last >= step,
            despite=(FileNotFoundError, IndexError, ValueError),
            within_s=WITHIN_S,
        )


@pytest.fixture
def toy(cluster: Cluster, framework: str, request: pytest.FixtureRequest) -> Toy:
    environ: Mapping[str, str] = {}
    if framework == "deepspeed":
        environ = request.getfixturevalue("deepspeed_environ")
    return Toy(cluster, framework, environ)


def is_resumed(toy: Toy, rounds: int) -> bool:
    """Whether the last round went on after the newest saved step, and to the end, on all ranks."""
    resumed_at = FAULT_AT // EVERY * EVERY
    return all(
        [step for round_, step in toy.steps(rank) if round_ == rounds]
        == [*range(resumed_at + 1, STEPS + 1)]
        for rank in range(2)
    )


def test_an_unmodified_script_runs(toy: Toy, cluster: Cluster) -> None:
    """Nothing of Everstep is imported by the script."""
    assert toy.run(PLAIN="1").wait(WITHIN_S) == 0
    assert cluster.until_fact("job_ended")["rounds"] == 1


def test_after_the_kill_of_a_rank_the_training_resumes_at_the_last_saved_step(
    toy: Toy, cluster: Cluster
) -> None:
    """SIGKILL after step 12, saves at each fifth: step 11 is the next."""
    assert toy.run(FAULT=f"kill@{FAULT_AT}").wait(WITHIN_S) == 0
    assert cluster.until_fact("job_ended")["rounds"] == 2
    assert is_resumed(toy, 2)


def test_a_rank_that_hangs_is_found_and_the_training_resumes(toy: Toy, cluster: Cluster) -> None:
    """Rank 1 waits for ever in a section of the script, and is named (A3.2)."""
    agent = toy.run("--limit", f"stuck={STUCK_S:g}", FAULT=f"hang@{FAULT_AT}")
    assert agent.wait(WITHIN_S) == 0
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["rank"]) == ("rank_stalled", 1)
    assert is_resumed(toy, 2)


def test_a_preempted_training_saves_its_last_step_on_all_ranks(toy: Toy, cluster: Cluster) -> None:
    """SIGTERM to the agent: all ranks save after the same step, and the exit code is 91 (A12.1)."""
    agent = toy.run(steps=100_000, FAULT=f"wait@{FAULT_AT}")
    toy.until_step(FAULT_AT + 2)
    agent.send(signal.SIGTERM)
    assert agent.wait(WITHIN_S) == 91
    last = {toy.steps(rank)[-1][1] for rank in range(2)}
    assert len(last) == 1
    again = toy.run(steps=last.pop() + 1)
    assert again.wait(WITHIN_S) == 0
    assert [toy.steps(rank)[-1][1] - toy.steps(rank)[-2][1] for rank in range(2)] == [1, 1]


def test_lightning_resumes_from_memory_where_that_is_newer_than_its_file(cluster: Cluster) -> None:
    """Each step is kept in memory, and a file is written at each fifth: step 12 is not lost."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    toy = Toy(cluster, "lightning", {})
    assert toy.run(FAULT=f"kill@{FAULT_AT}", LOCAL_EVERY="1").wait(WITHIN_S) == 0
    restored = cluster.until_fact("checkpoint_restored")
    assert [tier["tier"] for tier in restored["tiers"]] == ["memory"]
    assert restored["step"] > FAULT_AT // EVERY * EVERY
    for rank in range(2):
        resumed = [step for round_, step in toy.steps(rank) if round_ == 2]
        assert resumed == [*range(restored["step"] + 1, STEPS + 1)]

"""Nodes under a real Slurm: replaced in groups, checked, drained, and lost in several ways.

Acceptance: A12.3.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import kill_all, tagged
from tests.e2e.slurm import Slurm, running_slurm, why_not
from tests.e2e.slurm_jobs import (
    WITHIN_S,
    Step,
    job_state,
    steps,
    submit_agents,
    submit_training,
    until_step,
)
from tests.waiting import until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there"),
]
_PROGRAM = """#!/bin/bash
export EVERSTEP_STATE_DIR={folder}/node-state EVERSTEP_CHECKS__SITE_DIR={folder}/site
export EVERSTEP_CHECKS__WITHIN_S=60
exec {python} -P -m everstep_services.cli slurm {name} site:disk --within 90 2>> {folder}/{name}.log
"""


@pytest.fixture
def settings() -> str:
    """Further lines of slurm.conf; a test overrides them by a parameter."""
    return ""


@pytest.fixture
def nodes() -> int:
    return 3


@pytest.fixture(autouse=True)
def topology(tmp_path: Path) -> None:
    """Racks of two nodes below one spine; Slurm reads it only with its topology plugin."""
    leaves = "".join(
        f"SwitchName=leaf{rack} Nodes=n{2 * rack + 1},n{2 * rack + 2}\n" for rack in range(3)
    )
    (tmp_path / "topology.conf").write_text(f"{leaves}SwitchName=spine Switches=leaf[0-2]\n")


@pytest.fixture
def slurm(tmp_path: Path, nodes: int, settings: str) -> Iterator[Slurm]:
    try:
        with running_slurm(tmp_path, nodes, settings.format(folder=tmp_path)) as slurm:
            yield slurm
    finally:
        kill_all(tagged(tmp_path.name))


def each_once(made: list[Step]) -> bool:
    """Whether no step is missing, and none was done twice."""
    numbers = [step.number for step in made]
    return numbers == list(range(1, len(numbers) + 1))


def members(slurm: Slurm, ranks: int, round_number: int) -> list[str]:
    """The nodes of the ranks in a round that all of them have stepped in."""
    return [until_step(slurm, 1, round_number, rank).node for rank in range(ranks)]


# -- replacement groups --------------------------------------------------------------------------


def rack(node: str) -> int:
    return (int(node[1:]) - 1) // 2


@pytest.mark.parametrize("nodes", [6])
@pytest.mark.parametrize("settings", ["TopologyPlugin=topology/tree"])
def test_a_rack_leaves_with_its_lost_node_and_a_spare_rack_takes_its_place(slurm: Slurm) -> None:
    """Racks are the leaf switches of Slurm's topology: no option names a rack (A12.3)."""
    words = ("--nnodes", "4", "--spares", "2", "--group-size", "2")
    job = submit_training(slurm, 1_000_000, words=words)
    before = members(slurm, 4, 1)
    until_step(slurm, 30, 1)
    assert (rack(before[0]), rack(before[2])) == (rack(before[1]), rack(before[3]))
    lost, left = (node for node in sorted(before[2:], key="n1".__eq__))  # the script is on n1
    slurm.kill_node(lost)
    after = members(slurm, 4, 2)
    assert after[:2] == before[:2]
    assert not {*after[2:]} & {*before}
    assert rack(after[2]) == rack(after[3])
    assert job_state(slurm, job) == "RUNNING"
    end = slurm.folder / "allocations" / f"{job}-0" / f"{left}.end"
    until(end.exists, "the agent of the other node of the rack has left", within_s=WITHIN_S)
    assert "of its replacement group" in end.read_text()


# -- prolog and epilog ---------------------------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path) -> None:
    """Prolog and epilog, of which one fails on the first node."""
    site = tmp_path / "site"
    site.mkdir()
    check = site / "disk"
    check.write_text(
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" = n1 ] && [ -e {tmp_path}/$SLURM_SCRIPT_CONTEXT ]'
        " || exit 0"
        "\necho the disk is broken\nexit 2\n"
    )
    check.chmod(0o755)
    for name in ("prolog", "epilog"):
        program = tmp_path / f"{name}.sh"
        program.write_text(_PROGRAM.format(folder=tmp_path, python=sys.executable, name=name))
        program.chmod(0o755)


CHECKED = "Prolog={folder}/prolog.sh\nEpilog={folder}/epilog.sh\nPrologEpilogTimeout=300"
UNHELD = "SchedulerParameters=batch_sched_delay=0,sched_interval=1,nohold_on_prolog_fail"


@pytest.mark.parametrize("nodes", [2])
@pytest.mark.parametrize("settings", [f"{CHECKED}\n{UNHELD}"])
def test_a_failing_prolog_drains_the_node_and_the_job_runs_on_another(
    programs: None, slurm: Slurm
) -> None:
    (slurm.folder / "prolog_slurmd").touch()
    job = submit_agents(slurm, "echo $SLURMD_NODENAME > $folder/ran; exit 0")
    until(lambda: slurm.node_state("n1"), "n1 is drained", holds=is_drained, within_s=WITHIN_S)
    until(lambda: job_state(slurm, job), "it is done", holds="COMPLETED".__eq__, within_s=WITHIN_S)
    log = (slurm.folder / "prolog.log").read_text()
    assert "everstep prolog: " in log
    assert "the disk is broken" in log
    until(lambda: slurm.node_state("n2"), "n2 is idle", holds="idle".__eq__, within_s=WITHIN_S)


@pytest.mark.parametrize("nodes", [1])
@pytest.mark.parametrize("settings", [CHECKED])
def test_a_failing_epilog_drains_the_node_after_the_job(programs: None, slurm: Slurm) -> None:
    (slurm.folder / "epilog_slurmd").touch()
    job = submit_agents(slurm, "exit 0")
    until(lambda: job_state(slurm, job), "it is done", holds="COMPLETED".__eq__, within_s=WITHIN_S)
    until(lambda: slurm.node_state("n1"), "n1 is drained", holds=is_drained, within_s=WITHIN_S)
    assert "the disk is broken" in (slurm.folder / "epilog.log").read_text()


def is_drained(state: str) -> bool:
    return state.startswith("drain")


# -- drained by policy ---------------------------------------------------------------------------


def test_a_node_that_everstep_has_excluded_is_drained_in_slurm(slurm: Slurm) -> None:
    submit_training(
        slurm, 1_000_000, "--drain-excluded", "enforce", words=("--nnodes", "2", "--spares", "1")
    )
    (spare,) = {"n1", "n2", "n3"} - {*members(slurm, 2, 1)}
    exclude = ("node", "exclude", spare, "--reason", "its fan is broken", "--for-good")
    slurm.call(
        *(sys.executable, "-m", "everstep_services.cli", *exclude),
        *("--state-dir", str(slurm.folder / "control-plane")),
    )
    until(lambda: slurm.node_state(spare), "it is drained", holds=is_drained, within_s=WITHIN_S)
    shown = slurm.call("scontrol", "show", "node", "--oneliner", spare)
    assert "everstep: " in shown
    assert "its fan is broken" in shown
    made = steps(slurm)
    until_step(slurm, made[-1].number + 20, 1)


# -- the daemons of Slurm ------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ["SlurmdTimeout=10"])
def test_a_task_that_outlives_its_slurmd_trains_on(slurm: Slurm) -> None:
    """Slurm marks the node down; with --no-kill job and agents stay, also on that node.

    Once slurmd is back, Slurm kills them there, because the node left the job; a spare follows.
    """
    job = submit_training(slurm, 1_000_000, words=("--nnodes", "2", "--spares", "1"))
    rank, node = next(  # the batch script is on n1
        (rank, node) for rank, node in enumerate(members(slurm, 2, 1)) if node != "n1"
    )
    slurm.kill_daemon(node)
    until(lambda: slurm.node_state(node), "it is down", holds=is_down, within_s=WITHIN_S)
    made = steps(slurm)
    until_step(slurm, made[-1].number + 50, 1)
    assert {step.round for step in steps(slurm)} == {1}
    slurm.start_daemon(node)
    assert until_step(slurm, 1, 2, rank).node != node
    assert job_state(slurm, job) == "RUNNING"


def is_down(state: str) -> bool:
    return state.startswith("down")


def test_a_training_and_its_script_do_without_slurmctld_for_a_while(slurm: Slurm) -> None:
    """Said once, and a node that is drained afterwards is noticed as before."""
    job = submit_training(slurm, 1_000_000, words=("--nnodes", "2", "--spares", "1"))
    drained = until_step(slurm, 10, 1, rank=1)
    slurm.stop_controller()
    output = slurm.folder / f"slurm-{job}.out"
    until(
        output.read_text, "its absence is said", holds=lambda said: AWAY in said, within_s=WITHIN_S
    )
    made = steps(slurm)
    until_step(slurm, made[-1].number + 100, 1)
    slurm.start_controller()
    until(output.read_text, "it is back", holds=lambda said: BACK in said, within_s=WITHIN_S)
    assert (output.read_text().count(AWAY), output.read_text().count(BACK)) == (1, 1)
    slurm.call("scontrol", "update", f"NodeName={drained.node}", "State=DRAIN", "Reason=link")
    again = until_step(slurm, 20, 2, rank=1)
    assert again.node != drained.node
    assert each_once(steps(slurm, rank=1))


AWAY = "drained nodes are noticed once it answers again"
BACK = "Slurm's controller answers again"


@pytest.mark.parametrize("nodes", [1])
@pytest.mark.parametrize("settings", ["SlurmdTimeout=10"])
def test_a_node_that_dies_amid_a_save_leaves_no_torn_checkpoint(slurm: Slurm) -> None:
    """Slurm requeues the job; the script refuses a state that is not that of its step."""
    words = {"COUNTED_EVERY": "1", "COUNTED_SIZE": str(8 << 20)}
    slurm.environ.update(words)
    job = submit_training(slurm, 1_000_000)
    until_step(slurm, 5, 1)
    saving = slurm.folder / "saved" / ".saving"
    until(
        lambda: [*saving.iterdir()],
        "a save is being written",
        despite=FileNotFoundError,
        within_s=WITHIN_S,
    )
    slurm.kill_node("n1")
    until(lambda: slurm.node_state("n1"), "it is down", holds=is_down, within_s=WITHIN_S)
    slurm.start_daemon("n1")
    until_step(slurm, 3, 2)
    assert job_state(slurm, job) == "RUNNING"
    numbers = [step.number for step in steps(slurm) if step.round == 2]
    assert numbers[0] > 1
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

"""A real training is restored from where it should be, and every step of it has one loss."""

import json
import shutil
import signal
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.operators import ask
from tests.e2e.processes import SCRIPTS
from tests.waiting import until
from trainer_sdk.checkpoint.manifest import INDEX

START_WITHIN_S = 90.0
SELDOM = 1_000_000


def training(cluster: Cluster, *options: str, every: int, memory_every: int = 0) -> Agent:
    script = (str(SCRIPTS / "saving_model.py"), str(cluster.folder), str(every), str(memory_every))
    return cluster.run("--nproc-per-node", "2", *options, *script)


def losses(folder: Path, rank: int) -> dict[int, set[str]]:
    """Those of each step; more than one if the training went another way after a restart."""
    found: dict[int, set[str]] = defaultdict(set)
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, loss = line.split()
        found[int(step)].add(loss)
    return found


def restored(cluster: Cluster, number: int) -> list[tuple[int, str]]:
    """The step and the tier of each rank of a round."""
    cluster.until_stepping(number, START_WITHIN_S)
    told = [(cluster.folder / f"restored-{number}-{rank}").read_text() for rank in range(2)]
    return [(int(step), tier) for step, tier in (one.split(" ") for one in told)]


def until_step(cluster: Cluster, step: int) -> None:
    until(
        lambda: max(losses(cluster.folder, 0), default=0),
        f"step {step} is made",
        holds=lambda made: made >= step,
        despite=FileNotFoundError,
        within_s=START_WITHIN_S,
    )


def until_kept(cluster: Cluster, step: int) -> int:
    """Wait until both ranks have kept an image of this step or a later one; return its step.

    Images are written beside the training, and some are left out: a step made is no step kept.
    """

    def kept() -> int:
        steps = []
        for rank in range(2):
            images = list(cluster.folder.rglob(f"own/rank-{rank}/*/{INDEX}"))
            steps.append({json.loads(image.read_text())["identity"]["step"] for image in images})
        return max(steps[0] & steps[1], default=0)

    return until(
        kept,
        f"both ranks have kept step {step}",
        holds=lambda newest: newest >= step,
        despite=FileNotFoundError,
        within_s=START_WITHIN_S,
    )


def test_after_a_kill_the_training_goes_on_from_memory_as_if_nothing_had_been(
    cluster: Cluster,
) -> None:
    training(cluster, every=SELDOM, memory_every=5)
    cluster.until_fact("fresh_started", within_s=START_WITHIN_S)
    kept = until_kept(cluster, 30)
    cluster.kill_rank(1, 1)
    found = restored(cluster, 2)
    assert {tier for _, tier in found} == {"memory"}
    assert len({step for step, _ in found}) == 1
    assert found[0][0] >= kept
    until_step(cluster, found[0][0] + 20)
    cluster.finish()
    cluster.until_done()
    for rank in range(2):
        assert all(len(of_step) == 1 for of_step in losses(cluster.folder, rank).values())
    fact = cluster.until_fact("checkpoint_restored")
    assert (fact["step"], [tier["tier"] for tier in fact["tiers"]]) == (found[0][0], ["memory"])
    (incident,) = cluster.closed(1)
    assert incident["ledger"]["restore_s"] > 0


@pytest.mark.variant
def test_a_loss_that_is_no_number_after_a_restore_puts_that_checkpoint_aside(
    cluster: Cluster,
) -> None:
    """NaN after a load from memory: the next round loads another one (A9.3)."""
    training(cluster, every=10, memory_every=5)
    saved = cluster.until_fact("checkpoint_committed", within_s=START_WITHIN_S)
    until_kept(cluster, saved["step"] + 5)
    (cluster.folder / "wrong").touch()
    cluster.kill_rank(0, 1)
    blamed = cluster.until_fact("checkpoint_quarantined", within_s=START_WITHIN_S)
    assert (blamed["tier"], blamed["cause"]) == ("memory", "nan_after_load")
    found = restored(cluster, 3)
    assert len(set(found)) == 1
    assert found[0][0] < blamed["step"] or found[0][1] == "global"
    cluster.finish()
    cluster.until_done()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_operator_has_it_saved_and_plain_torch_reads_that(cluster: Cluster) -> None:
    training(cluster, every=SELDOM)
    until_step(cluster, 5)
    ask(cluster, "save", cluster.job, "--reason", "to compare")
    saved = cluster.until_fact("checkpoint_committed", within_s=START_WITHIN_S)
    assert saved["occasion"] == "requested"
    weight = torch.zeros(64, 16)
    load({"model": {"module.0.weight": weight}}, checkpoint_id=saved["path"])
    assert weight.abs().sum() > 0
    cluster.finish()
    cluster.until_done()


def test_before_it_is_taken_away_it_saves_and_the_next_allocation_goes_on_from_there(
    cluster: Cluster,
) -> None:
    first = training(cluster, every=SELDOM)
    until_step(cluster, 10)
    first.send(signal.SIGTERM)
    assert first.wait(START_WITHIN_S) == 91
    saved = cluster.until_fact("checkpoint_committed")
    assert saved["occasion"] == "preemption"
    training(cluster, every=SELDOM)
    assert restored(cluster, 2) == [(saved["step"], "global")] * 2
    cluster.finish()
    assert cluster.agents[1].wait(START_WITHIN_S) == 0
    assert all(len(of_step) == 1 for of_step in losses(cluster.folder, 0).values())


def test_a_requeue_to_the_same_node_finds_its_states_in_memory(cluster: Cluster) -> None:
    """Only the end of a job that ended well removes them (A8.6)."""
    first = training(cluster, every=SELDOM, memory_every=5)
    until_step(cluster, 20)
    first.send(signal.SIGTERM)
    assert first.wait(START_WITHIN_S) == 91
    saved = cluster.until_fact("checkpoint_committed")
    training(cluster, every=SELDOM, memory_every=5)
    assert restored(cluster, 2) == [(saved["step"], "memory")] * 2
    cluster.finish()
    assert cluster.agents[1].wait(START_WITHIN_S) == 0
    assert not list((cluster.folder / "memory").rglob("index.json")), (
        "nothing outlives a job that ended well"
    )


@pytest.mark.variant
def test_a_memory_that_is_lost_is_no_fresh_start_unless_that_is_allowed(cluster: Cluster) -> None:
    """It says what was there, and does not take it for "there has never been one" (A8.7)."""
    first = training(cluster, every=SELDOM, memory_every=5)
    until_kept(cluster, 5)
    note = cluster.folder / "node-1" / "kept" / f"{cluster.job}@node-1.json"
    until(note.exists, "the agent has noted that there is a state")
    first.kill()
    assert first.wait(START_WITHIN_S) == -signal.SIGKILL
    until(cluster.left, "no process is left, which could still write", holds=lambda left: not left)
    shutil.rmtree(cluster.folder / "memory")  # as when the node was started again
    second = training(cluster, "--max-restarts", "0", every=SELDOM, memory_every=5)
    failed = cluster.until_fact("restore_failed", within_s=START_WITHIN_S)
    assert "it was in the memory of node-1, saved in round 1, and is gone" in failed["reason"]
    assert "--allow-fresh-start" in failed["reason"]
    assert second.wait(START_WITHIN_S) == 1
    third = training(cluster, "--allow-fresh-start", every=SELDOM, memory_every=5)
    number = cluster.until_fact("fresh_started", lambda it: it["round"] > 1)["round"]
    assert restored(cluster, number) == [(0, "")] * 2
    cluster.finish()
    assert third.wait(START_WITHIN_S) == 0


@pytest.mark.variant
def test_a_last_save_that_fails_is_what_the_round_fails_of(cluster: Cluster) -> None:
    """The incident names the save (A8.6)."""
    leaving = Path(__file__).parents[1] / "integration" / "scripts" / "leaving.py"
    how = (str(cluster.folder / "root"), "returns", "fatal", "fails")
    agent = cluster.run("--cold", "--max-restarts", "0", str(leaving), *how)
    assert agent.wait(START_WITHIN_S) == 1
    opened = cluster.until_fact("incident_opened")
    assert "rank 0: the save of step 2 failed at write of " in str(opened)


def test_states_on_a_local_disk_are_there_after_the_power_was_cut(cluster: Cluster) -> None:
    """Nobody had time to say that the states stay; the memory of the node is empty (E5, A8.7)."""
    disk = cluster.folder / "nvme"
    disk.mkdir()
    first = training(cluster, "--local-root", str(disk), every=SELDOM, memory_every=5)
    kept = until_kept(cluster, 5)
    first.kill_node()
    until(cluster.left, "no process is left", holds=lambda left: not left)
    made = max(losses(cluster.folder, 0))
    assert not list((cluster.folder / "memory").rglob("index.json")), "nothing is in memory"
    second = training(cluster, "--local-root", str(disk), every=SELDOM, memory_every=5)
    found = restored(cluster, 2)
    assert {tier for _, tier in found} == {"disk"}
    assert len({step for step, _ in found}) == 1
    assert kept <= found[0][0] <= made
    fact = cluster.until_fact("checkpoint_restored")
    assert (fact["step"], [tier["tier"] for tier in fact["tiers"]]) == (found[0][0], ["disk"])
    until_step(cluster, made + 5)
    cluster.finish()
    assert second.wait(START_WITHIN_S) == 0
    for rank in range(2):
        assert all(len(of_step) == 1 for of_step in losses(cluster.folder, rank).values())
    assert not list(disk.rglob("index.json")), "nothing outlives a job that ended well"


def test_a_local_root_that_is_not_there_is_said_in_one_line(cluster: Cluster) -> None:
    missing = cluster.folder / "nvme"
    agent = training(cluster, "--local-root", str(missing), every=SELDOM)
    assert agent.wait(START_WITHIN_S) != 0
    (line,) = agent.log.read_text().splitlines()
    assert f"local_root {missing}: there is no such folder: make it, or mount the disk" in line

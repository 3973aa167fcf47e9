"""A rank of a real training is slowed: it is named with its cause, and cleared again.

Acceptance: A6.1, A6.2, A6.5.
"""

import pytest

from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError
from tests.e2e.cluster import Body, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import Up
from tests.e2e.operators import ask
from tests.e2e.processes import SCRIPTS
from tests.variants import variant
from tests.waiting import until

SCRIPT = SCRIPTS.parents[2] / "services/everstep_services/cli/demonstration/slow_trainer.py"
NODES, EACH = 2, 2
RANKS = NODES * EACH
SLOW_RANK = 2
FOUND_WITHIN_S = 90.0


@pytest.fixture
def cluster(new_cluster: NewCluster, quick_up: Up, job: str) -> Cluster:
    return new_cluster(quick_up, job)


def train(cluster: Cluster, how: str) -> None:
    for place in range(NODES):
        options = ("--nnodes", str(NODES), "--nproc-per-node", str(EACH))
        own = ("--infra-rank", str(place), *options, str(SCRIPT), str(cluster.folder), how)
        cluster.run(*own, node=f"node-{place + 1}")


def finish(cluster: Cluster) -> None:
    (cluster.folder / "end").touch()
    cluster.until_done()


def now(api: Api, job: str) -> Body:
    found: Body = api.get(f"jobs/{job}/stragglers/now")
    return found


def until_compared(cluster: Cluster, windows: int = 1) -> None:
    """A number of successive windows have all ranks."""
    seen: set[int] = set()

    def look() -> int:
        table = now(cluster.api, cluster.job)
        if sum(one["own_s"] is not None for one in table["ranks"]) == RANKS:
            seen.add(table["window"])
        return len(seen)

    until(look, "ranks are compared", holds=lambda count: count >= windows, despite=CliError,
          within_s=FOUND_WITHIN_S)  # fmt: skip


def slow_down(cluster: Cluster, kind: str, rank: int, seconds: float) -> None:
    fresh = cluster.folder / f"fresh-{kind}-{rank}"
    fresh.write_text(str(seconds))
    fresh.rename(cluster.folder / f"slow-{kind}-{rank}")


@pytest.mark.parametrize(
    ("kind", "section"), [variant("input", "data"), variant("compute", "backward")]
)
def test_a_slow_rank_is_named_with_its_cause_and_cleared(
    cluster: Cluster, kind: str, section: str
) -> None:
    """150 ms where it reads its data, 200 ms in backward before gradients are exchanged (A6.1)."""
    train(cluster, "sections")
    until_compared(cluster)
    slow_down(cluster, kind, SLOW_RANK, {"input": 0.15, "compute": 0.2}[kind])
    found = cluster.until_fact("straggler_found", within_s=FOUND_WITHIN_S)
    assert (found["rank"], found["node"], found["cause"]) == (SLOW_RANK, "node-2", kind)
    assert found["section"] == section
    assert found["lateness_s"] > 0.05
    assert found["slowdown_ratio"] > 0.5, "the job would be at least half as fast again"
    (cluster.folder / f"slow-{kind}-{SLOW_RANK}").unlink()
    cleared = cluster.until_fact("straggler_cleared", within_s=FOUND_WITHIN_S)
    assert (cleared["rank"], cleared["finding"]) == (SLOW_RANK, found["id"])
    finish(cluster)
    assert len(cluster.facts("straggler_found")) == 1, "each finding is one fact"
    assert cluster.incidents() == [], "a finding by itself ends nothing"


def test_only_a_slow_rank_of_an_unmodified_script_is_named(cluster: Cluster) -> None:
    """Nobody is accused while all ranks are healthy (A6.2), for as long as a test may take."""
    train(cluster, "plain")
    until_compared(cluster, windows=6)
    assert cluster.facts("straggler_found") == []
    slow_down(cluster, "compute", SLOW_RANK, 0.2)
    found = cluster.until_fact("straggler_found", within_s=FOUND_WITHIN_S)
    assert (found["rank"], found["node"]) == (SLOW_RANK, "node-2")
    finish(cluster)


@pytest.mark.timeout(400)
@pytest.mark.variant
def test_a_slow_rank_of_a_script_whose_steps_nobody_counts_is_named(cluster: Cluster) -> None:
    """Windows are by time then; without a step there is no price in steps, but a rank."""
    for place in range(NODES):
        options = ("--nnodes", str(NODES), "--nproc-per-node", str(EACH))
        script = (str(SCRIPTS / "uncounted.py"), str(cluster.folder), str(SLOW_RANK), "0.1")
        cluster.run("--infra-rank", str(place), *options, *script, node=f"node-{place + 1}")
    # After half a minute without a step windows are by time, and some of them are needed.
    found = cluster.until_fact("straggler_found", within_s=3 * FOUND_WITHIN_S)
    assert (found["rank"], found["node"]) == (SLOW_RANK, "node-2")
    assert now(cluster.api, cluster.job)["is_by_time"]
    finish(cluster)


@pytest.mark.variant
def test_enforced_a_spare_takes_the_slot_of_a_node_whose_rank_is_slow(cluster: Cluster) -> None:
    """The policy acts only if a person has allowed it; the training goes on without the node."""
    names = [f"{cluster.job}-{number}" for number in range(NODES + 1)]
    options = ("--nnodes", str(NODES), "--spares", "1", "--nproc-per-node", str(EACH))
    script = (str(SCRIPT), str(cluster.folder), "sections")
    agents = {
        name: cluster.run("--infra-rank", str(place), *options, *script, node=name)
        for place, name in enumerate(names)
    }
    until_compared(cluster)
    members = cluster.members(1)
    switches = {"modes.exclude": "enforce", "straggler.exclude_causes": "host,compute"}
    cluster.api.post("control", {"changes": switches, "job": cluster.job, "reason": "test"})
    slow_down(cluster, "compute", SLOW_RANK, 0.2)
    acted = cluster.until_fact("straggler_acted", within_s=FOUND_WITHIN_S)
    assert (acted["action"], acted["outcome"], acted["node"]) == ("exclude", "asked", members[1])
    (cluster.folder / f"slow-compute-{SLOW_RANK}").unlink()
    cluster.until_fact("round_formed", lambda body: body["round"] == 2, within_s=FOUND_WITHIN_S)
    (spare,) = set(names) - set(members.values())
    assert cluster.members(2) == {0: members[0], 1: spare}
    assert agents[members[1]].wait() == 0, "its agent does not wait for the end of the exclusion"
    until_compared(cluster)
    finish(cluster)
    assert len(cluster.facts("straggler_acted")) == 1


@pytest.mark.variant
def test_nobody_is_accused_in_a_healthy_training_with_sections(cluster: Cluster) -> None:
    train(cluster, "sections")
    until_compared(cluster, windows=6)
    finish(cluster)
    assert cluster.facts("straggler_found") == []


@pytest.mark.variant
def test_timings_are_switched_off_and_on_while_it_trains(cluster: Cluster) -> None:
    """The change is on record, and shown with where it is from (A6.5)."""
    train(cluster, "sections")
    until_compared(cluster)

    def shown() -> tuple[str, str]:
        switches = ask(cluster, "control", "show", "--job", cluster.job)["straggler"]
        (one,) = (one for one in switches if one["name"] == "straggler.timings")
        return one["value"], one["source"]

    healthy = shown()

    def switch(value: str) -> None:
        changes = {"changes": {"straggler.timings": value}, "job": cluster.job, "reason": "test"}
        cluster.api.post("control", changes)

    switch("off")
    until(lambda: now(cluster.api, cluster.job)["is_on"], "they are off", holds=lambda on: not on)
    changed = cluster.until_fact("control_changed", lambda body: body["after"] == "off")
    assert (changed["name"], changed["reason"]) == ("straggler.timings", "test")
    assert shown()[0] == "off"
    last = now(cluster.api, cluster.job)["window"]
    switch("")
    until(lambda: now(cluster.api, cluster.job)["window"] > last, "they are on again",
          holds=bool, within_s=FOUND_WITHIN_S)  # fmt: skip
    assert shown() == healthy
    finish(cluster)

"""Probes while ranks train: a failure ends the round, unless all nodes share it."""

from pathlib import Path

import pytest

from everstep_services.cli.errors import CliError
from tests.e2e.cluster import Agent, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, running_up
from tests.waiting import until

NODES = ("node-1", "node-2", "node-3")


def started(
    cluster: Cluster, policy: str, *, spares: int, slots: int = 2, names: tuple[str, ...] = NODES
) -> dict[str, Agent]:
    """Slots and perhaps a spare; a node's probe fails while the file `NODE.bad` exists.

    The probes of all nodes fail while the file `all.bad` exists.
    """
    agents = {}
    for place, node in enumerate(names[: slots + spares]):
        bads = " || ".join(f"test -e {bad(cluster, name)}" for name in (node, "all"))
        probe = f"if {bads}; then echo the disk is on fire; exit 2; fi"
        config = cluster.folder / f"{node}.toml"
        config.write_text(
            f"[checks]\nprobe_cpu_percent = 50\nsite = {{fire = \"sh -c '{probe}'\"}}\n"
            f'[checks.probes."site:fire"]\nevery_s = 1\nwithin_s = 30\nfailures = 2\n'
            f'policy = "{policy}"\n'
            + "".join(
                f"[checks.probes.{name}]\nevery_s = 0\n"
                for name in ("gpu", "host", "kernel", "nic", "nvlink")
            )
        )
        agents[node] = cluster.steady(
            *("--nnodes", str(slots), "--spares", str(spares), "--infra-rank", str(place)),
            *("--stop-grace", "1"),
            node=node,
            EVERSTEP_CONFIG=str(config),
        )
    cluster.until_stepping(1)
    return agents


def bad(cluster: Cluster, node: str) -> Path:
    return cluster.folder / f"{node}.bad"


def test_a_probe_that_fails_on_one_node_gives_its_slot_to_the_spare(cluster: Cluster) -> None:
    """The round ends with an incident whose evidence is the probe; the spare trains on (A2.1)."""
    started(cluster, "end_round", spares=1)
    cluster.until_fact("node_joined", lambda body: body["node"] == _spare(cluster))
    before, spare = cluster.members(1), _spare(cluster)
    bad(cluster, before[1]).touch()
    cluster.until_stepping(2)
    assert cluster.members(2) == {0: before[0], 1: spare}
    (incident,) = cluster.incidents()
    assert (incident["trigger"], incident["node"]) == ("check_failed", before[1])
    assert "the disk is on fire" in incident["reason"]
    probed = [fact for fact in cluster.facts("node_check_finished") if fact["occasion"] == "probe"]
    assert incident["trigger_fact"] in [fact["id"] for fact in probed]

    bad(cluster, before[1]).unlink()
    recovered = cluster.until_fact(
        "node_check_finished", lambda body: body["occasion"] == "probe" and body["is_healthy"]
    )
    assert recovered["node"] == before[1]
    cluster.finish()
    cluster.until_done()


def test_a_probe_that_fails_on_all_nodes_accuses_none(cluster: Cluster) -> None:
    """What all nodes share has failed: the round goes on, and the decision is recorded."""
    started(cluster, "end_round", spares=0)
    bad(cluster, "all").touch()
    check_shared(cluster, "accuses no node")


def check_shared(cluster: Cluster, reason: str) -> None:
    """The failure is decided to be shared, and the round goes on to its end."""
    decided = cluster.until_fact("action_decided", lambda body: body["rule"] == "checks.shared")
    assert reason in decided["reason"]
    assert cluster.state()["round"] == 1
    cluster.finish()
    cluster.until_done()
    assert cluster.incidents() == []


def test_a_probe_that_fails_on_the_only_node_and_its_spare_ends_no_round(cluster: Cluster) -> None:
    """The spare runs the check, too: the round does not move between nodes that both fail it."""
    started(cluster, "end_round", slots=1, spares=1)
    cluster.until_facts("node_joined", lambda found: len(found) == 2)
    (member,) = cluster.members(1).values()
    (spare,) = {"node-1", "node-2"} - {member}
    bad(cluster, spare).touch()
    bad(cluster, member).touch()
    check_shared(cluster, "site:fire fails on 2 of 2 nodes, and passes on 0")


def test_an_observed_probe_only_records_its_failure(cluster: Cluster) -> None:
    """Without a policy nothing follows from a failure but its record and a line."""
    agents = started(cluster, "observe", spares=0)
    bad(cluster, "node-2").touch()
    fact = cluster.until_fact(
        "node_check_finished", lambda body: body["occasion"] == "probe" and not body["is_healthy"]
    )
    assert (fact["policy"], fact["failures"]) == ("observe", 2)
    (shown,) = until(
        lambda: cluster.api.get("nodes/node-2")["probes"],
        "REST shows the probe as its agent tells it",
        holds=lambda probes: bool(probes) and probes[0]["has_failed"],
        despite=CliError,
    )
    assert (shown["check"], shown["every_s"], shown["policy"]) == ("site:fire", 1.0, "observe")
    assert shown["failures"] >= shown["failures_limit"] == 2
    until(
        lambda: "it is only observed" in agents["node-2"].log.read_text(), "the console has a line"
    )
    cluster.finish()
    cluster.until_done()
    assert cluster.incidents() == []


def test_an_excluded_node_leaves_its_job_and_may_join_another(
    cluster: Cluster, new_cluster: NewCluster
) -> None:
    """Without the operator's permission, no job keeps a node out of other jobs."""
    names = tuple(f"{cluster.job}-{number}" for number in range(3))  # exclusions are of all jobs
    agents = started(cluster, "exclude", spares=1, names=names)
    cluster.until_facts("node_joined", lambda found: len(found) == len(names))
    node = cluster.members(1)[1]
    bad(cluster, node).touch()
    cluster.until_stepping(2)
    assert node not in cluster.members(2).values()
    assert agents[node].wait() == 0, "its agent has left the job"
    shown = until(
        lambda: cluster.api.get(f"nodes/{node}"),
        f"{node} is suspect",
        holds=lambda found: found["suspect_cause"] == "probe",
        despite=CliError,
    )
    assert not shown["is_excluded"]

    other = new_cluster(cluster.plane, f"{cluster.job}-other")
    other.steady("--nnodes", "1", node=node)
    other.until_stepping(1)
    assert list(other.members(1).values()) == [node]
    for running in (cluster, other):
        running.finish()
        running.until_done()


@pytest.mark.variant
def test_an_excluded_node_stays_out_of_other_jobs_where_that_is_allowed(
    tmp_path: Path, new_cluster: NewCluster, job: str
) -> None:
    """Another node passes the probe: health keeps this one out, with the evidence (A10.3)."""
    allowed = {"EVERSTEP_HEALTH__NODES__EXCLUDE_BY_PROBES": "true"}
    with running_up(tmp_path / "up", **PATIENT, **allowed) as up:
        _stays_out(new_cluster(up, job), new_cluster)


def _stays_out(cluster: Cluster, new_cluster: NewCluster) -> None:
    names = tuple(f"{cluster.job}-{number}" for number in range(3))
    agents = started(cluster, "exclude", spares=1, names=names)
    cluster.until_facts("node_joined", lambda found: len(found) == len(names))
    node = cluster.members(1)[1]
    bad(cluster, node).touch()
    cluster.until_stepping(2)
    assert node not in cluster.members(2).values()
    assert agents[node].wait() == 0, "its agent has left the job"
    decided = cluster.until_fact("action_decided", lambda body: body["rule"] == "checks.exclude")
    assert (decided["nodes_out"], decided["check"]) == ([node], "site:fire")

    shown = until(
        lambda: cluster.api.get(f"nodes/{node}"),
        f"{node} is excluded",
        holds=lambda found: found["is_excluded"] and found["standing"]["state"] == "excluded",
        despite=CliError,
    )
    assert (shown["excluded_by"], shown["suspect_cause"]) == ("health", "probe")
    assert "site:fire wants: the disk is on fire" in shown["excluded_reason"]

    other = new_cluster(cluster.plane, f"{cluster.job}-other")
    other.steady("--nnodes", "1", node=node)
    refused = other.until_fact("node_refused")
    assert (refused["node"], refused["cause"]) == (node, "excluded")
    cluster.finish()
    assert all(agents[name].wait() == 0 for name in names)


def _spare(cluster: Cluster) -> str:
    (spare,) = {"node-1", "node-2", "node-3"} - set(cluster.members(1).values())
    return spare

"""Ranks run on the CPUs that `everstep run --numa-binding` gives them."""

import json
import os

import pytest

from everstep_services.agent.ranks.cpu_affinity import BindingMode, here, ranges
from tests.e2e.cluster import Cluster

SCRIPT = """
import json, os, sys
from pathlib import Path
cpus = sorted(os.sched_getaffinity(0))
Path(sys.argv[1], "cpus-" + os.environ["RANK"]).write_text(json.dumps(cpus))
"""


def cpus_of(cluster: Cluster, rank: int) -> list[int]:
    found: list[int] = json.loads((cluster.folder / f"cpus-{rank}").read_text())
    return found


def script(cluster: Cluster) -> tuple[str, str]:
    path = cluster.folder / "affinity.py"
    path.write_text(SCRIPT)
    return str(path), str(cluster.folder)


@pytest.mark.parametrize(("mode", "how"), [("exclusive", "--cold"), ("core-complex", "--warm")])
def test_each_rank_runs_on_its_cpus_alone(cluster: Cluster, mode: BindingMode, how: str) -> None:
    """The kernel's affinity of each rank is what its `rank_started` says, also after a fork."""
    words = ("--nproc-per-node", "2", "--numa-binding", mode, how, *script(cluster))
    agent = cluster.run(*words)
    assert agent.wait() == 0
    chosen, trouble = here(mode, 2, {})
    started = cluster.until_facts("rank_started", lambda found: len(found) == 2)
    facts = {body["rank"]: body.get("cpus", "") for body in started}
    if trouble:  # as in a container with one core
        assert trouble in agent.said
        assert facts == {0: "", 1: ""}
        return
    assert [cpus_of(cluster, rank) for rank in (0, 1)] == [sorted(b.cpus) for b in chosen]
    assert facts == {rank: binding.cpu_list for rank, binding in enumerate(chosen)}


def test_a_rank_never_leaves_the_cpus_of_its_agent(cluster: Cluster) -> None:
    """An agent that a scheduler confines to one CPU binds its ranks within that CPU."""
    cpu = max(os.sched_getaffinity(0))
    words = ("--numa-binding", "node", "--cold", *script(cluster))
    agent = cluster.run(*words, within=["taskset", "--cpu-list", str(cpu)])
    assert agent.wait() == 0
    assert cpus_of(cluster, 0) == [cpu]
    (started,) = cluster.until_facts("rank_started")
    assert started["cpus"] == ranges({cpu})


def test_without_a_binding_a_rank_may_use_every_cpu(cluster: Cluster) -> None:
    agent = cluster.run("--cold", *script(cluster))
    assert agent.wait() == 0
    assert cpus_of(cluster, 0) == sorted(os.sched_getaffinity(0))

"""`everstep inject` on jobs that really run: made, announced first, undone; or refused."""

import json
import signal
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from everstep_services.cli.errors import Exit
from tests.e2e.cluster import Agent, Body, Cluster
from tests.e2e.control_planes import Up
from tests.e2e.processes import SCRIPTS, environment, python
from tests.waiting import WITHIN_S, until

SCENARIO = """
seed = 11
[[faults]]
fault = "stop"
for_s = 0.5
[[faults]]
fault = "slow_link"
amount = 20
for_s = 0.5
after_s = 0.1
"""
_IMPORTS_S = 240.0
"""Two ranks import torch, and make a group."""
NOT_YET = (FileNotFoundError, ValueError)
"""There is no file, or nothing in it."""


class Operator:
    """Somebody at the machine of `everstep up`."""

    def __init__(self, cluster: Cluster, up: Up) -> None:
        self._job = cluster.job
        self._environ = environment(
            cluster.folder, "operator", EVERSTEP_STATE_DIR=str(up.state.path)
        )

    def runs(self, *words: str, job: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            python("-m", "everstep_services.cli", "inject", "--job", job or self._job, *words),
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )

    def injects(self, *words: str) -> list[dict[str, Any]]:
        done = self.runs(*words, "-o", "jsonl")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def is_refused(self, *words: str, job: str = "") -> tuple[int, str]:
        done = self.runs(*words, job=job)
        return done.returncode, done.stderr.splitlines()[-1]


def two_nodes(cluster: Cluster, *options: str) -> list[Agent]:
    agents = [
        cluster.steady("--nnodes", "2", "--allow-injection", *options, node=node)
        for node in ("node-1", "node-2")
    ]
    cluster.until_stepping(1)
    return agents


def injected(cluster: Cluster, made: dict[str, Any]) -> Body:
    return cluster.until_fact("fault_injected", lambda fact: fact["id"] == made["id"])


def test_a_stopped_rank_is_announced_and_woken_and_a_killed_one_is_an_incident(
    cluster: Cluster, shared_up: Up
) -> None:
    two_nodes(cluster)
    operator = Operator(cluster, shared_up)
    (stop,) = operator.injects("SIGSTOP", "--rank", "1", "--for", "2", "--after-step", "3")
    woken = cluster.folder / "woken-1"
    stood_s = until(lambda: float(woken.read_text()), "it is woken", despite=NOT_YET)
    assert stood_s >= 2
    fact = injected(cluster, stop)
    assert (fact["fault"], fact["rank"], fact["lasts_s"]) == ("stop", 1, 2.0)
    assert fact["by"].partition("@")[2]
    (kill,) = operator.injects("kill", "--rank", "0")
    cluster.until_stepping(2)
    opened = cluster.until_fact("incident_opened")
    assert injected(cluster, kill)["at"] <= opened["at"]


def test_a_wrong_result_is_found_and_the_verdict_names_who_made_it(
    cluster: Cluster, shared_up: Up
) -> None:
    script = (str(SCRIPTS / "validated.py"), str(cluster.folder))
    cluster.run("--nproc-per-node", "2", "--allow-injection", *script)
    cluster.until_stepping(1, _IMPORTS_S)
    Operator(cluster, shared_up).injects("nan-activation", "--rank", "1")
    judged = cluster.until_fact("numerics_judged")
    assert (judged["kind"], judged["ranks"]) == ("transient", [1])
    assert cluster.until_fact("numerics_acted")["action"] == "again"
    verdict = cluster.until_fact("verdict_reached")
    assert (verdict["cause"], verdict["kind"]) == ("injected", "nan_activation")
    assert not verdict.get("culprit_nodes")
    cluster.finish()
    cluster.until_done()


def test_an_agent_is_cut_off_and_told_a_wrong_time_and_both_are_undone(
    cluster: Cluster, shared_up: Up
) -> None:
    agents = two_nodes(cluster)
    operator = Operator(cluster, shared_up)
    operator.injects("clock_skew", "--node", "node-2", "--amount", "7200", "--for", "600")
    (wrong,) = operator.injects("slow_link", "--node", "node-2", "--amount", "1", "--for", "0.1")
    (cut,) = operator.injects("cut-off", "--node", "node-1", "--for", "2")
    until(lambda: "the bus is away" in agents[0].said, "node 1 is cut off")
    until(lambda: "the bus is back" in agents[0].said, "node 1 is back")
    ahead = instant(injected(cluster, wrong)) - instant(injected(cluster, cut))
    assert timedelta(hours=1) < ahead < timedelta(hours=2)
    assert "the bus is away" not in agents[1].said
    assert cluster.incidents() == []


def instant(fact: Body) -> datetime:
    return datetime.fromisoformat(fact["at"])


def test_a_scenario_is_the_same_again_with_its_seed(
    cluster: Cluster, shared_up: Up, tmp_path: Path
) -> None:
    two_nodes(cluster)
    operator = Operator(cluster, shared_up)
    file = tmp_path / "faults.toml"
    file.write_text(SCENARIO)
    first, again = (operator.runs("--scenario", str(file), "--dry-run") for _ in range(2))
    assert first.stderr == again.stderr
    assert first.stderr.startswith("everstep: seed 11\n")
    assert cluster.facts("fault_injected") == []
    made = operator.injects("--scenario", str(file))
    assert [one["fault"] for one in made] == ["stop", "slow_link"]
    assert f"stop in rank {made[0]['rank']} on" in first.stderr


def test_nothing_reaches_an_agent_through_a_partition_until_it_is_over(
    cluster: Cluster, shared_up: Up
) -> None:
    two_nodes(cluster)
    operator = Operator(cluster, shared_up)
    (partition,) = operator.injects("partition", "--node", "node-2", "--for", "6")
    (late,) = operator.injects("slow_link", "--node", "node-2", "--for", "0.1")
    apart = instant(injected(cluster, late)) - instant(injected(cluster, partition))
    assert apart >= timedelta(seconds=6)


def test_a_killed_agent_has_said_so_first(cluster: Cluster, shared_up: Up) -> None:
    agents = two_nodes(cluster)
    (killed,) = Operator(cluster, shared_up).injects("kill_agent", "--node", "node-2")
    assert agents[1].wait() == -signal.SIGKILL
    assert injected(cluster, killed)["node"] == "node-2"


def test_what_cannot_be_injected_is_refused_in_one_line(cluster: Cluster, shared_up: Up) -> None:
    cluster.steady(EVERSTEP_INJECTION="1")
    cluster.until_stepping(1)
    operator, job = Operator(cluster, shared_up), cluster.job
    assert operator.is_refused("hang") == (
        Exit.ERROR,
        f"everstep: {job} was not started with --allow-injection, or its agent on node-1 is "
        f"gone: nothing is injected",
    )
    assert operator.is_refused("hang", "--rank", "7") == (
        Exit.NOT_FOUND,
        f"everstep: {job} has no rank 7: it has 0 to 0",
    )
    assert operator.is_refused("hang", job=f"{job}x") == (
        Exit.NOT_FOUND,
        f"everstep: there is no job {job}x; see everstep jobs",
    )
    assert cluster.facts("fault_injected") == []

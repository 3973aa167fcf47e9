"""Any process of a node is killed: nothing of it is left, and nothing else is touched."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from operator import not_

import pytest

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.processes import SCRIPTS, alive, below, kill_all
from tests.waiting import until


@pytest.fixture(autouse=True)
def foreign(cluster: Cluster) -> Iterator[None]:
    """Somebody else's process: the same program and script, in the same session as the test."""
    script = [str(SCRIPTS / "family.py"), str(cluster.folder / "foreign"), "0"]
    environ = {"PYTHONPATH": str(SCRIPTS.parents[2]), "RANK": "0", "EVERSTEP_SOMETHING": "else"}
    process = subprocess.Popen([sys.executable, *script], env={**os.environ, **environ})
    yield
    assert process.poll() is None, "it was touched"
    process.kill()
    process.wait()


def with_workers(cluster: Cluster, workers: int, *options: str) -> tuple[Agent, list[int]]:
    """An agent of two ranks with some workers each; its warden with all processes below.

    The agent's other children, such as a probe's process, are not of the round.
    """
    script = (str(SCRIPTS / "family.py"), str(cluster.folder), str(workers))
    agent = cluster.run(*options, "--nproc-per-node", "2", "--stop-grace", "0.5", *script)
    cluster.until_stepping(1)
    below_warden = 2 + 2 * workers

    family = until(
        lambda: [process.pid for process in below(agent.warden) if alive(process.pid)],
        f"{below_warden} processes are there",
        holds=lambda found: len(found) >= below_warden,
    )
    return agent, [agent.warden, *family]


def gone(pids: list[int]) -> None:
    def left() -> list[int]:
        return [pid for pid in pids if alive(pid)]

    try:
        until(left, "all of them are gone", holds=not_)
    finally:
        kill_all(left())


DETACHES = """
import subprocess
print("child", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
"""


@pytest.mark.parametrize("leaves", [False, True])
def test_what_outlives_a_good_end_is_named_and_may_be_left_alone(
    cluster: Cluster, leaves: bool
) -> None:
    script = cluster.folder / "detaches.py"
    script.write_text(DETACHES)
    option = ["--leave-children"] if leaves else []
    agent = cluster.run("--cold", *option, str(script))
    assert agent.wait() == 0
    found = re.search(r"child (\d+)", agent.said)
    assert found
    child = int(found[1])
    became = "live on" if leaves else "were killed, as --leave-children was not given"
    said = f"processes that ranks had started outlived them and {became}: {child} sleep 600\n"
    assert said in agent.said
    assert alive(child) == leaves
    if leaves:  # the next agent on the node does not take it for somebody's leftover
        assert cluster.run("--cold", str(script), node="node-2").wait() == 0
        assert alive(child)
        os.kill(child, signal.SIGKILL)


def test_nothing_is_left_of_a_job_that_failed_whatever_was_asked_for(cluster: Cluster) -> None:
    script = cluster.folder / "detaches.py"
    script.write_text(DETACHES + "raise SystemExit(3)\n")
    agent = cluster.run("--cold", "--leave-children", "--max-restarts", "0", str(script))
    assert agent.wait() == 1
    assert "outlived" not in agent.said
    found = re.search(r"child (\d+)", agent.said)
    assert found
    assert not alive(int(found[1]))


def test_a_killed_agent_leaves_nothing(cluster: Cluster) -> None:
    """Two ranks and forty data workers end with it (A12.2)."""
    agent, family = with_workers(cluster, 20, "--cold")
    agent.kill()
    gone(family)
    # A process for probes that is still starting reads that its agent is gone a moment later.
    until(cluster.left, "nothing of the job is left", holds=not_)


def test_a_stopped_round_leaves_nothing_of_a_large_family(cluster: Cluster) -> None:
    """As many as a rank gets that forks data workers without end, until somebody notices."""
    agent, family = with_workers(cluster, 150, "--cold")
    kept = {agent.warden}
    cluster.kill_rank(0, 1)
    cluster.until_stepping(2)
    gone([pid for pid in family if pid not in kept])
    cluster.finish()
    assert agent.wait() == 0
    assert cluster.left() == []


def test_a_killed_warden_leaves_nothing(cluster: Cluster) -> None:
    """Two ranks and forty data workers end with it (A12.2)."""
    agent, family = with_workers(cluster, 20, "--cold")
    os.kill(agent.warden, signal.SIGKILL)
    gone(family)


def test_a_killed_warden_costs_one_round(cluster: Cluster) -> None:
    agent, family = with_workers(cluster, 0, "--cold")
    os.kill(agent.warden, signal.SIGKILL)
    gone(family)
    until(lambda: cluster.facts("round_started")[1:] or agent.poll() is not None, "what comes next")
    cluster.finish()
    assert agent.wait() == 0
    assert [one["round"] for one in cluster.facts("round_formed")] == [1, 2]
    assert cluster.left() == []

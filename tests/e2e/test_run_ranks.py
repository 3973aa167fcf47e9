"""Ranks die, raise, or end early: the next round makes steps, and all of it is on record."""

import signal

import pytest

from everstep_services.cli.errors import CliError
from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS
from tests.waiting import WITHIN_S, until

PHASES = (
    "unfinished", "detect", "evidence", "decide", "stop", "rendezvous", "start",
    "first_step", "other",
)  # fmt: skip


def test_a_killed_rank_is_back_and_all_of_it_is_on_record(cluster: Cluster) -> None:
    """Cause, decision, budget and phases, as REST shows them (A4.6, A11.1)."""
    agent = cluster.steady("--nproc-per-node", "2")
    cluster.until_stepping(1)
    cluster.kill_rank(1, 1)
    cluster.until_stepping(2)
    cluster.finish()
    cluster.until_done()

    exited = {(one["round"], one["rank"]): one for one in cluster.facts("rank_exited")}
    killed = exited[1, 1]
    assert (killed["how"], killed["signal"]) == ("signal", "SIGKILL")
    assert killed["log"] is not None
    ended = cluster.facts("round_ended")
    assert [(one["round"], one["cause"]) for one in ended] == [(1, "rank_exited"), (2, "done")]
    decided = cluster.facts("action_decided")[0]
    assert (decided["action"], decided["rule"]) == ("restart", "restart.budget_left")
    assert decided["evidence"]
    assert decided["budgets"][0] == {"name": "restarts", "limit": 10, "left": 9}

    (incident,) = cluster.incidents()
    assert (incident["trigger"], incident["outcome"]) == ("rank_exited", "recovered")
    assert "rank 1 was ended by SIGKILL" in incident["story"]
    ledger = incident["ledger"]
    phases = sum(ledger[f"{phase}_s"] for phase in PHASES)
    assert phases == pytest.approx(ledger["wall_s"], abs=0.005)
    assert 0 < ledger["wall_s"] < WITHIN_S
    assert "round 1 is over" in agent.said


def test_the_environment_counts_restarts_and_logs_of_all_rounds_are_kept(cluster: Cluster) -> None:
    """Each round and rank has its files; lines carry node and rank (A4.4)."""
    cluster.steady("--nproc-per-node", "2", "--log-dir", str(cluster.folder / "logs"))
    for number in (1, 2):
        cluster.until_stepping(number)
        cluster.kill_rank(number - 1, number, signal.SIGSEGV)
    cluster.until_stepping(3)
    cluster.finish()
    cluster.until_done()
    logs = cluster.folder / "logs" / cluster.job
    for number in (1, 2, 3):
        for rank in (0, 1):
            folder = logs / f"round-{number}" / f"rank-{rank}"
            out = (folder / "stdout").read_text()
            assert f"rank {rank} of 2, restart {number - 1}" in out
            assert f"rank {rank} goes on from step" in (folder / "stderr").read_text()
            assert (f"rank {rank} ends at step" in out) == (number == 3)
    for rank in (0, 1):
        assert f"node-1:{rank}| rank {rank} of 2, restart 2" in cluster.agents[0].said


def test_the_tail_and_the_traceback_are_in_rest_when_the_node_is_gone(cluster: Cluster) -> None:
    """The agent has ended, and REST has the last 64 KiB (A4.4, A11.2)."""
    script = cluster.folder / "raises.py"
    script.write_text(
        "for _ in range(1000):\n    print('x' * 99)\n"
        "print('the last words')\nraise ValueError('a bug')\n"
    )
    agent = cluster.run("--cold", "--max-restarts", "0", str(script))
    assert agent.wait() == 1
    exited = cluster.until_fact("rank_exited")
    assert exited["error"]["name"] == "ValueError"
    assert "raise ValueError" in exited["error"]["traceback"]
    assert exited["error"]["place"] == "raises.py:4 in <module>"
    kept = f"jobs/{cluster.job}/rounds/1/ranks/0/log"
    assert "ValueError: a bug" in cluster.api.text(kept)
    tail = until(
        lambda: cluster.api.text(kept, {"stream": "stdout"}),
        "what it printed is on record",
        despite=CliError,
    )
    assert tail.endswith("the last words\n")
    assert 60_000 < len(tail) <= 65_536
    assert "ValueError: a bug" in agent.said


def test_ranks_that_end_well_early_wait_for_the_others(cluster: Cluster) -> None:
    script = cluster.folder / "early.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "while os.environ['RANK'] != '0' and not pathlib.Path(sys.argv[1], 'end').exists():\n"
        "    time.sleep(0.02)\n"
    )
    for node in ("node-1", "node-2"):
        cluster.run(
            *("--cold", "--nnodes", "2", "--nproc-per-node", "2", str(script)),
            str(cluster.folder),
            node=node,
        )
    cluster.until_fact("rank_exited", lambda body: body["rank"] == 0 and body["how"] == "done")
    assert cluster.facts("round_ended") == []
    cluster.finish()
    cluster.until_done()
    assert cluster.facts("incident_opened") == []
    assert {one["how"] for one in cluster.facts("rank_exited")} == {"done"}


def test_of_64_ranks_the_one_that_raised_is_named(cluster: Cluster) -> None:
    """63 ranks fail after it (A4.5)."""
    agent = cluster.run(
        *("--cold", "--nproc-per-node", "64", "--max-restarts", "0"),
        *(str(SCRIPTS / "ring.py"), "37"),
    )
    assert agent.wait() == 1
    incident = cluster.closed(1)[0]
    assert incident["rank"] == 37, incident
    assert "rank 37 exited with 1: ValueError: the root cause" in incident["story"]

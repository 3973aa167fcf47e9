"""Failures that come again, budgets that are spent, nodes that never come."""

import pytest

from tests.e2e.cluster import Body, Cluster
from tests.e2e.processes import SCRIPTS
from tests.variants import first_of, variant

DETERMINISTIC = {
    "import": ("import nothing_of_the_kind\n", "ModuleNotFoundError"),
    "syntax": ("def broken(:\n", "SyntaxError"),
    "file": ("open('/nowhere/at/all')\n", "FileNotFoundError"),
    "flag": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--no-such-flag'])\n",
        "SystemExit",
    ),
    "memory": (
        "class OutOfMemoryError(RuntimeError): pass\n"
        "raise OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')\n",
        "OutOfMemoryError",
    ),
    "step 7": (
        "from tests.e2e.scripts.stepping import Steps\n"
        "steps = Steps()\n"
        "while True:\n"
        "    steps.made_one()\n"
        "    assert steps.made < 7, 'the seventh batch is bad'\n",
        "AssertionError",
    ),
}


OF_CODE = {"import", "syntax", "flag"}
"""What the exception's kind shows: every rank fails in this way, wherever it starts."""


def rules(cluster: Cluster) -> list[tuple[str, str, str]]:
    """By rendezvous. Attribution advises, too, once it has a verdict, which nobody awaits."""
    return [
        (one["action"], one["rule"], one.get("mode", "enforce"))
        for one in cluster.facts("action_decided")
        if one["source"] == "rendezvous"
    ]


@pytest.mark.parametrize("kind", first_of({"import", "memory", "step 7"}, DETERMINISTIC))
def test_the_same_failure_twice_ends_the_job_where_that_was_asked_for(
    cluster: Cluster, kind: str
) -> None:
    """Each kind of failure: one more try, then 93 with the reason (A4.1, A12.3)."""
    text, name = DETERMINISTIC[kind]
    script = cluster.folder / "fails.py"
    script.write_text(text)
    agent = cluster.run("--cold", "--stop-on-repeat", str(script))
    assert agent.wait() == 93
    ended = cluster.until_fact("job_ended")
    state = "failed" if kind in OF_CODE else "stopped"
    assert (ended["state"], ended["exit_code"], ended["rounds"]) == (state, 93, 2)
    restart, stop, reason = (
        "budget_left",
        "same_fingerprint",
        "the same failure came twice in a row",
    )
    if kind in OF_CODE:
        restart, stop, reason = "backoff", "script_cannot_start", "the script cannot start"
    assert reason in ended["reason"]
    assert rules(cluster) == [
        ("restart", f"restart.{restart}", "enforce"),
        ("stop", f"stop.{stop}", "enforce"),
    ]
    assert {one["error"]["name"].rpartition(".")[2] for one in cluster.facts("rank_exited")} == {
        name
    }


MEETS = """
import os, pathlib, time
began = pathlib.Path(__file__).with_name("began-" + os.environ["EVERSTEP_ROUND"])
began.mkdir(exist_ok=True)
(began / os.environ["RANK"]).touch()
while len(list(began.iterdir())) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""
"""All ranks fail at one time: rendezvous compares those that fail soon after the first."""


@pytest.mark.parametrize("kind", ["flag", variant("import")])
def test_a_script_that_cannot_start_ends_the_job_after_one_more_try(
    cluster: Cluster, kind: str
) -> None:
    """A4.1: on every rank, by exceptions and by exits alike."""
    script = cluster.folder / "fails.py"
    script.write_text(MEETS + DETERMINISTIC[kind][0])
    agent = cluster.run("--cold", "--nproc-per-node", "3", str(script))
    assert agent.wait() == 93
    ended = cluster.until_fact("job_ended")
    assert (ended["exit_code"], ended["rounds"]) == (93, 2)
    assert rules(cluster)[-1] == ("stop", "stop.script_cannot_start", "enforce")
    assert "the script cannot start: every rank failed in this way" in agent.said


def test_a_rank_that_alone_cannot_start_is_tried_again(cluster: Cluster) -> None:
    """As where the file system of one node has a hiccup; the third time it is well."""
    script = cluster.folder / "hiccup.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1' and int(os.environ['EVERSTEP_ROUND']) < 3:\n"
        "    import nothing_of_the_kind\n"
        "if int(os.environ['EVERSTEP_ROUND']) < 3:\n"
        "    time.sleep(600)\n"
    )
    agent = cluster.run("--cold", "--nproc-per-node", "2", str(script))
    assert agent.wait() == 0
    assert cluster.until_fact("job_ended")["rounds"] == 3


def test_by_default_the_repeat_is_only_said_and_a_crash_loop_slows_down(cluster: Cluster) -> None:
    """Advice by default; the delay grows, and it is one incident (A4.1, A4.3)."""
    script = cluster.folder / "fails.py"
    script.write_text("open('/nowhere/at/all')\n")
    cluster.run("--cold", "--no-progress-limit", "none", str(script))
    cluster.until_fact("round_formed", lambda body: body["round"] == 3)
    decided = decisions(cluster, 3)
    assert [one.get("delay_s", 0.0) for one in decided[:3]] == [0.0, 5.0, 15.0]
    advice = [one for one in cluster.facts("action_decided") if one.get("mode") == "observe"]
    own = {one["rule"] for one in advice if one["source"] == "rendezvous"}
    assert own == {"stop.same_fingerprint"}
    assert {one["rule"] for one in advice} <= own | {"stop.user_error"}
    assert len(cluster.incidents()) == 1, "one crash loop is one incident, not many"


def decisions(cluster: Cluster, count: int) -> list[Body]:
    """The actions that were carried out, once there are `count`."""

    def found() -> list[Body]:
        facts = cluster.facts("action_decided")
        return [one for one in facts if one.get("mode", "enforce") == "enforce"]

    cluster.until_fact("action_decided", lambda _: len(found()) >= count)
    return found()


def test_a_spent_budget_ends_the_job_with_1(cluster: Cluster) -> None:
    """One restart is allowed, and one is made (A5.5, A12.3)."""
    agent = cluster.steady("--max-restarts", "1")
    for number in (1, 2):
        cluster.until_stepping(number)
        cluster.kill_rank(0, number)
    assert agent.wait() == 1
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended["exit_code"]) == ("failed", 1)
    assert "restarts are spent: 1 of 1" in agent.said
    assert [one["outcome"] for one in cluster.incidents()] == ["recovered", "failed"]


def test_rounds_without_progress_end_the_job(cluster: Cluster) -> None:
    script = cluster.folder / "fails.py"
    script.write_text("import os\nos.abort()\n")
    agent = cluster.run("--cold", "--no-progress-limit", "2", str(script))
    assert agent.wait() == 93
    assert "2 rounds in a row ended without known progress" in agent.said


def test_transient_failures_with_progress_never_stop_a_job(cluster: Cluster) -> None:
    """Five failures at different steps, and no restart is delayed (A4.2)."""
    cluster.steady("--no-progress-limit", "2", "--stop-on-repeat")
    for number in range(1, 6):
        cluster.until_stepping(number)
        cluster.kill_rank(0, number)
    cluster.until_stepping(6)
    cluster.finish()
    cluster.until_done()
    assert [one.get("delay_s", 0.0) for one in decisions(cluster, 5)] == [0.0] * 5


def test_too_few_nodes_end_with_92(cluster: Cluster) -> None:
    agent = cluster.steady("--nnodes", "2", "--join-timeout", "2")
    assert agent.wait() == 92
    assert len([line for line in agent.said.splitlines() if "warning" in line]) == 1
    assert "1 of 2" in agent.said, agent.said


def test_every_rank_fails_and_all_ranks_are_gone_everywhere(cluster: Cluster) -> None:
    """They ignore SIGTERM, and are killed after the grace, also on the other node (A4.7)."""
    for place, node in enumerate(("node-1", "node-2")):
        cluster.run(
            *("--cold", "--nnodes", "2", "--nproc-per-node", "2", "--infra-rank", str(place)),
            *("--stop-grace", "1", "--max-restarts", "0"),
            *(str(SCRIPTS / "deaf.py"), str(cluster.folder)),
            node=node,
        )
    cluster.until_all_step(4)
    cluster.kill_rank(3, 1)
    assert {agent.wait() for agent in cluster.agents} == {1}
    stopped = cluster.until_facts("ranks_stopped", lambda found: len(found) == 2)
    assert sorted(rank for one in stopped for rank in one["killed"]) == [0, 1, 2]
    assert cluster.left() == []


UNRECORDED = """
import atexit, os, pathlib, time
lost = pathlib.Path(__file__).with_name("lost")
if os.environ["RANK"] == "0":
    record = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name("error.json")
    record.mkdir()  # no file can take its place

    @atexit.register
    def linger():
        lost.touch()
        time.sleep(600)

    raise ValueError("the root cause")
while not lost.exists():
    time.sleep(0.01)
raise ConnectionError("Connection closed by peer")
"""


def test_a_rank_whose_exception_could_not_be_recorded_is_named_all_the_same(
    cluster: Cluster,
) -> None:
    """Its disk is full, or it is another user by now; it had failed before it was ended (A11.1)."""
    script = cluster.folder / "unrecorded.py"
    script.write_text(UNRECORDED)
    agent = cluster.run("--cold", "--nproc-per-node", "2", "--max-restarts", "0", str(script))
    assert agent.wait() != 0
    ends = {
        one["rank"]: one for one in cluster.until_facts("rank_exited", lambda all: len(all) > 1)
    }
    assert (ends[0]["exit_code"], ends[0]["first_error"]) == (1, "ValueError: the root cause")
    assert ends[1]["error"]["name"] == "ConnectionError"

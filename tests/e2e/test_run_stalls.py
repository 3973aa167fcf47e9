"""Ranks that stop making progress: found past their limit, named, and started again."""

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS

SCRIPT = str(SCRIPTS / "stalling.py")
LIMITS = [
    word
    for name in ("data", "outside", "checkpoint", "first-step")
    for word in ("--limit", f"{name}={10 if name == 'first-step' else 1.5}")
]
KINDS = {
    # how it hangs: phase, section, the kernel's letter, and in words
    "sleep": ("section", "data", "S", "it sleeps"),
    "gil": ("section", "data", "S", "it sleeps"),
    "lock": ("section", "data", "S", "it waits for a lock"),
    "busy": ("section", "data", "R", "it computes, or holds the interpreter's lock"),
    "stopped": ("section", "data", "T", "it is stopped, as by SIGSTOP"),
    "outside": ("step", None, "S", "it sleeps"),
    "checkpoint": ("checkpoint", "checkpoint", "S", "it sleeps"),
    "start": ("first_step", None, "S", "it sleeps"),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_rank_that_hangs_is_named_and_training_goes_on(cluster: Cluster, kind: str) -> None:
    phase, section, letter, words = KINDS[kind]
    agent = cluster.run("--nproc-per-node", "2", *LIMITS, SCRIPT, kind)
    stall = cluster.until_fact("rank_stalled")
    assert (stall["rank"], stall["phase"], stall.get("section")) == (1, phase, section)
    assert stall["process_state"] == letter
    assert stall["blocked_in"].startswith(words)
    limit_s = 10 if kind == "start" else 1.5
    assert (stall["limit_s"], stall["limit_source"]) == (limit_s, "configured")
    assert stall["waited_s"] >= limit_s
    assert agent.wait() == 0
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["rank"]) == ("rank_stalled", 1)
    assert cluster.facts("rank_recovered") == []
    assert cluster.until_fact("job_ended")["rounds"] == 2


def test_a_stall_may_be_only_said(cluster: Cluster) -> None:
    script = cluster.folder / "late.py"
    script.write_text(
        "import time, trainer_sdk\n"
        "run = trainer_sdk.session()\n"
        "run.step()\n"
        "with run.section('data'):\n"
        "    time.sleep(4)\n"
        "run.step()\n"
    )
    agent = cluster.run("--no-restart-on-stall", *LIMITS, str(script))
    assert agent.wait() == 0
    stall = cluster.until_fact("rank_stalled")
    recovered = cluster.until_fact("rank_recovered")
    assert (stall["is_fatal"], recovered["stall"]) == (False, stall["id"])
    assert recovered["stalled_s"] >= stall["waited_s"]
    assert cluster.incidents() == []
    assert cluster.until_fact("job_ended")["rounds"] == 1

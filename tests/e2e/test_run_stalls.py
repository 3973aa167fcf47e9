"""Ranks that stop making progress: found past their limit, named, and started again."""

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS
from tests.variants import first_of, variant
from tests.waiting import until

SCRIPT = str(SCRIPTS / "stalling.py")
START_WITHIN_S = 120.0
FIRST_STEP_S = 40.0
LIMIT_S, OTHERS_S = 5.0, 60.0
LOOK_WITHIN_S = 20.0
HELD = "it holds the interpreter's lock: no Python thread of it runs"
KINDS = {
    # how it hangs: phase, section, the kernel's letter, and in words
    "sleep": ("section", "data", "S", "it sleeps"),
    "gil": ("section", "data", "S", f"{HELD}; it sleeps"),
    "lock": ("section", "data", "S", "it waits for a lock"),
    "busy": ("section", "data", "R", "it computes; its main thread is at stalling.py:"),
    "stopped": ("section", "data", "T", "it is stopped, as by SIGSTOP"),
    "kernel": ("section", "data", "D", "it waits for "),
    "outside": ("step", None, "S", "it sleeps"),
    "checkpoint": ("checkpoint", "checkpoint", "S", "it sleeps"),
    "start": ("first_step", None, "S", "it sleeps"),
}


def limits(of: str) -> list[str]:
    """Short where it hangs; elsewhere ranks that get no turn for a while have not stalled."""
    found = {"data": OTHERS_S, "outside": OTHERS_S, "checkpoint": OTHERS_S}
    # Only where that is asked for: on a busy machine it takes long until a script begins.
    found |= {"first-step": FIRST_STEP_S} if of == "first-step" else {of: LIMIT_S}
    return [word for name in found for word in ("--limit", f"{name}={found[name]:g}")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", first_of({"gil", "kernel", "stopped", "checkpoint"}, KINDS))
def test_a_rank_that_hangs_is_named_and_training_goes_on(cluster: Cluster, kind: str) -> None:
    """Each kind of hang has the right rank, phase and stack (A3.2)."""
    phase, section, letter, words = KINDS[kind]
    limit_s = FIRST_STEP_S if kind == "start" else LIMIT_S
    where = {"start": "first-step", "outside": "outside"}.get(kind, section or "data")
    environ = {"EVERSTEP_AGENT__INTERPRETER_WITHIN_S": f"{LOOK_WITHIN_S:g}"}
    start = "--warm" if kind == "gil" else "--cold"
    agent = cluster.run(start, "--nproc-per-node", "2", *limits(where), SCRIPT, kind, **environ)
    stall = cluster.until_fact("rank_stalled", within_s=START_WITHIN_S)
    assert (stall["rank"], stall["phase"], stall.get("section")) == (1, phase, section)
    assert stall["process_state"] == letter
    assert stall["blocked_in"].startswith(words)
    assert (HELD in stall["blocked_in"]) == (kind == "gil")
    if letter in {"T", "D"}:
        assert "Python" not in stall["blocked_in"]  # the kernel's words say it all
    assert (stall["limit_s"], stall["limit_source"]) == (limit_s, "configured")
    assert stall["waited_s"] >= limit_s
    assert agent.wait(START_WITHIN_S) == 0
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["rank"]) == ("rank_stalled", 1)
    assert cluster.facts("rank_recovered") == []
    assert cluster.until_fact("job_ended")["rounds"] == 2


@pytest.mark.timeout(400)
@pytest.mark.parametrize("nodes", [variant(1), 2])
def test_who_waits_for_the_late_rank_does_not_excuse_it(cluster: Cluster, nodes: int) -> None:
    others = ("--limit", "exchange=1800", "--limit", "outside=1800", "--limit", "first-step=1800")
    script = (str(SCRIPTS / "missing.py"), str(cluster.folder))
    of_both = ("--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes))
    agents = [
        cluster.run(*of_both, "--limit", f"data={LIMIT_S:g}", *others, *script, node=f"node-{one}")
        for one in range(nodes)
    ]
    stall = cluster.until_fact("rank_stalled", within_s=START_WITHIN_S)
    assert (stall["rank"], stall["section"], stall["limit_s"]) == (1, "data", LIMIT_S)
    for agent in agents:
        assert agent.wait(START_WITHIN_S) == 0
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["rank"]) == ("rank_stalled", 1)
    assert cluster.until_fact("job_ended")["rounds"] == 2


def test_a_stall_may_be_only_said(cluster: Cluster) -> None:
    script = cluster.folder / "late.py"
    script.write_text(
        "import sys, time, trainer_sdk\n"
        "from pathlib import Path\n"
        "run = trainer_sdk.session()\n"
        "run.step()\n"
        "with run.section('data'):\n"
        "    while not Path(sys.argv[1]).exists():\n"
        "        time.sleep(0.02)\n"
        "run.step()\n"
    )
    said = cluster.folder / "said"
    options = ("--cold", "--no-restart-on-stall", *limits("data"))
    agent = cluster.run(*options, str(script), str(said))
    stall = cluster.until_fact("rank_stalled", within_s=START_WITHIN_S)
    opened = cluster.until_fact("incident_opened")
    assert (opened["trigger"], opened["rank"]) == ("rank_stalled", 0)
    assert opened["trigger_fact"] == stall["id"]
    stacks = cluster.until_fact("evidence_collected", lambda body: body["evidence"] == "stacks")
    assert stacks["incident"] == opened["incident"]
    said.touch()
    assert agent.wait() == 0
    recovered = cluster.until_fact("rank_recovered")
    assert (stall["is_fatal"], recovered["stall"]) == (False, stall["id"])
    assert recovered["stalled_s"] >= stall["waited_s"]
    (incident,) = cluster.incidents()
    assert (incident["outcome"], incident["next_round"], incident["lost_steps"]) == (
        "recovered",
        1,
        0,
    )
    assert incident["ledger"]["wall_s"] >= stall["waited_s"]
    assert cluster.until_fact("job_ended")["rounds"] == 1
    spent = cluster.api.get(f"jobs/{cluster.job}/goodput")["seconds"]
    assert spent["stall"] == pytest.approx(recovered["stalled_s"], rel=0.1)


HELD_LATE = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import trainer_sdk

dist.init_process_group("gloo")
run, rank, entered = trainer_sdk.session(), dist.get_rank(), Path(sys.argv[1])
for step in range(4):
    is_held = step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if is_held and rank == 1:
        while not entered.exists():
            time.sleep(0.02)
        with run.section("data"):
            os.kill(os.getpid(), signal.SIGSTOP)
    with run.section("exchange"):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if is_held:
            entered.touch()
        work.wait()
    run.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("nodes", [1, variant(2)])
def test_a_rank_that_a_signal_holds_is_not_excused_by_one_that_waited_before(
    cluster: Cluster, nodes: int
) -> None:
    """Nothing tells of a stopped rank in which collective it is: the other has a minute left."""
    script = cluster.folder / "held.py"
    script.write_text(HELD_LATE)
    of_both = ("--nnodes", str(nodes), "--nproc-per-node", str(2 // nodes))
    agents = [
        cluster.run(*of_both, *limits("data"), "--limit", f"exchange={OTHERS_S:g}", str(script),
                    str(cluster.folder / "entered"), node=f"node-{number}")
        for number in range(nodes)
    ]  # fmt: skip
    for agent in agents:
        assert agent.wait(START_WITHIN_S) == 0
    (stall,) = cluster.facts("rank_stalled")
    assert (stall["rank"], stall["process_state"]) == (1, "T")
    assert cluster.closed(1)[0]["rank"] == 1


MEETS = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import trainer_sdk

dist.init_process_group("gloo")
run = trainer_sdk.session()
for step in range(3):
    while step == 2 and dist.get_rank() == 1 and not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    with run.section("exchange"):
        dist.all_reduce(torch.ones(1))
    run.step()
dist.destroy_process_group()
"""


def test_the_console_that_names_a_rank_that_waits_names_later_what_it_waits_for(
    cluster: Cluster,
) -> None:
    """Rank 1 stands for a minute before that is a stall; rank 0 is called stalled long before."""
    script, go_on = cluster.folder / "meets.py", cluster.folder / "go-on"
    script.write_text(MEETS)
    of_both = ("--nnodes", "2", "--nproc-per-node", "1", "--no-restart-on-stall")
    limited = ("--limit", f"exchange={LIMIT_S:g}", "--limit", f"outside={OTHERS_S:g}")
    waits, late = (
        cluster.run(*of_both, *limited, str(script), str(go_on), node=f"node-{number}")
        for number in range(2)
    )
    may_wait = "everstep: what rank 0 may wait for: rank 1 is within its limit for "
    until(lambda: may_wait in waits.said, "it is corrected", within_s=START_WITHIN_S)
    assert "rank 0 has made no progress for 5 s in exchange" in waits.said
    assert "it waits for other ranks, so the cause may be another one" in waits.said
    go_on.touch()
    assert (waits.wait(), late.wait()) == (0, 0)
    (line,) = (line for line in waits.said.splitlines() if "what rank 0" in line)
    assert line.startswith(may_wait)
    assert "what rank" not in late.said


GROUP = """
import datetime, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if sys.argv[1] == "sdk":
    import trainer_sdk

    run = trainer_sdk.session()
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if sys.argv[1] == "sdk":
        run.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["sdk", variant("unmodified")])
def test_a_process_group_that_gives_up_before_us_is_warned_of(cluster: Cluster, kind: str) -> None:
    """A process group of one minute is compared with a limit of 90 s (A3.6)."""
    script = cluster.folder / "impatient.py"
    script.write_text(GROUP)
    agent = cluster.run("--limit", "data=90", str(script), kind)
    assert agent.wait(START_WITHIN_S) == 0
    said = [line for line in agent.said.splitlines() if "warning: the process group" in line]
    assert len(said) == 1, agent.said
    assert "gives up after 1 min, before a stall in data is found (90 s, configured)" in said[0]

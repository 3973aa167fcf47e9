"""Ranks that other launchers start are watched, and nothing is done to them."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import not_
from pathlib import Path

import pytest

from everstep_services.agent.settings import KINDS
from everstep_services.cli.errors import CliError
from tests.e2e.cluster import Body, Cluster
from tests.e2e.ports import free_port
from tests.e2e.processes import (
    ROOT,
    SCRIPTS,
    Process,
    alive,
    below,
    environment,
    kill_all,
    python,
    tagged,
)
from tests.waiting import until
from trainer_sdk.nvrx import aliases

SCRIPT = str(SCRIPTS / "launched.py")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
WRAPPED = str(ROOT / "tests" / "integration" / "nvrx" / "scripts" / "wrapped_ranks.py")
LIMITS = "data=5,outside=30,first-step=30"


class Launched:
    """What another launcher has started, as part of a job whose facts the cluster reads."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder
        self.runtime = self.folder / "runtime" / "everstep"
        self.where = str(cluster.folder)
        self.login = cluster.plane.login(cluster.job)
        self.processes: list[Process] = []

    def start(self, *command: str, **environ: str) -> Process:
        cluster = self.cluster
        own = {
            **self.login,
            "EVERSTEP_STATE_DIR": str(self.folder / "state"),
            "EVERSTEP_AGENT__LIMITS": LIMITS,
            "EVERSTEP_JOB": cluster.job,
        }
        log = self.folder / f"launched.{len(self.processes)}.log"
        environ = environment(self.folder, cluster.tag, **{**own, **environ})
        process = Process(command, environ, log, self.folder)
        self.processes.append(process)
        return process

    def ranks(self, count: int = 2, **environ: str) -> list[Process]:
        return [
            self.start(*python(SCRIPT, self.where), **{**place(rank, count), **environ})
            for rank in range(count)
        ]

    def agents(self) -> list[int]:
        """The agents that watch, by their command lines.

        A child has its parent's command line until it begins its own program.
        """
        named = [
            pid
            for pid in tagged(self.cluster.tag)
            if b"everstep_services.cli.attached" in _command(pid)
        ]
        children = {child.pid for pid in named for child in below(pid)}
        return [pid for pid in named if pid not in children]

    def until_now(self, holds: Callable[[dict[int, Body]], bool], what: str) -> dict[int, Body]:
        return until(self.cluster.ranks, what, holds=holds, despite=CliError)

    def may_speak(self, process: Process) -> bool:
        """The agent still holds the stderr of a rank."""
        return any(_has_open(pid, process.log) for pid in self.agents())

    def do(self, name: str) -> Path:
        path = self.folder / name
        path.touch()
        return path

    def until_nothing_is_left(self) -> None:
        until(self.cluster.left, "no process is left", holds=not_)
        assert list(self.runtime.iterdir()) == []


def place(rank: int, count: int) -> dict[str, str]:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {name: str(number) for name, number in here.items()}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _has_open(pid: int, path: Path) -> bool:
    with suppress(OSError):  # a process that is gone
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if one.samefile(path):
                    return True
    return False


@pytest.fixture
def launched(cluster: Cluster) -> Iterator[Launched]:
    launched = Launched(cluster)
    yield launched
    kill_all(cluster.left())  # of a test that failed: its launchers leave theirs behind
    for process in launched.processes:
        process.kill()


def test_a_stall_is_recorded_and_ends_nothing(launched: Launched) -> None:
    cluster = launched.cluster
    ranks = launched.ranks()
    cluster.until_all_step(2)
    launched.until_now(
        lambda found: {one["state"] for one in found.values()} == {"running"}, "both run"
    )
    until(lambda: cluster.state()["state"] == "running", "so does the job", despite=CliError)
    hold = launched.do("hold-1")
    stall = cluster.until_fact("rank_stalled", lambda body: body["rank"] == 1)
    assert (stall["section"], stall["is_fatal"]) == ("data", False)
    launched.until_now(lambda found: found[1]["state"] == "stalled", "the beats report it")
    assert [rank.poll() for rank in ranks] == [None, None]
    opened = cluster.until_fact("incident_opened")
    assert (opened["trigger"], opened["rank"]) == ("rank_stalled", 1)
    cluster.until_fact("evidence_collected", lambda body: body["evidence"] == "stacks")
    hold.unlink()
    cluster.until_fact("rank_recovered", lambda body: body["stall"] == stall["id"])
    assert_told_of(cluster, stall, opened)
    node = cluster.until_fact("node_check_finished")["node"]  # ranks that end first end it, too
    probes = until(
        lambda: cluster.api.get(f"nodes/{node}")["probes"], "its probes are shown", despite=CliError
    )
    assert {"gpu", "host", "kernel", "nic", "nvlink"} <= {probe["check"] for probe in probes}
    launched.do("end")
    assert [rank.wait() for rank in ranks] == [0, 0]
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended.get("exit_code"), ended["rounds"]) == ("done", 0, 1)
    assert {one["start"] for one in cluster.facts("rank_started")} == {"attached"}
    assert {one["how"] for one in cluster.facts("rank_exited")} == {"done"}
    assert len(cluster.incidents()) == 1
    launched.until_nothing_is_left()


def assert_told_of(cluster: Cluster, stall: Body, opened: Body) -> None:
    """The incident of a stall that is over has its cause, all of its time, and no lost step."""
    (incident,) = cluster.closed(1)
    assert (incident["outcome"], incident["lost_steps"]) == ("recovered", 0)
    assert incident["ledger"]["detect_s"] == stall["waited_s"]
    assert incident["story"] == f"{opened['reason']}; all ranks make progress again"
    spent = cluster.api.get(f"jobs/{cluster.job}/goodput")["seconds"]
    assert spent["stall"] == pytest.approx(incident["ledger"]["wall_s"], rel=0.1)


def test_the_first_verdict_names_a_frozen_rank_though_others_went_on(launched: Launched) -> None:
    """The rank is steps behind, and its stall is all the evidence, as before the rest has come."""
    cluster = launched.cluster
    ranks = launched.ranks(EVERSTEP_AGENT__EVIDENCE_WITHOUT=",".join(KINDS))
    cluster.until_all_step(2)
    launched.do("stop-1")
    stall = cluster.until_fact("rank_stalled", lambda body: body["rank"] == 1)
    assert stall["process_state"] == "T"
    opened = cluster.until_fact("incident_opened")
    assert opened["step"] > stall["step"], "the others made more steps"
    verdict = cluster.until_fact("verdict_reached", lambda body: not body.get("revision"))
    assert (verdict["incident"], verdict["culprit_ranks"]) == (opened["incident"], [1])
    assert (verdict["cause"], verdict["kind"]) == ("host", "stopped_process")
    assert "rank 1 (" in verdict["reason"]
    assert "is stopped, as the kernel shows" in verdict["reason"]
    assert not verdict.get("is_inconclusive")
    ranks[1].send(signal.SIGCONT)
    cluster.until_fact("rank_recovered", lambda body: body["stall"] == stall["id"])
    assert cluster.closed(1)[0]["outcome"] == "recovered"
    launched.do("end")
    assert [rank.wait() for rank in ranks] == [0, 0]
    launched.until_nothing_is_left()


IMPATIENT = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
import trainer_sdk

run, folder = trainer_sdk.session(), Path(sys.argv[1])
meet = f"file://{folder / 'meet'}"
minute = timedelta(minutes=1)
dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1, timeout=minute)
while not (folder / "end").exists():
    time.sleep(0.02)
    run.step()
"""


@pytest.mark.timeout(240)
def test_limits_in_the_wrong_order_are_said_where_the_rank_speaks(launched: Launched) -> None:
    script = launched.folder / "impatient.py"
    script.write_text(IMPATIENT)
    rank = launched.start(
        *python(str(script), launched.where),
        **place(0, 1),
        EVERSTEP_AGENT__LIMITS="data=90",
        TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="80",
    )
    said = until(
        lambda: rank.said,
        "the agent reports it",
        holds=lambda said: "gives up" in said,
        within_s=90,
    )
    lines = said.splitlines()
    assert all(line.startswith("everstep: ") for line in lines)
    rows = [" ".join(line.split()[1:]) for line in lines]
    for row in (
        "data 90 s [agent] limits",
        "process group 30 min torch's default with gloo",
        "NCCL's monitor 80 s TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    ):
        assert rows.count(row) == 1
    monitor, group = (row for row in rows if row.startswith("warning: "))
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=80 ends a rank before a stall in data" in monitor
    assert "the process group gives up after 1 min, before a stall in data" in group
    assert group.endswith("or set EVERSTEP_AGENT__LIMITS=data=30")
    until(lambda: launched.may_speak(rank), "the agent lets go of its stderr", holds=not_)
    launched.do("end")
    assert rank.wait() == 0
    launched.until_nothing_is_left()


@pytest.mark.timeout(180)
def test_an_agent_lets_go_of_a_ranks_stderr_when_a_rank_is_gone(launched: Launched) -> None:
    for rank in (0, 1):
        launched.do(f"hold-{rank}")  # before their first steps
    first, other = launched.ranks()
    launched.until_now(lambda found: len(found) == 2, "both ranks are watched")
    assert launched.may_speak(first)
    other.kill()
    until(lambda: launched.may_speak(first), "the agent lets go of its stderr", holds=not_)
    assert "how long a rank may go without progress" in first.said
    launched.do("end")
    launched.do("hold-0").unlink()
    assert first.wait() == 0
    launched.until_nothing_is_left()


def test_a_killed_rank_is_an_incident(launched: Launched) -> None:
    cluster = launched.cluster
    ranks = launched.ranks()
    cluster.until_all_step(2)
    ranks[1].kill()
    exited = cluster.until_fact("rank_exited")
    assert (exited["rank"], exited["how"], exited["signal"]) == (1, "signal", "SIGKILL")
    launched.do("end")
    assert ranks[0].wait() == 0
    assert cluster.until_fact("job_ended")["state"] == "failed"
    (incident,) = cluster.closed(1)
    assert (incident["rank"], incident["outcome"]) == (1, "failed")
    launched.until_nothing_is_left()


def test_of_a_rank_that_fails_there_is_evidence_and_a_verdict_without_a_node(
    launched: Launched,
) -> None:
    """What can be had from outside, of the ranks that still live, too (A4.4, A7.1)."""
    cluster = launched.cluster
    ranks = launched.ranks()
    cluster.until_all_step(2)
    launched.do("fail-1")
    wanted = {"page", "process", "stacks", "flight_recorder", "environment", "log"}
    found = cluster.until_facts(
        "evidence_collected", lambda facts: wanted <= {one["evidence"] for one in facts}
    )
    by_kind = {one["evidence"]: one for one in found}
    there = {kind for kind, one in by_kind.items() if one.get("blob")}
    assert {"page", "process", "environment", "log"} <= there
    assert all(one.get("missing") or one["summary"] for one in found)
    assert by_kind["log"]["rank"] == 1
    assert "rank 0" in by_kind["process"]["summary"], "it has not failed, and is looked at"
    (incident,) = cluster.incidents()
    verdict = cluster.until_fact(
        "verdict_reached",
        lambda body: (
            body["incident"] == incident["incident"] and not body.get("is_inconclusive")
        ),  # an agent that stands for some seconds has sent no evidence when the first is due
    )
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("user_code", [1])
    assert verdict.get("culprit_nodes", []) == []
    launched.do("end")
    assert ranks[0].wait() == 0
    launched.until_nothing_is_left()


def test_a_rank_that_is_gone_before_the_first_one_came_is_on_record(launched: Launched) -> None:
    cluster = launched.cluster
    launched.do("fail-1")
    early = launched.start(*python(SCRIPT, launched.where), **place(1, 2))
    assert early.wait() == 1
    exited = cluster.until_fact("rank_exited")
    assert (exited["rank"], exited["how"]) == (1, "error")
    assert exited["error"]["text"] == "the loss is not finite"
    launched.do("end")
    late = launched.start(*python(SCRIPT, launched.where), **place(0, 2))
    assert late.wait() == 0
    assert cluster.until_fact("job_ended")["state"] == "failed"
    launched.until_nothing_is_left()


def test_only_one_agent_watches_and_it_may_be_ended(launched: Launched) -> None:
    cluster = launched.cluster
    ranks = launched.ranks(LOCAL_RANK="0")  # each would start one
    launched.until_now(lambda found: len(found) == 2, "both ranks are watched")
    (agent,) = launched.agents()
    os.kill(agent, signal.SIGTERM)
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended.get("exit_code")) == ("unknown", None)
    assert "was ended by SIGTERM" in ended["reason"]
    until(lambda: alive(agent), "the agent is gone", holds=not_)
    assert [rank.poll() for rank in ranks] == [None, None]
    launched.do("end")
    assert [rank.wait() for rank in ranks] == [0, 0]
    launched.until_nothing_is_left()


@pytest.mark.parametrize("attach", ["", "off"])
def test_without_a_bus_a_line_says_so(launched: Launched, attach: str) -> None:
    launched.do("end")
    command = ["env", *(f"-u{name}" for name in launched.login), *python(SCRIPT, launched.where)]
    rank = launched.start(*command, EVERSTEP_ATTACH=attach, **place(0, 1))
    assert rank.wait() == 0
    until(launched.cluster.left, "no process is left", holds=not_)
    (line,) = rank.said.splitlines()
    assert line.startswith("everstep: ")
    assert ("no bus is known" in line) is not bool(attach)
    assert not launched.runtime.exists() or list(launched.runtime.iterdir()) == []


def test_without_a_bus_ranks_that_live_longer_end_as_they_would(launched: Launched) -> None:
    without = ["env", *(f"-u{name}" for name in launched.login)]
    ranks = []
    for rank in (1, 0):  # the first one starts an agent, which clears away what it finds
        ranks.append(launched.start(*without, *python(SCRIPT, launched.where), **place(rank, 2)))
        until((launched.folder / f"is-watched-{rank}").exists, f"rank {rank} is there")
    until(lambda: list(launched.runtime.iterdir()), "the agent has cleared away", holds=not_)
    launched.do("end")
    assert [rank.wait() for rank in ranks] == [0, 0]
    other, first = ranks
    assert all("no bus is known" in one or not one for one in first.said.splitlines())
    assert other.said == ""


@pytest.mark.timeout(180)
def test_torchrun_starts_its_ranks_again_in_the_next_round(launched: Launched) -> None:
    cluster = launched.cluster
    script = (str(SCRIPTS / "launched_gloo.py"), launched.where)
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    torchrun = launched.start(TORCHRUN, *options, *script)
    cluster.until_stepping(2, 100)
    launched.do("end")
    assert torchrun.wait() == 0
    assert cluster.until_fact("job_ended")["state"] == "done"
    assert [one["round"] for one in cluster.facts("round_formed")] == [1, 2]
    failed = cluster.until_fact("rank_exited", lambda one: one["rank"] == 1 and one["round"] == 1)
    assert (failed["how"], failed["error"]["text"]) == ("error", "the loss is not finite")
    (incident,) = cluster.closed(1)
    assert (incident["rank"], incident["outcome"]) == (1, "recovered")
    assert not cluster.facts("rank_stalled")
    launched.until_nothing_is_left()


@pytest.mark.variant
def test_a_restart_in_the_processes_is_an_incident(launched: Launched) -> None:
    """NVRx's wrapper, with Everstep's modules in place of NVRx's, under another launcher."""
    meeting = {
        "PYTHONPATH": os.pathsep.join([aliases.FOLDER, str(ROOT)]), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    command = python(WRAPPED, launched.where, "0", "raises")
    ranks = [launched.start(*command, **place(rank, 2), **meeting) for rank in range(2)]
    opened = launched.cluster.until_fact("incident_opened")
    assert (opened["trigger"], opened["rank"]) == ("restarted_in_process", 1)
    assert opened["reason"] == "rank 1 raised RuntimeError: on purpose"
    assert launched.cluster.until_fact("incident_closed")["outcome"] == "recovered"
    assert [rank.wait() for rank in ranks] == [0, 0]

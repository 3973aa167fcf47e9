"""Which allocation follows which exit code, and how Slurm is asked for it.

Acceptance: A12.3.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from everstep.errors import EverstepError
from everstep_services.agent.allocation_folder import AgentEnd, AllocationFolder
from everstep_services.agent.core.actions import ExitAgent
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.slurm.allocations import (
    AllocationLedger,
    EndedAllocation,
    decide,
    job_code,
    outcome,
)
from everstep_services.cli.slurm.batch_script import DrainMode
from everstep_services.cli.slurm.controller import CommandResult, SlurmController, leaving
from everstep_services.cli.slurm.script_steps import FOLDER, SlurmJob, finish, watch_drains


def end(node: str, code: int, *, ends_job: bool) -> AgentEnd:
    return AgentEnd(node=node, code=code, cause="x", reason="y", ends_job=ends_job)


def preempted(node: str, code: int, *, had_work: bool) -> AgentEnd:
    return AgentEnd(
        node=node, code=code, cause="preempted", reason="SIGUSR1", ends_job=False, had_work=had_work
    )


WAITING = tuple(preempted(node, 91, had_work=False) for node in ("n1", "n2"))


def goes_on(*codes: int, retries: int = 2) -> bool:
    allocations = [EndedAllocation(id=str(number), code=code) for number, code in enumerate(codes)]
    return decide(allocations, retries).goes_on


@pytest.mark.parametrize(
    ("codes", "follows"),
    [
        ([0], False), ([2], False), ([93], False), ([130], False),
        ([91], True), ([91] * 50, True),
        ([1], True), ([90], True), ([92], True), ([94], True), ([137], True), ([3], True),
        ([1, 1], True), ([1, 90, 137], False), ([1, 1, 91, 1, 1], True),
        ([1, 1, 91, 1, 1, 1], False), ([1, 91, 0], False),
    ],
)  # fmt: skip
def test_failures_in_a_row_have_a_limit_and_preemptions_have_none(
    codes: list[int], follows: bool
) -> None:
    assert goes_on(*codes) is follows


def test_without_retries_the_first_failure_is_the_last() -> None:
    assert not goes_on(90, retries=0)
    assert goes_on(91, retries=0)


def test_decisions_name_the_code_and_the_limit() -> None:
    text = decide([EndedAllocation(id=str(n), code=92) for n in range(3)], 2).text
    assert text == (
        "there were not enough nodes (92); failed allocations in a row: 3, and --retries is 2: "
        "it ends"
    )


def test_every_code_has_an_outcome() -> None:
    outcomes = {outcome(EndedAllocation(id="7-0", code=code)) for code in range(256)}
    assert outcomes == {"done", "preempted", "failed", "final"}


@pytest.mark.parametrize(
    ("code", "nodes", "result"),
    [
        (91, WAITING, "unused"),
        (143, tuple(preempted(n, 143, had_work=False) for n in ("n1", "n2")), "unused"),
        (143, (WAITING[0], preempted("n2", 143, had_work=True)), "failed"),
        (137, WAITING, "failed"),  # another agent was killed, and wrote nothing
        (143, (), "failed"),
        (143, (WAITING[0], end("n2", 143, ends_job=False)), "failed"),
    ],
)
def test_a_preemption_before_any_rank_trained_is_no_failure(
    code: int, nodes: tuple[AgentEnd, ...], result: str
) -> None:
    """An allocation that the scheduler takes back while agents wait is not counted (A12.3)."""
    ended = EndedAllocation(id="7-1", code=code, nodes=nodes)
    assert outcome(ended) == result
    failed = EndedAllocation(id="7-0", code=1)
    row = [failed, ended, failed] if result == "unused" else [failed, ended]
    assert decide(row, retries=2).text.endswith("in a row: 2, --retries 2: the job is tried again")
    assert decide([*[ended] * 9], retries=2).goes_on is (result == "unused")


@pytest.mark.parametrize(
    ("step", "ends", "code"),
    [
        (137, [], 137),
        (91, [end("n1", 91, ends_job=False), end("n2", 0, ends_job=True)], 0),
        (137, [end("n2", 0, ends_job=True)], 0),  # n1 was lost, and a spare finished the job
        (137, [end("n1", 0, ends_job=False)], 137),  # drained; then all others were killed
        (93, [end("n1", 0, ends_job=False), end("n2", 93, ends_job=True)], 93),
        (91, [end("n1", 91, ends_job=False), end("n2", 91, ends_job=False)], 91),
        (90, [end("n1", 90, ends_job=False), end("n2", 0, ends_job=True)], 0),  # n1 was refused
        (2, [end("n1", 2, ends_job=False), end("n2", 2, ends_job=False)], 2),  # both were
        (138, [end("n1", 91, ends_job=False), preempted("n2", 138, had_work=False)], 91),  # a spare
        (143, [end("n1", 91, ends_job=False), preempted("n2", 143, had_work=True)], 143),
        (137, [end("n1", 91, ends_job=False), preempted("n2", 138, had_work=False)], 137),
        (91, list(WAITING), 91),
    ],
)
def test_a_node_that_left_early_does_not_speak_for_the_job(
    step: int, ends: list[AgentEnd], code: int
) -> None:
    """srun returns the highest code of all tasks, also of nodes that were replaced."""
    assert job_code(step, ends) == code


# -- files ---------------------------------------------------------------------------------------


def test_the_ledger_counts_an_allocation_once_and_survives_a_torn_line(tmp_path: Path) -> None:
    ledger = AllocationLedger(tmp_path)
    ledger.add(EndedAllocation(id="7-0", code=1))
    ledger.add(EndedAllocation(id="7-0", code=1))
    with ledger.path.open("ab") as file:
        file.write(b'{"id":"7-1","co')  # killed while it wrote
    assert [each.id for each in ledger.read()] == ["7-0"]
    assert [each.code for each in ledger.add(EndedAllocation(id="7-1", code=91))] == [1, 91]
    assert [each.code for each in ledger.read()] == [1, 91]


@pytest.mark.parametrize("line", ['{"id":"7-0","code":"x"}', "garbage", "\x00\x85", "[]"])
def test_a_damaged_line_stops_no_job(tmp_path: Path, line: str) -> None:
    """After a full disk or a crash the job is requeued, and the damage is one line (A12.3)."""
    ledger = AllocationLedger(tmp_path)
    ledger.add(EndedAllocation(id="7-0", code=1))
    with ledger.path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    assert [each.code for each in ledger.add(EndedAllocation(id="7-1", code=91))] == [1, 91]
    assert "allocations.jsonl, line 2: " in ledger.damaged
    assert ledger.damaged.endswith("; this line is not counted")
    assert "\n" not in ledger.damaged
    assert [each.code for each in ledger.read()] == [1, 91]


def test_a_ledger_in_no_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot be used: No such file"):
        AllocationLedger(tmp_path / "missing").add(EndedAllocation(id="7-0", code=1))


@pytest.mark.parametrize(
    ("exiting", "ends_job"),
    [
        (ExitAgent(0, "done", "all done", is_sent=True, ends_job=True), True),
        (ExitAgent(93, "stopped", "by a person", is_sent=True, ends_job=True), True),
        (ExitAgent(0, "excluded", "drained", is_sent=True), False),
        (ExitAgent(2, "refused", "has the release of another", is_sent=True), False),
        (ExitAgent(91, "preempted", "SIGUSR1"), False),
    ],
)
def test_agents_tell_whether_their_code_is_the_jobs(
    tmp_path: Path, exiting: ExitAgent, ends_job: bool
) -> None:
    folder = AllocationFolder(tmp_path)
    folder.write_end("n1", exiting)
    (tmp_path / "n2.end").write_text("{")
    (written,) = folder.ends()
    assert (written.node, written.code, written.ends_job) == ("n1", exiting.code, ends_job)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EverstepError, match="name one that all nodes share") as error:
        AllocationFolder(tmp_path / "missing").write_end("n1", ExitAgent(0, "done", ""))
    assert "\n" not in str(error.value)


# -- Slurm's commands ----------------------------------------------------------------------------


class SlurmCommands:
    """Answers in place of Slurm's commands, and notes them."""

    def __init__(self, **answers: CommandResult | list[CommandResult]) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.slept: list[float] = []
        self.said: list[str] = []

    def run(self, command: Sequence[str]) -> CommandResult:
        self.calls.append(" ".join(command))
        answer = self.answers.get(command[1] if command[0] == "scontrol" else command[0])
        if isinstance(answer, list):
            return answer.pop(0) if len(answer) > 1 else answer[0]
        return answer or CommandResult(0, "", "")

    def controller(self, away_s: float = 600.0) -> SlurmController:
        return SlurmController(
            self.run, away_s=away_s, sleep=self.slept.append, say=self.said.append
        )


RUNNING = CommandResult(0, "JobId=7 JobName=llama JobState=RUNNING Reason=None\n", "")
AWAY = CommandResult(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n")


def ended(
    commands: SlurmCommands, tmp_path: Path, code: int, *, chain: bool = False, **environ: str
) -> int:
    job = SlurmJob.of({"SLURM_JOB_ID": "7", FOLDER: str(tmp_path), **environ})
    return finish(
        job, code, AllocationLedger(tmp_path), 2,
        in_chain=chain, slurm=commands.controller(), say=commands.said.append,
    )  # fmt: skip


def test_a_preempted_job_is_requeued(tmp_path: Path) -> None:
    commands = SlurmCommands(show=RUNNING)
    assert ended(commands, tmp_path, 91) == 91
    assert commands.calls == ["scontrol show job --oneliner 7", "scontrol requeue 7"]


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING", "TIMEOUT"])
def test_a_job_that_slurm_is_ending_is_not_requeued(tmp_path: Path, state: str) -> None:
    """`scancel` ends a job for good, although its agents leave with 91."""
    commands = SlurmCommands(show=CommandResult(0, f"JobId=7 JobState={state}\n", ""))
    assert ended(commands, tmp_path, 91) == 91
    assert commands.calls == ["scontrol show job --oneliner 7"]
    assert commands.said[-1] == (
        f"Slurm is ending job 7 itself ({state}): not requeued by this script"
    )


def test_a_job_that_slurm_has_forgotten_is_not_requeued(tmp_path: Path) -> None:
    gone = CommandResult(1, "", "slurm_load_jobs error: Invalid job id specified\n")
    commands = SlurmCommands(show=gone)
    ended(commands, tmp_path, 91)
    assert len(commands.calls) == 1


@pytest.mark.parametrize("code", [0, 2, 93])
def test_a_job_that_is_over_is_not_requeued(tmp_path: Path, code: int) -> None:
    commands = SlurmCommands(show=RUNNING)
    assert ended(commands, tmp_path, code) == code
    assert commands.calls == []


def test_failed_allocations_are_counted_over_requeues(tmp_path: Path) -> None:
    commands = SlurmCommands(show=RUNNING)
    for attempt in range(3):
        assert ended(commands, tmp_path, 1, SLURM_RESTART_COUNT=str(attempt)) == 1
    assert commands.calls.count("scontrol requeue 7") == 2
    assert commands.said[-1].endswith("failed allocations in a row: 3, and --retries is 2: it ends")


def test_a_chain_ends_early_where_nothing_is_left_to_do(tmp_path: Path) -> None:
    commands = SlurmCommands()
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "8"}
    assert ended(commands, tmp_path, 91, chain=True, **array) == 91
    assert commands.calls == []
    assert ended(commands, tmp_path, 0, chain=True, **{**array, "SLURM_JOB_ID": "8"}) == 0
    assert commands.calls == ["scancel --state=PENDING 5"]


def test_the_last_allocation_of_a_chain_asks_for_another(tmp_path: Path) -> None:
    commands = SlurmCommands()
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "8", "SLURM_ARRAY_TASK_MAX": "8"}
    ended(commands, tmp_path, 91, chain=True, **array)
    assert commands.said[-1] == (
        "this was the last allocation of the chain: submit another one to continue"
    )


def test_a_chain_that_is_no_array_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="--chain: this job is not an array") as error:
        ended(SlurmCommands(), tmp_path, 91, chain=True)
    assert error.value.code == Exit.USAGE


def test_outside_of_slurm_it_is_one_line() -> None:
    with pytest.raises(CliError, match="SLURM_JOB_ID is not set"):
        SlurmJob.of({})


def test_a_controller_that_is_away_is_asked_again() -> None:
    commands = SlurmCommands(requeue=[AWAY, AWAY, AWAY, CommandResult(0, "", "")])
    commands.controller().requeue("7")
    assert commands.slept == [1.0, 2.0, 4.0]
    assert len(commands.said) == 1


def test_a_controller_that_stays_away_is_one_line() -> None:
    commands = SlurmCommands(requeue=AWAY)
    with pytest.raises(CliError, match="has not answered `scontrol requeue 7` for ") as error:
        commands.controller(away_s=60).requeue("7")
    assert error.value.code == Exit.UNREACHABLE
    assert sum(commands.slept) >= 60


def test_a_refusal_is_not_repeated() -> None:
    commands = SlurmCommands(requeue=CommandResult(1, "", "Access/permission denied\n"))
    with pytest.raises(CliError, match="has failed: Access/permission denied"):
        commands.controller().requeue("7")
    assert commands.slept == []


# -- drained nodes -------------------------------------------------------------------------------

_NODES = """\
NodeName=n1 Arch=x86_64 State=ALLOCATED ThreadsPerCore=1 Comment=DRAIN
NodeName=n2 Arch=x86_64 State=ALLOCATED+DRAIN Reason=bad link on port 3 [root@2026-01-02T03:04:05]
NodeName=n-3.x Arch=x86_64 State=MIXED*+DRAINING Extra=a
NodeName=n4 Arch=x86_64 State=IDLE+FAILING Reason=ECC
"""


def test_nodes_that_are_drained_or_fail() -> None:
    assert leaving(_NODES) == {"n2": "bad link on port 3", "n-3.x": "", "n4": "ECC"}
    assert leaving("") == {}


class EnoughError(Exception):
    """The watch has looked often enough."""


def test_agents_of_drained_nodes_are_asked_to_leave_once(tmp_path: Path) -> None:
    idle = CommandResult(0, "NodeName=n2 State=IDLE\n", "")
    commands = SlurmCommands(show=[CommandResult(0, _NODES, ""), AWAY, idle])
    looks = iter(range(3))

    def sleep(_: float) -> None:
        if next(looks) == 2:
            raise EnoughError

    job = SlurmJob.of(
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", FOLDER: str(tmp_path / "a")}
    )
    with pytest.raises(EnoughError):
        watch_drains(job, 60.0, commands.controller(away_s=0), commands.said.append, sleep)
    folder = AllocationFolder(tmp_path / "a")
    assert folder.leave_reason("n1") is None
    assert folder.leave_reason("n2") == "Slurm drains n2 (bad link on port 3)"
    assert folder.leave_reason("n-3-x") == "Slurm drains n-3.x"  # as the agent calls itself
    assert sum("n2" in text for text in commands.said) == 1


@pytest.mark.parametrize("missing", [FOLDER, "SLURM_JOB_NODELIST"])
def test_a_watch_without_its_surroundings_is_one_line(tmp_path: Path, missing: str) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", FOLDER: str(tmp_path)}
    del environ[missing]
    with pytest.raises(CliError, match=f"{missing} is not set"):
        watch_drains(SlurmJob.of(environ), 60.0, SlurmCommands().controller(), lambda _: None)


# -- nodes that are drained by policy ------------------------------------------------------------


def watched(commands: SlurmCommands, folder: Path, drains: DrainMode, rounds: int = 3) -> None:
    """Watch a job on n1 to n-3.x for some rounds."""
    looks = iter(range(rounds))

    def sleep(_: float) -> None:
        if next(looks) == rounds - 1:
            raise EnoughError

    job = SlurmJob.of({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", FOLDER: str(folder)})
    with pytest.raises(EnoughError):
        watch_drains(
            job, 60.0, commands.controller(away_s=0), commands.said.append, sleep, drains=drains
        )


class NamedNodes(SlurmCommands):
    """Answers with the names of the nodes, too."""

    def run(self, command: Sequence[str]) -> CommandResult:
        if command[:3] == ("scontrol", "show", "hostnames"):
            return CommandResult(0, "n1\nn2\nn-3.x\n", "")
        return super().run(command)


def excluded(folder: Path, reason: str = 'n-3-x is excluded by ann: "fan" = bad') -> Path:
    AllocationFolder(folder).write_exclusion("n-3-x", reason)
    return folder


def test_an_excluded_node_is_drained_once_by_its_name_in_slurm(tmp_path: Path) -> None:
    commands = NamedNodes()
    watched(commands, excluded(tmp_path), "enforce")
    drains = [call for call in commands.calls if "State=DRAIN" in call]
    assert drains == [
        "scontrol update NodeName=n-3.x State=DRAIN "
        "Reason=everstep: n-3-x is excluded by ann:  fan    bad"
    ]


def test_a_drain_that_only_observes_is_one_line(tmp_path: Path) -> None:
    commands = NamedNodes()
    watched(commands, excluded(tmp_path, "its fan"), "observe")
    assert commands.said == ["n-3.x would be drained with --drain-excluded enforce: its fan"]
    assert not any("DRAIN" in call for call in commands.calls)


def test_without_the_policy_nothing_is_said_of_excluded_nodes(tmp_path: Path) -> None:
    commands = NamedNodes()
    watched(commands, excluded(tmp_path), "off")
    assert commands.said == []


def test_a_drain_without_the_right_to_it_is_one_line(tmp_path: Path) -> None:
    commands = NamedNodes(update=CommandResult(1, "", "slurm_update error: Invalid user id\n"))
    watched(commands, excluded(tmp_path), "enforce")
    (said,) = commands.said
    assert "Slurm refuses to drain it" in said
    assert "Invalid user id" in said
    assert "draining needs an operator of Slurm" in said


def test_a_controller_that_is_away_is_reported_once_and_its_return_once(tmp_path: Path) -> None:
    idle = CommandResult(0, "NodeName=n2 State=IDLE\n", "")
    commands = NamedNodes(show=[AWAY, AWAY, AWAY, idle, idle])
    watched(commands, tmp_path, "off", rounds=5)
    away, back = commands.said
    assert "drained nodes are noticed once it answers again" in away
    assert back == "Slurm's controller answers again"


def test_a_node_that_is_included_again_may_be_drained_again(tmp_path: Path) -> None:
    folder = AllocationFolder(tmp_path)
    folder.write_exclusion("n1", "fan")
    assert folder.exclusions() == {"n1": "fan"}
    folder.write_exclusion("n1", "")
    folder.write_exclusion("n2", "")
    assert folder.exclusions() == {}


@pytest.mark.parametrize(("code", "text"), [(137, "signal 9"), (255, "the step failed (255)")])
def test_only_signals_are_called_signals(code: int, text: str) -> None:
    """`srun` exits with 255 when it fails itself."""
    assert text in decide([EndedAllocation(id="1", code=code)], 2).text

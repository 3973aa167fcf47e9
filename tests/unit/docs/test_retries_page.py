"""The page on retries says what the code does: codes, budgets, time-outs, names of others."""

import importlib.util
import re
from pathlib import Path

import pytest

from everstep.incident_causes import IncidentCause, meaning_of
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls import limits_table
from everstep_services.cli.kubernetes.job_manifest import FINAL, NOT_COUNTED
from everstep_services.cli.machine.doctor import CHECKS
from everstep_services.cli.run.arguments import scan
from everstep_services.cli.slurm.allocations import EndedAllocation, outcome
from everstep_services.rendezvous.domain import admission, ends

PAGE = (Path(__file__).parents[3] / "docs/guides/retries.md").read_text(encoding="utf-8")


def row(start: str) -> list[str]:
    """The cells of the row of a table that begins so."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("failure", "column", "code"),
    [
        ("a node is silent", 3, ends.NOT_ENOUGH_NODES),
        ("the scheduler takes nodes away", 3, ends.PREEMPTED),
        ("the allocation ends", 3, ends.PREEMPTED),
        ("the same failure again and again", 2, admission.DO_NOT_RESTART),
        ("the script cannot start", 2, admission.DO_NOT_RESTART),
        ("the restart budget is spent", 2, 1),
    ],
)
def test_a_failure_ends_with_the_code_of_the_table(failure: str, column: int, code: int) -> None:
    assert re.search(rf"\b{code}\b", row(failure)[column])


def test_a_drained_node_leaves_with_one_of_two_codes() -> None:
    assert row("a node must be serviced")[3] == f"its agent exits with 0 or {ends.RETRYABLE}"


@pytest.mark.parametrize(
    ("cause", "costs"),
    [("node_lost", True), ("rank_exited", True), ("preempted", False), ("operator", False)],
)
def test_what_a_restart_costs(cause: IncidentCause, costs: bool) -> None:
    assert "A lost node costs a restart; a\npreemption and an order of a person" in PAGE
    assert meaning_of(cause).costs_restart is costs


def test_after_which_codes_another_job_begins() -> None:
    owner = row("start a new job while there is work")[1]
    assert "after 91 always; after 90, 92, 94 and failures such as 1 within a limit" in owner
    assert outcome(EndedAllocation(id="7", code=91)) == "preempted"
    assert {outcome(EndedAllocation(id="7", code=code)) for code in (1, 90, 92, 94)} == {"failed"}
    assert {outcome(EndedAllocation(id="7", code=code)) for code in FINAL} == {"final"}
    assert set(NOT_COUNTED) == {90, 91}, "there 90 does not count"


def test_the_order_of_time_outs_is_that_of_the_defaults() -> None:
    agent = AgentSettings()
    assert agent.stop_grace_s < agent.preempt_grace_s
    assert limits_table._NCCL_MONITOR_S == 8 * 60
    assert "(`TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`, 8 min)" in PAGE
    assert agent.max_restarts_per_hour is None, "if you set it"


def test_the_checks_of_the_doctor_that_it_names_exist() -> None:
    assert {"launchers", "timeouts"} <= {check.__name__ for check in CHECKS}


def test_the_options_that_it_names_exist() -> None:
    """Those of `everstep run`; those of other commands stand behind the command."""
    words = ("--max-restarts", "1", "--max-restarts-per-hour", "1", "--join-timeout", "1",
             "--stop-on-repeat", "--stop-grace", "1", "--preempt-grace", "2",
             "--limit", "outside=60")  # fmt: skip
    options = {word for word in words if word.startswith("--")}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named - options <= {"--retries", "--signal", "--ft-cfg-path"}, (
        "a new option: add it here"
    )
    assert scan((*words, "train.py"), {}).script == "train.py"


def test_the_option_of_hugging_face_exists() -> None:
    pytest.importorskip("transformers")
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "training_args.py").read_text(encoding="utf-8")
    assert "enable_jit_checkpoint: bool" in text
    assert row("Hugging Face's `enable_jit_checkpoint`")

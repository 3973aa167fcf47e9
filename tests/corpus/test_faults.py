"""Each fault of the corpus shows as its label says; stacks of hangs accuse nobody else."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from everstep_services.attribution.stack_analysis.analysis import StackAnalysis
from everstep_services.attribution.stack_analysis.files import read_content
from everstep_services.attribution.stack_analysis.report import StackReport
from tests.corpus.faults import FAULTS, Fault, Outcome, Run, command, running
from tests.corpus.injected.registry import injections
from tests.corpus.surroundings import surroundings
from tests.corpus.training import draw

pytestmark = pytest.mark.timeout(240)  # each rank imports torch
_WORLD = 3
_PY_SPY = Path(sysconfig.get_path("scripts"), "py-spy")
_QUICK = {("exception", 0), ("sleeping_rank", 0)}
_NAMED = {"lock_held", "sleeping_rank", "stuck_loader", "stuck_checkpoint", "dead_peer"}
"""Hangs in which a rank is in no collective: stacks name it."""


def test_each_label_has_its_injection() -> None:
    assert set(FAULTS) == set(injections())
    for key, injection in injections().items():
        assert injection.run.__doc__, key
        assert FAULTS[key].hangs or FAULTS[key].ends, key


def test_each_class_has_five_variants() -> None:
    names = {name for name, _ in FAULTS}
    assert len(names) == 19
    assert all(sum(name == one for one, _ in FAULTS) >= 5 for name in names)


def test_a_seed_draws_rank_and_step() -> None:
    drawn = {draw(seed, 4) for seed in range(200)}
    assert {rank for rank, _ in drawn} == set(range(4))
    assert draw(7, 4) == draw(7, 4)
    assert FAULTS["wrong_order", 4].culprits(7, 2) == (0, 1)


def test_a_fault_that_does_not_exist_is_a_line(tmp_path: Path) -> None:
    words = command(Fault("sleeping_rank", 99, "unknown"), 0, tmp_path)
    found = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "--variant 99: sleeping_rank has 0 to 5" in found.stderr


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(one, id=str(one), marks=() if key in _QUICK else pytest.mark.variant)
        for key, one in FAULTS.items()
    ],
)
def test_a_fault_shows_as_its_label_says(fault: Fault, tmp_path: Path) -> None:
    """A7.5, and A4.5: it ends or hangs the ranks that it should; no stack accuses another rank."""
    seed = 7 * fault.variant + 1
    with (
        surroundings(fault.needs) as environ,
        running(fault, tmp_path, seed=seed, world=_WORLD, environ=environ) as run,
    ):
        outcome = run.settle()
        report = _stacks(run) if outcome.hangs else None
    _check(outcome)
    if report is not None:
        _check_stacks(report, outcome)


def _check(outcome: Outcome) -> None:
    fault, text = outcome.fault, str(dict(outcome.output))
    assert outcome.hangs is fault.hangs, text
    assert set(outcome.culprits) <= set(outcome.hit), text
    for rank in outcome.culprits:
        end = outcome.ends[rank]
        assert end in fault.ends if fault.ends else end is None, text
    if not fault.hangs:
        assert None not in outcome.ends.values(), text
        assert not any("done" in told for told in outcome.progress.values()), text


def _stacks(run: Run) -> StackReport:
    """As `everstep stacks analyze` reads what py-spy prints of all ranks."""
    analysis = StackAnalysis()
    for rank, process in run.ranks.items():
        has_workers = run.fault.name == "stuck_loader"  # its JSON has nothing about them
        how = "--subprocesses" if has_workers else "--json"
        words = [str(_PY_SPY), "dump", how, "--pid", str(process.pid)]
        printed = subprocess.run(words, capture_output=True, check=False).stdout
        if not printed:  # a stopped process cannot be stopped again
            printed = subprocess.run(
                [*words, "--nonblocking"], capture_output=True, check=False
            ).stdout
        analysis.add(read_content(printed, rank, f"rank_{rank}.json"))
    return analysis.report()


def _check_stacks(report: StackReport, outcome: Outcome) -> None:
    """A7.6: right, or inconclusive."""
    suspects = {one.rank for one in report.suspects}
    if report.verdict == "odd_ranks":
        assert suspects <= set(outcome.culprits), report
    if outcome.fault.name in _NAMED:
        assert (report.verdict, suspects) == ("odd_ranks", set(outcome.culprits)), report
    if outcome.fault.name == "stuck_loader" and outcome.fault.variant in (1, 4):
        assert "its worker is at" in report.suspects[0].reason, report

"""Who hangs where devices work in order, and dumps have only what is not over."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep_services.attribution.analyzers.flight_recorder import shown_faults
from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.report import Fault, FlightReport, Suspect, lines
from tests.fakes import device_queues
from tests.fakes import flight_dumps as fake


def _report(dumps: dict[int, dict[str, Any]], *, shuffled: int = 0) -> FlightReport:
    ranks = sorted(dumps)
    random.Random(shuffled).shuffle(ranks)
    analysis = FlightAnalysis()
    for rank in ranks:
        analysis.add(read_dump(json.dumps(dumps[rank]).encode(), rank))
    return analysis.report()


def _culprits(report: FlightReport) -> set[int]:
    return {s.rank for one in report.faults if one.confidence >= 0.5 for s in one.suspects}


@pytest.mark.parametrize("fault", ["host stops", "unseen"])
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_at_fault_is_named_without_its_victims(fault: str, seed: int) -> None:
    """All ranks wait, in several groups and transfers; one fault is reported."""
    job, culprits = device_queues.drawn(fault, seed)
    report = _report(job.dumps())
    assert (_culprits(report), len(report.faults)) == ({*culprits}, 1)


def test_two_devices_that_stop_in_one_step_are_both_named() -> None:
    job = device_queues.QueuedJob(unseen={12: 40, 14: 40}, device_stops={12: 48, 14: 60})
    report = _report(job.dumps())
    assert _culprits(report) == {12, 14}
    assert len(report.faults) <= 3


@pytest.mark.parametrize("seed", range(4))
def test_a_device_that_stops_accuses_at_most_the_operation_in_which_it_stopped(seed: int) -> None:
    """Its peers look alike: the dumps do not tell who of them it is."""
    job, culprits = device_queues.drawn("device stops", seed)
    (fault,) = _report(job.dumps()).faults
    assert (fault.kind, culprits <= {one.rank for one in fault.suspects}) == ("stuck", True)


def test_the_order_of_dumps_and_hashes_changes_nothing(tmp_path: Path) -> None:
    job, _ = device_queues.drawn("device stops", 9, culprits=2)
    dumps = job.dumps()
    reports = {json.dumps([*lines(_report(dumps, shuffled=n))]) for n in range(4)}
    for rank, dump in dumps.items():
        (tmp_path / f"_dump_{rank}").write_text(json.dumps(dump))
    texts = {
        subprocess.run(
            [sys.executable, "-m", "everstep_services.cli", "fr", "analyze", str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=False,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(reports) == len(texts) == 1


def test_a_rank_that_alone_entered_a_collective_is_suspected_beside_the_absent_ones() -> None:
    whole = fake.Group("0", "default_pg", (0, 1, 2, 3))
    calls = {rank: [fake.Call(whole)] * (3 if rank == 2 else 2) for rank in range(4)}
    (fault,) = _report(fake.play(fake.Job(4, [whole], calls))).faults
    assert [one.rank for one in fault.suspects] == [2, 0, 1, 3]
    assert fault.summary.startswith("rank 2 alone entered all_reduce")


def test_a_rank_that_is_absent_from_a_pair_is_suspected_alone() -> None:
    pair = fake.Group("0", "default_pg", (0, 1))
    calls = {0: [fake.Call(pair)] * 3, 1: [fake.Call(pair)] * 2}
    (fault,) = _report(fake.play(fake.Job(2, [pair], calls))).faults
    assert [one.rank for one in fault.suspects] == [1]


def test_people_see_three_faults_and_a_line_for_the_rest() -> None:
    groups = [fake.Group(str(n), f"pair {n}", (2 * n, 2 * n + 1)) for n in range(5)]
    calls = {rank: [fake.Call(groups[rank // 2])] * 2 for rank in range(10)}
    job = fake.Job(10, groups, calls)
    job.half_over = {(group.name, 2): frozenset({group.ranks[0]}) for group in groups}
    report = _report(fake.play(job))
    text = [*lines(report)]
    assert (len(report.faults), _culprits(report)) == (5, {0, 2, 4, 6, 8})
    assert [line[:2] for line in text if line[:2] in {"1.", "2.", "3.", "4."}] == ["1.", "2.", "3."]
    assert "… and 2 more faults, of ranks 6,8 (all by -o json)" in text


def test_a_verdict_rests_on_three_faults_and_says_how_many_more_there_are() -> None:
    """The lines of `everstep why` have the words of `everstep fr analyze`."""
    faults = [
        Fault(
            kind="half_completed", summary=f"fault {rank}", confidence=0.6,
            suspects=(Suspect(rank=rank, reason=""),),
        )
        for rank in range(5)
    ]  # fmt: skip
    said = [fault.summary for fault in shown_faults(faults)]
    assert said == ["fault 0", "fault 1", "fault 2; … and 2 more faults, of ranks 3-4"]
    assert [fault.summary for fault in shown_faults(faults[:3])] == [
        "fault 0",
        "fault 1",
        "fault 2",
    ]

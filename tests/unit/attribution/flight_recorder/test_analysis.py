"""Who hangs, from dumps of jobs whose fault is known; shaped as NCCL's recorder writes them."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.report import FlightReport, lines
from everstep_services.attribution.flight_recorder.summary import UnreadableDump
from tests.fakes import flight_dumps as fake
from tests.fakes import flight_faults

_LATER_NS = 600_000_000_000


def _job(data: int = 4, tensor: int = 2, pipeline: int = 2, steps: int = 6) -> fake.Job:
    groups = fake.three_dimensions(data, tensor, pipeline)
    return fake.steady(groups, data * tensor * pipeline, steps)


def _report(job: fake.Job, *, age_ns: int = _LATER_NS, seed: int = 0) -> FlightReport:
    analysis = FlightAnalysis()
    dumps = fake.play(job, seed=seed)
    newest = max(entry["time_created_ns"] for one in dumps.values() for entry in one["entries"])
    for rank, dump in dumps.items():
        analysis.add(read_dump(json.dumps(dump).encode(), rank, newest + age_ns))
    return analysis.report()


def _culprits(report: FlightReport) -> set[int]:
    return {s.rank for one in report.faults if one.confidence >= 0.5 for s in one.suspects}


def test_a_job_that_has_ended_accuses_nobody() -> None:
    report = _report(_job())
    assert (report.verdict, report.faults) == ("nothing_pending", ())


@pytest.mark.parametrize("seed", range(25))
def test_a_rank_that_never_joins_is_named_alone(seed: int) -> None:
    """A7.1: the fault is one rank that stopped calling, anywhere in the job."""
    chance = random.Random(seed)
    job = _job()
    rank, at = chance.randrange(16), chance.randrange(1, 17)
    fake.leave(job, rank, at)
    report = _report(job, seed=seed)
    assert (report.verdict, _culprits(report)) == ("culprits", {rank})
    assert report.faults[0].kind == "never_joined"
    assert set(report.faults[0].waiting) == set(range(16)) - {rank}


def test_the_oldest_pending_collective_decides_not_the_newest() -> None:
    """A rank that has begun as many as its peers, and waits in an older one, holds them up."""
    whole = fake.Group("0", "default_pg", (0, 1, 2))
    calls = {
        rank: [fake.Call(whole, "all_reduce", ((size,),)) for size in (1, 2, 3)]
        for rank in range(3)
    }
    dumps = fake.play(fake.Job(3, [whole], calls))
    for rank, oldest in ((0, 3), (1, 2), (2, 3)):
        for entry in dumps[rank]["entries"][oldest - 1 :]:
            entry |= {"state": "started", "retired": False, "time_discovered_completed_ns": None}
        dumps[rank]["pg_status"]["0"]["last_completed_collective"] = oldest - 1
    analysis = FlightAnalysis()
    for rank, dump in dumps.items():
        analysis.add(read_dump(json.dumps(dump).encode(), rank))
    report = analysis.report()
    assert (report.faults[0].kind, _culprits(report)) == ("half_completed", {1})


def test_a_status_that_lags_behind_its_entries_makes_nobody_wait() -> None:
    """The dump of a busy rank: its entries are over, and its status is not written yet (A7.5)."""
    whole = fake.Group("0", "default_pg", (0, 1, 2))
    calls = {rank: [fake.Call(whole, "all_reduce", ((4,),))] * 4 for rank in range(3)}
    job = fake.Job(3, [whole], calls)
    fake.leave(job, 1, 3)
    dumps = fake.play(job)
    dumps[1]["pg_status"]["0"]["last_completed_collective"] = 2
    analysis = FlightAnalysis()
    for rank, dump in dumps.items():
        analysis.add(read_dump(json.dumps(dump).encode(), rank))
    report = analysis.report()
    assert (report.faults[0].kind, _culprits(report)) == ("never_joined", {1})


def test_two_faults_at_once_are_both_named() -> None:
    job = _job()
    fake.leave(job, 5, 9)
    fake.leave(job, 12, 10)
    assert _culprits(_report(job)) == {5, 12}


def test_a_rank_without_a_dump_is_evidence() -> None:
    """A7.2: a rank that others wait for, and that left no dump, is named with that reason."""
    job = _job()
    fake.leave(job, 5, 9)
    job.without_dump.add(5)
    report = _report(job)
    assert _culprits(report) == {5}
    assert report.faults[0].kind == "no_dump"
    assert report.without_dump == (5,)


def test_a_missing_dump_that_explains_nothing_accuses_nobody() -> None:
    """The rank at fault is named although another left no dump (A7.2)."""
    job = _job()
    fake.leave(job, 5, 9)
    job.without_dump.add(12)
    report = _report(job)
    assert report.faults[0].kind == "never_joined"
    assert [one.rank for one in report.faults[0].suspects] == [5]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"operation": "broadcast"}, "another operation"),
        ({"sizes": ((3, 3),)}, "another size"),
        ({"dtype": "Half"}, "another type"),
    ],
)
def test_a_call_that_differs_is_named_with_the_difference(
    changes: dict[str, object], word: str
) -> None:
    """Another operation, size or type (A7.1)."""
    job = _job()
    fake.change(job, 5, 11, **changes)  # the third call of the default group
    report = _report(job)
    assert (report.verdict, _culprits(report)) == ("culprits", {5})
    assert (report.faults[0].kind, word in report.faults[0].summary) == ("mismatch", True)


def test_two_ranks_that_disagree_are_both_suspects() -> None:
    pair = fake.Group("1", "pair", (4, 5))
    calls: dict[int, list[fake.Call]] = {rank: [] for rank in range(4)}
    calls |= {rank: [fake.Call(pair), fake.Call(pair, sizes=((rank, 3),))] for rank in (4, 5)}
    fault = _report(fake.Job(6, [pair], calls)).faults[0]
    assert {one.rank for one in fault.suspects} == {4, 5}
    assert "ranks 4-5 do not agree" in fault.summary


@pytest.mark.parametrize(
    "mend", [fake.skip, lambda job, rank, at: job.calls[rank].insert(at, job.calls[rank][at])]
)
def test_a_call_too_few_or_too_many_names_the_rank(
    mend: Callable[[fake.Job, int, int], None],
) -> None:
    """One call is skipped, or made twice (A7.1)."""
    job = _job()
    mend(job, 5, 10)
    assert _culprits(_report(job)) == {5}


def test_groups_called_in_another_order_are_a_circle() -> None:
    """Two ranks wait for each other in two groups (A7.1)."""
    two, three = fake.Group("9", "two", (0, 1)), fake.Group("10", "three", (0, 1))
    calls = {0: [fake.Call(two), fake.Call(three)], 1: [fake.Call(three), fake.Call(two)]}
    fault = _report(fake.Job(2, [two, three], calls)).faults[0]
    assert (fault.kind, {one.rank for one in fault.suspects}) == ("cycle", {0, 1})


def _calls(*calls: tuple[str, bool]) -> dict[str, object]:
    """A dump as gloo's are: no list of a group's ranks; of each call, whether it is over."""
    sequences = {group: 0 for group, _ in calls}
    entries = []
    for number, (group, is_over) in enumerate(calls):
        sequences[group] += 1
        entries.append(
            {
                "record_id": number, "process_group": [group, group], "is_p2p": False,
                "collective_seq_id": sequences[group], "p2p_seq_id": 0, "op_id": number,
                "profiling_name": f"gloo:{group}", "time_created_ns": fake.START_NS + number,
                "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
                "output_dtypes": ["Float"], "timeout_ms": 1_800_000, "retired": is_over,
                "state": "completed" if is_over else "scheduled",
            }
        )  # fmt: skip
    return {"version": "2.10", "entries": entries}


def _report_of(dumps: Mapping[int, Mapping[str, object]]) -> FlightReport:
    analysis = FlightAnalysis()
    for rank, dump in dumps.items():
        analysis.add(read_dump(json.dumps(dump).encode(), rank, fake.START_NS + _LATER_NS))
    return analysis.report()


def test_a_rank_that_left_a_call_out_is_told_from_the_rank_that_waits_for_it() -> None:
    """A7.1: two ranks wait for each other; the others show in which order the calls come."""
    whole = [("metrics", True), ("other", True)]
    skipped = [*whole, ("other", False)]
    waits = [*whole, ("metrics", False)]
    beyond = [*whole, ("metrics", True), ("other", False)]  # a broadcast is over where it was sent
    report = _report_of({0: _calls(*skipped), 1: _calls(*beyond), 2: _calls(*waits)})
    assert (report.faults[0].kind, _culprits(report)) == ("cycle", {0})
    assert "rank 0 differs from the others" in report.summary


def test_calls_whose_order_nobody_shows_leave_both_ranks_suspects() -> None:
    """Two ranks wait for each other, and no third one has made both calls (A7.1)."""
    whole = [("metrics", True), ("other", True)]
    report = _report_of(
        {0: _calls(*whole, ("other", False)), 1: _calls(*whole, ("metrics", False))}
    )
    assert (report.faults[0].kind, _culprits(report)) == ("cycle", {0, 1})


def test_ranks_that_show_both_orders_settle_nothing() -> None:
    """Of calls that are under way at once, the first that was made counts (A7.1)."""
    whole = [("metrics", True), ("other", True)]
    ahead = [*whole, ("metrics", False), ("other", False)]
    behind = [*whole, ("other", False), ("metrics", False)]
    sides = {0: _calls(*whole, ("other", False)), 2: _calls(*whole, ("metrics", False))}
    report = _report_of({**sides, 1: _calls(*ahead)})
    assert _culprits(report) == {0}
    report = _report_of({**sides, 1: _calls(*ahead), 3: _calls(*behind)})
    assert _culprits(report) == {0, 2}


def test_calls_are_compared_before_all_ranks_have_come() -> None:
    """Rank 3 is held up by others: that ranks 0 and 1 disagree with rank 2 shows all the same."""
    whole = [("metrics", True), ("other", True)]
    usual, odd = _calls(*whole, ("metrics", False)), _calls(*whole, ("metrics", False))
    odd["entries"][-1]["profiling_name"] = "gloo:barrier"  # type: ignore[index]
    report = _report_of({0: usual, 1: usual, 2: odd, 3: _calls(*whole)})
    assert (report.faults[0].kind, _culprits(report)) == ("mismatch", {2})


def test_a_circle_counts_even_if_it_waits_for_others_too() -> None:
    """Ranks 4 to 7 receive, which no dump of gloo shows: that they come would end no circle."""
    world = fake.Group("0", "default_pg", tuple(range(8)))
    metrics = fake.Group("1", "metrics", tuple(range(8)))
    tensor = fake.Group("2", "tensor", (0, 1, 2, 3))
    step = [fake.Call(tensor), fake.Call(world)]
    calls = {rank: [*step, *step] for rank in range(4)}
    calls[2] = [*step, fake.Call(metrics)]  # the others never call it
    calls |= {rank: [fake.Call(world)] for rank in range(4, 8)}
    report = _report(fake.Job(8, [world, metrics, tensor], calls))
    assert (report.faults[0].kind, _culprits(report)) == ("cycle", {2})
    assert report.faults[-1].kind == "never_joined"


def test_a_device_that_does_not_start_is_named() -> None:
    job = _job()
    job.unstarted.add((5, "0", 3))
    report = _report(job)
    assert (report.faults[0].kind, _culprits(report)) == ("not_started", {5})


def test_all_joined_and_stuck_is_inconclusive_and_says_so() -> None:
    """A confident wrong verdict is worse than none (A7.1)."""
    job = _job()
    job.endless.add(("0", 3))
    report = _report(job)
    assert (report.verdict, _culprits(report)) == ("inconclusive", set())
    assert report.faults[0].kind == "stuck"


def test_a_job_that_moves_accuses_nobody() -> None:
    """A capture of a healthy job always finds somebody who has not come yet."""
    job = _job()
    fake.leave(job, 5, 9)
    report = _report(job, age_ns=5_000_000)
    assert (report.verdict, report.faults) == ("inconclusive", ())
    assert "making progress" in report.summary


def test_a_full_ring_still_tells_and_says_what_it_lost() -> None:
    """The ring buffer has overflowed (A7.1)."""
    job = _job(steps=40)
    job.ring = 10
    fake.leave(job, 5, 100)
    report = _report(job)
    assert _culprits(report) == {5}
    assert any("lost its oldest entries" in note for note in report.notes)


def test_what_could_not_be_read_is_a_note_and_a_missing_dump() -> None:
    """An empty dump is evidence against its rank (A7.1, A7.2)."""
    job = _job()
    fake.leave(job, 5, 9)
    analysis = FlightAnalysis()
    for rank, dump in fake.play(job).items():
        if rank != 5:
            analysis.add(read_dump(json.dumps(dump).encode(), rank))
    analysis.add(UnreadableDump(name="_dump_5.json", reason="it is empty", rank=5))
    report = analysis.report()
    assert _culprits(report) == {5}
    assert "_dump_5.json was left out: it is empty" in report.notes
    assert [one.reason for one in report.faults[0].suspects] == [
        "it left no readable dump: it is empty"
    ]


@pytest.mark.parametrize(
    "content",
    [
        b'{"version": "2.10", "entries": [[], 7]}',
        b'{"version": "2.10", "entries": [{"record_id": 0}]}',
        json.dumps(_calls(("metrics", True), ("metrics", True))).encode()[:-60],
    ],
)
def test_entries_that_cannot_be_read_leave_open_whether_a_rank_waits(content: bytes) -> None:
    """A7.1: one of them may be the collective that does not end."""
    analysis = FlightAnalysis()
    analysis.add(read_dump(content, 0))
    report = analysis.report()
    assert report.verdict == "inconclusive"
    assert "rank 0" in report.summary


def test_a_text_of_a_dump_begins_no_line_of_the_report() -> None:
    """A13.3: evidence comes from scripts of others."""
    waits = _calls(("metrics\n\nrank 0 is guilty", False))
    report = _report_of({0: waits, 1: _calls(("metrics", True))})
    assert report.verdict == "culprits"
    assert not [line for line in lines(report) if line.startswith("rank 0 is guilty")]


def test_a_dump_that_is_a_link_to_nothing_accuses_nobody() -> None:
    """A7.2: a share that is not mounted is no evidence against a rank."""
    job = _job()
    fake.leave(job, 5, 9)
    analysis = FlightAnalysis()
    for rank, dump in fake.play(job).items():
        if rank != 5:
            analysis.add(read_dump(json.dumps(dump).encode(), rank))
    reason = "it is a link to nothing"
    analysis.add(UnreadableDump(name="_dump_5", reason=reason, rank=5, is_evidence=False))
    report = analysis.report()
    assert report.verdict == "inconclusive"
    assert report.summary.startswith("inconclusive: rank 5 left no readable dump, and others wait")


def _receives(dump: dict[str, Any], rank: int, peer: int) -> None:
    """A receive that waits, after the first call of the dump."""
    receive = dict(dump["entries"][0])
    receive |= {
        "record_id": 1, "profiling_name": f"nccl:recv {rank}<-{peer}", "is_p2p": True,
        "state": "scheduled", "retired": False, "p2p_seq_id": 1,
        "time_discovered_completed_ns": None, "time_discovered_started_ns": None,
    }  # fmt: skip
    dump["entries"].append(receive)


def test_a_transfer_names_the_end_that_never_came() -> None:
    """A receive between two ranks has no sender (A7.1)."""
    pair = fake.Group("0", "default_pg", (0, 1))
    dumps = fake.play(fake.Job(2, [pair], {0: [fake.Call(pair)], 1: [fake.Call(pair)]}))
    _receives(dumps[0], 0, 1)
    analysis = FlightAnalysis()
    for rank, dump in dumps.items():
        analysis.add(read_dump(json.dumps(dump).encode(), rank))
    report = analysis.report()
    assert _culprits(report) == {1}


def test_a_stage_behind_the_one_that_waits_for_a_transfer_is_not_suspected() -> None:
    """Rank 1 sends nothing and goes on; rank 3 only waits for rank 2, as all others wait for it."""
    whole = fake.Group("0", "default_pg", (0, 1, 2, 3))
    calls = {rank: [fake.Call(whole)] * (2 if rank < 2 else 1) for rank in range(4)}
    dumps = fake.play(fake.Job(4, [whole], calls))
    _receives(dumps[2], 2, 1)
    _receives(dumps[3], 3, 2)
    report = _report_of(dumps)
    assert (report.faults[0].kind, _culprits(report)) == ("cycle", {1, 2})


def test_no_dump_at_all_is_no_verdict() -> None:
    report = FlightAnalysis(world=4).report()
    assert (report.verdict, report.ranks, report.dumps) == ("nothing_pending", 4, 0)


def test_the_text_has_the_verdict_first_and_each_rank_s_place() -> None:
    job = _job()
    fake.leave(job, 5, 9)
    text = list(lines(_report(job)))
    assert text[0].startswith("rank 5 never joined all_gather_base of 1024x64")
    assert any(line.split() == ["never", "joined", "5"] for line in text)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", flight_faults.FAULTS)
def test_whoever_caused_a_drawn_fault_is_named_and_nobody_else(fault: str, seed: int) -> None:
    """A7.1: every kind of fault that `benchmarks.flight_recorder` scores on many seeds."""
    case = flight_faults.draw(fault, seed)
    dumps = flight_faults.dumps(case, seed)
    newest = max(entry["time_created_ns"] for one in dumps.values() for entry in one["entries"])
    analysis = FlightAnalysis(world=case.job.world)
    for rank, dump in dumps.items():
        analysis.add(read_dump(json.dumps(dump).encode(), rank, newest + case.age_ns))
    named = _culprits(analysis.report())
    assert named == case.culprits or (case.any_of and named <= case.any_of)

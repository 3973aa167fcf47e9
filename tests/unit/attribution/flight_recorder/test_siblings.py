"""Who is named where groups are too small for a majority, and how sure a verdict is of several."""

import asyncio
import json
from collections.abc import Mapping
from functools import cache
from unittest.mock import Mock

import pytest

from everstep.evidence.archive import ArchiveMember, pack
from everstep_services.attribution.domain.combiner import CaseJudgement
from everstep_services.attribution.flight_recorder import siblings, waits
from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.report import FlightReport
from everstep_services.attribution.flight_recorder.stack_calls import with_stack_call
from everstep_services.attribution.flight_recorder.summary import GroupRecord, Pending, RankSummary
from tests.fakes import flight_dumps as fake
from tests.unit.attribution.cases import case
from tests.unit.attribution.evidence import judged

_HOUR_NS = 3_600_000_000_000


@cache
def pairs(number: int) -> list[fake.Group]:
    return [fake.Group(str(at), f"pair {at}", (2 * at, 2 * at + 1)) for at in range(number)]


def job(number: int, odd: Mapping[int, fake.Call]) -> fake.Job:
    """Pairs that reduce three times; the third call of some ranks is another one."""
    groups = pairs(number)
    calls = {
        rank: [fake.Call(group), fake.Call(group), odd.get(rank, fake.Call(group))]
        for group in groups
        for rank in group.ranks
    }
    return fake.Job(2 * number, groups, calls)


def report(played: fake.Job) -> FlightReport:
    analysis = FlightAnalysis()
    for rank, dump in fake.play(played, seed=1).items():
        analysis.add(read_dump(json.dumps(dump).encode(), rank, fake.START_NS + _HOUR_NS))
    return analysis.report()


def other_call(number: int, rank: int) -> fake.Call:
    return fake.Call(pairs(number)[rank // 2], "all_gather")


@pytest.mark.parametrize("rank", [4, 5])
def test_of_two_that_disagree_the_one_unlike_other_groups_is_named(rank: int) -> None:
    fault = report(job(4, {rank: other_call(4, rank)})).faults[0]
    assert (fault.kind, [it.rank for it in fault.suspects]) == ("mismatch", [rank])
    assert fault.summary.endswith("as 3 groups like it do there")
    assert fault.confidence == 0.85


@pytest.mark.parametrize(
    ("number", "odd"),
    [(2, (1,)), (4, (1, 3, 5, 7))],  # one other group; groups that disagree among themselves
)
def test_too_few_groups_and_groups_that_disagree_leave_both_suspects(
    number: int, odd: tuple[int, ...]
) -> None:
    fault = report(job(number, {rank: other_call(number, rank) for rank in odd})).faults[0]
    assert len(fault.suspects) > 1
    assert fault.confidence < 0.85


def test_few_of_many_groups_at_odds_are_compared_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 16 384 groups that are all at odds, comparing each would take hours."""
    compared = Mock(side_effect=siblings.next_calls)
    monkeypatch.setattr(waits, "next_calls", compared)
    report(job(40, {rank: other_call(40, rank) for rank in range(1, 80, 2)}))
    assert compared.call_count == 16


def test_groups_with_other_calls_before_do_not_count() -> None:
    """Those of another stage of a pipeline may call something else."""
    played = job(4, {1: other_call(4, 1)})
    for rank in range(2, 8):
        played.calls[rank][0] = fake.Call(pairs(4)[rank // 2], "reduce_scatter")
    assert {it.rank for it in report(played).faults[0].suspects} == {0, 1}


def gloo(rank: int, **groups: int) -> RankSummary:
    """A dump of gloo's, which lists no members; a negative number is that of a call it waits in."""
    records = [
        GroupRecord(
            name=name, description=name, enqueued=abs(number), completed=abs(number) - (number < 0),
            pending=() if number > 0 else
            (Pending(sequence=-number, operation="all_reduce", state="scheduled", created_ns=9),),
        )
        for name, number in groups.items()
    ]  # fmt: skip
    return RankSummary(rank=rank, newest_ns=9, taken_ns=_HOUR_NS, groups=tuple(records))


def named(*dumps: RankSummary) -> list[int]:
    analysis = FlightAnalysis(world=len(dumps))
    for dump in dumps:
        analysis.add(dump)
    return [suspect.rank for suspect in analysis.report().faults[0].suspects]


def test_a_rank_alone_in_a_group_of_all_is_told_from_the_one_that_waits_for_it() -> None:
    """Who has called in a group before is in it: its last call waits for no other rank."""
    first = [with_stack_call(gloo(at, metrics=1, a=1), "send", {"dst": at + 2}) for at in (0, 1)]
    peer, odd = gloo(2, metrics=1, b=-2), gloo(3, metrics=-2, b=1)
    assert named(*first, peer, odd) == [3]


def test_the_only_transfer_that_is_seen_is_not_a_strange_one() -> None:
    """Rank 0 sends to rank 2, which is in a barrier; rank 1 waits for rank 0, and 3 for 2."""
    sends = with_stack_call(gloo(0, all=1, a=1), "send", {"dst": 2})
    barrier = gloo(2, all=-2, b=1)
    assert named(sends, gloo(1, all=1, a=-2), barrier, gloo(3, all=1, b=-2)) == [2]


def test_the_rank_with_a_call_of_its_own_is_told_from_the_one_that_is_with_all_others() -> None:
    """Rank 0 reduces with its pair, where all others reduce with all."""
    world = fake.Group("9", "world", tuple(range(8)))
    calls = {rank: [fake.Call(world), fake.Call(world)] for rank in range(8)}
    calls[0][1] = fake.Call(pairs(4)[0])
    fault = report(fake.Job(8, [world, *pairs(4)], calls)).faults[0]
    assert (fault.kind, [it.rank for it in fault.suspects]) == ("cycle", [0])


def verdict(played: fake.Job) -> CaseJudgement:
    dumps = fake.play(played, seed=1)
    members = [
        ArchiveMember(rank, "json", json.dumps(dump).encode()) for rank, dump in dumps.items()
    ]
    about = case(nodes=1, ranks=len(dumps), trigger="rank_stalled")
    return asyncio.run(judged(about, {"flight_recorder": pack(members, {})}))


def test_a_verdict_that_names_one_of_several_is_less_sure_than_one_that_names_a_rank() -> None:
    alone = verdict(job(4, {5: other_call(4, 5)}))
    either = verdict(job(1, {1: other_call(1, 1)}))
    assert (alone.ranks, either.ranks) == ((5,), (0, 1))
    assert 0.5 <= either.confidence < 0.6 < 0.8 < alone.confidence


def test_what_all_have_joined_is_told_although_nobody_is_named() -> None:
    stuck = job(2, {rank: fake.Call(pairs(2)[1], "all_to_all") for rank in (2, 3)})
    stuck.endless.add(("1", 3))
    found = verdict(stuck)
    assert found.is_inconclusive
    assert "all 2 ranks joined all_to_all" in found.reason
    assert "other split sizes on some rank" in found.reason

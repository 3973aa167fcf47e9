"""What stacks add to recorders: peers of transfers, roots of collectives, places of the script."""

from array import array
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.report import FlightReport
from everstep_services.attribution.flight_recorder.stack_calls import with_stack_call
from everstep_services.attribution.flight_recorder.summary import GroupRecord, Pending, RankSummary

HOUR_NS = 3_600_000_000_000


def dump(rank: int, group: str = "", members: tuple[int, ...] = ()) -> RankSummary:
    """A dump of gloo's: without transfers, and here with one collective that is not over."""
    call = Pending(sequence=2, operation="broadcast of 1 Float", state="scheduled", created_ns=9)
    packed = array("I", members).tobytes()
    own = GroupRecord(
        name=group, description=group, members=packed, enqueued=2, completed=1, pending=(call,)
    )
    groups = (own,) if group else ()
    return RankSummary(rank=rank, newest_ns=9, taken_ns=HOUR_NS, groups=groups)


def report(*dumps: RankSummary, world: int) -> FlightReport:
    analysis = FlightAnalysis(world=world)
    for summary in dumps:
        analysis.add(summary)
    return analysis.report()


def suspects(found: FlightReport) -> list[int]:
    return [suspect.rank for suspect in found.faults[0].suspects]


def pipeline(first_sends_to: int) -> list[RankSummary]:
    """Two stages of four ranks; rank 4 waits for rank 0, and its tensor group for rank 4."""
    group = ("tensor", (4, 5, 6, 7))
    waiting = [dump(rank, *group) for rank in (5, 6, 7)]
    receiving = [
        with_stack_call(dump(rank), "recv", {"src": peer})
        for rank, peer in ((1, 5), (2, 6), (3, 7), (4, 0))
    ]
    return [*waiting, *receiving, with_stack_call(dump(0), "send", {"dst": first_sends_to})]


def test_a_send_to_another_rank_than_the_one_that_waits_for_it_is_the_fault() -> None:
    found = report(*pipeline(first_sends_to=5), world=8)
    assert suspects(found) == [0], found.summary


def test_a_rank_alone_at_its_place_is_the_odd_one_of_two_that_wait_for_each_other() -> None:
    places = {0: "recv at backward", 1: "recv at backward", 4: "recv at forward", 5: "recv at x"}
    calls: Mapping[int, Mapping[str, int]] = {0: {"src": 4}, 4: {"src": 0}, 1: {"src": 5}}
    dumps = [
        replace(with_stack_call(dump(rank), "recv", calls.get(rank, {})), where=place)
        for rank, place in places.items()
    ]
    found = report(*dumps, world=6)
    assert suspects(found)[0] in {4, 5}
    cycle = next(fault for fault in found.faults if fault.kind == "cycle")
    assert [suspect.rank for suspect in cycle.suspects] == [4], cycle.summary


@pytest.mark.parametrize(
    ("roots", "named", "confidence"),
    [
        ({0: 0, 1: 0, 2: 2}, [2], 0.9),
        ({1: 0, 2: 2}, [2], 0.75),  # a root of its own is the common mistake
        ({0: 0, 2: 2}, [2], 0.75),
        ({1: 0, 2: 1}, [1, 2], 0.6),
    ],
)
def test_who_has_another_root_is_named_and_both_where_there_is_no_majority(
    roots: Mapping[int, int], named: list[int], confidence: float
) -> None:
    members = (0, 1, 2)
    dumps = [
        with_stack_call(dump(rank, "metrics", members), "broadcast", {"group_src": root})
        for rank, root in roots.items()
    ]
    over = RankSummary(
        rank=min({0, 1, 2, 3} - {*roots}), newest_ns=9, taken_ns=HOUR_NS,
        groups=(GroupRecord(name="metrics", description="metrics",
                            members=array("I", members).tobytes(), enqueued=2, completed=2),),
    )  # fmt: skip
    found = report(*dumps, *([over] if len(roots) < len(members) else []), world=3)
    assert (suspects(found), found.faults[0].confidence) == (named, confidence), found.summary
    assert "disagree about the root" in found.summary


def test_what_a_recorder_knows_itself_is_not_taken_from_stacks() -> None:
    record = GroupRecord(name="0", description="default_pg", sends=((1, 4),))
    known = replace(dump(0), groups=(record,))
    assert with_stack_call(known, "send", {"dst": 2}) is known
    assert with_stack_call(known, "broadcast", {"group_src": 0}).groups == (record,)
    assert with_stack_call(known, "all_reduce", {}) is known

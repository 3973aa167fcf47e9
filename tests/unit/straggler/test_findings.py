"""How the document of a job changes, and that each change makes one fact."""

import dataclasses
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from everstep.bus.facts.codec import facts_in
from everstep.ids import id_from
from everstep.messages import (
    StepTimeShifted,
    StragglerActed,
    StragglerCleared,
    StragglerFound,
    StragglersDocument,
)
from everstep_services.straggler.domain.changes import Change, KeepsUp
from everstep_services.straggler.domain.findings import (
    FindingContext,
    Revision,
    acted,
    blank,
    measured,
    recorded,
    revised,
)
from everstep_services.straggler.domain.switches import StragglerSwitches
from tests.unit.straggler.changes import cost, keeps_up, shift, slow

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def moment(after_s: float = 0.0, round_: int | None = 1) -> FindingContext:
    return FindingContext(NOW + timedelta(seconds=after_s), round_, id_from)


def after(*changes: Change, before: StragglersDocument | None = None, over: str = "") -> Revision:
    return revised(before or blank("j"), changes, moment(), over)


def test_a_slow_rank_is_found_once_whichever_replica_says_so() -> None:
    first = after(slow())
    (fact,) = first.facts
    assert isinstance(fact, StragglerFound)
    (known,) = first.document.found
    assert (known.finding, known.rank, known.node, known.round) == (fact.id, 3, "n1", 1)
    assert (fact.job, fact.source, fact.cause, fact.failure_class) == (
        "j", "straggler", "input", "tune",
    )  # fmt: skip
    assert facts_in(first.document.outbox) == [fact]
    other = revised(first.document, [slow()], moment(7.0), "")
    assert (other.document, other.facts) == (first.document, [])
    assert after(slow()).facts[0].id == fact.id, "the same finding has the same id"
    assert after(slow(last_step=96)).facts[0].id != fact.id, "a later one has another"


def test_a_cleared_rank_says_how_long_and_what_it_cost() -> None:
    """From the first window that it was found by to the last one: what each has cost."""
    found = after(slow(first_step=33, last_step=80, lost_s=0.05)).document
    told = revised(found, [cost(81, 176, 6.0), cost(177, 208, 1.5)], moment(80.0))
    assert told.facts == []
    assert (told.document.found[0].lost_so_far_s, told.document.found[0].counted_step) == (9.9, 208)
    (fact,) = revised(told.document, [keeps_up()], moment(100.0)).facts
    assert isinstance(fact, StragglerCleared)
    assert (fact.finding, fact.lasted_s, fact.lost_s) == (found.found[0].finding, 100.0, 9.9)
    again = revised(found, [keeps_up(), keeps_up()], moment())
    assert (again.document.found, len(again.facts)) == ((), 1)


def test_windows_that_several_replicas_count_cost_once() -> None:
    """They told of them at other times, and one of them began anew meanwhile."""
    found = after(slow(last_step=80, lost_s=0.0)).document
    one = [cost(81, 100, 2.0), cost(101, 120, 2.0), cost(141, 160, 2.0)]
    other = [cost(81, 90, 1.0), cost(91, 110, 2.0), cost(111, 130, 2.0), cost(131, 160, 3.0)]
    orders = ([*one, *other], [*other, *one], [one[0], *other, *one], [other[0], *one, *other])
    for order in orders:
        document = found
        for change in order:
            document = revised(document, [change], moment()).document
        assert document.found[0].counted_step == 160
        assert 6.0 <= document.found[0].lost_so_far_s <= 8.0, "and what nobody told of is a gap"


def test_the_end_of_a_round_loses_no_costs_of_it() -> None:
    found = after(slow(last_step=80, lost_s=0.0)).document
    (fact,) = revised(found, [cost(81, 100, 2.0)], moment(round_=2)).facts
    assert isinstance(fact, StragglerCleared)
    assert (fact.reason, fact.lost_s) == ("its round ended", 2.0)
    new = after(slow(last_step=200, lost_s=0.0), before=found).document
    assert revised(new, [cost(81, 100, 2.0, rank=4)], moment()).document == new, "nobody is slow"


def test_what_an_older_release_found_cost_nobody_knows_what() -> None:
    known = replace(after(slow()).document.found[0], lost_so_far_s=0.0, counted_step=0)
    found = replace(after(slow()).document, found=(known,))
    (fact,) = revised(found, [keeps_up()], moment()).facts
    assert isinstance(fact, StragglerCleared)
    assert fact.lost_s is None


def test_a_wall_clock_that_was_set_back_makes_no_negative_time() -> None:
    found = after(slow()).document
    (fact,) = revised(found, [keeps_up()], moment(-3600.0)).facts
    assert isinstance(fact, StragglerCleared)
    assert (fact.lasted_s, fact.lost_s) == (0.0, 2.4)


def test_a_new_round_clears_what_was_found_in_the_one_before() -> None:
    found = after(slow(), slow(5)).document
    new = revised(found, [slow(5, 2)], moment(round_=2))
    assert [(one.round, one.rank) for one in new.document.found] == [(2, 5)]
    assert new.document.round == 2
    reasons = [one.reason for one in new.facts if isinstance(one, StragglerCleared)]
    assert reasons == ["its round ended"] * 2
    late = revised(new.document, [slow(7, 1), keeps_up(5, 1)], moment(round_=1))
    assert (late.document, late.facts) == (new.document, []), "words of the old round say nothing"


def test_a_job_that_is_over_clears_all() -> None:
    found = after(*(slow(rank) for rank in range(5))).document
    new = after(before=found, over="its job ended")
    assert new.document.found == ()
    assert {one.reason for one in new.facts if isinstance(one, StragglerCleared)} == {
        "its job ended"
    }


def test_the_document_is_bounded_however_many_are_slow() -> None:
    document = blank("j")
    for begin in range(0, 3000, 100):
        changes = [slow(rank) for rank in range(begin, begin + 100)]
        document = replace(after(*changes, before=document).document, outbox=())
    assert len(document.found) == 1000
    writes = 0
    while document.found:
        new = after(before=document, over="its job ended")
        assert len(new.facts) == 100
        document, writes = replace(new.document, outbox=()), writes + 1
    assert writes == 10


def test_two_replicas_that_see_a_shift_a_window_apart_say_it_once() -> None:
    first = after(shift(100))
    assert [type(fact) for fact in first.facts] == [StepTimeShifted]
    assert after(shift(116), before=first.document).facts == []
    assert len(after(shift(200), before=first.document).facts) == 1
    next_round = revised(first.document, [shift(100, 2)], moment(round_=2))
    assert len(next_round.facts) == 1


def test_how_agents_measure_follows_the_switches_and_the_pace() -> None:
    document = measured(blank("j"), StragglerSwitches(), 64)
    assert (document.is_on, document.is_cpu_timed, document.window_steps) == (True, True, 64)
    assert measured(document, StragglerSwitches(), None).window_steps == 64, "not known: as before"
    fixed = StragglerSwitches(is_on=False, is_cpu_timed=False, window_steps=10)
    document = measured(document, fixed, 128)
    assert (document.is_on, document.is_cpu_timed, document.window_steps) == (False, False, 10)


def test_what_is_on_record_leaves_the_outbox() -> None:
    document = after(slow(1), slow(2)).document
    first, second = facts_in(document.outbox)
    assert facts_in(recorded(document, {first.id}).outbox) == [second]
    damaged = replace(document, outbox=("{", *document.outbox))
    assert recorded(damaged, {first.id, second.id}).outbox == ("{",)


def test_an_action_is_claimed_once() -> None:
    document = replace(after(slow()).document, outbox=())
    finding = document.found[0].finding
    fact = StragglerActed(
        id="acted",
        job="j",
        at=NOW,
        source="straggler",
        round=1,
        node="n1",
        rank=3,
        finding=finding,
        action="stop",
        outcome="refused",
        reason="r",
    )
    claimed = acted(document, finding, "stop", fact)
    assert claimed is not None
    assert (claimed.found[0].acted, facts_in(claimed.outbox)) == (("stop",), [fact])
    assert acted(claimed, finding, "stop", fact) is None
    assert acted(claimed, finding, "exclude", fact) is not None
    assert acted(claimed, "another", "stop", fact) is None


def test_what_was_seen_before_a_finding_does_not_clear_it() -> None:
    """A replica that was stopped for a while tells late what others have said meanwhile."""
    found = after(slow(last_step=96)).document
    late = KeepsUp(round=1, rank=3, reason="0.1 % above the median", last_step=80)
    assert revised(found, [late], moment()).document == found
    assert revised(found, [dataclasses.replace(late, last_step=112)], moment()).document.found == ()

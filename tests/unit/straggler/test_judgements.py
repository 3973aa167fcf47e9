"""What waits for the judge of a job, and what a judgement does with it."""

from datetime import UTC, datetime

from everstep.messages import KnownStraggler, NodeTimings
from everstep_services.straggler.domain.changes import KeepsUp, SlowRankFound
from everstep_services.straggler.domain.rules import LiveRules
from everstep_services.straggler.judgements import JobJudgement, JobWork
from tests.integration.straggler.replicas import SimpleJudge

RULES = LiveRules(grace_s=5.0)


def window(slot: int, last_step: int = 16, window_s: float = 1.6, round_: int = 1) -> NodeTimings:
    return NodeTimings(
        job="j", node=f"n{slot}", round=round_, slot=slot, slots=2, world=2,
        first_step=last_step - 15, last_step=last_step, window_s=window_s,
    )  # fmt: skip


def known_straggler(rank: int, round_: int) -> KnownStraggler:
    return KnownStraggler(
        finding=f"f{rank}", round=round_, rank=rank, node="n0", slot=0, cause="host",
        found_at=datetime(2026, 1, 1, tzinfo=UTC), reason="slow",
    )  # fmt: skip


def work(most_waiting: int = 100) -> JobWork:
    return JobWork(SimpleJudge("j", RULES), most_waiting)


def next_of(work: JobWork) -> JobJudgement:
    return work.next_judgement((), 10.0, is_watched=False)


def test_the_oldest_window_goes_where_too_many_wait() -> None:
    full = work(most_waiting=2)
    assert [full.put(window(0, last), 1.0) for last in (16, 32, 48)] == [True, True, False]
    assert [one.last_step for one, _ in next_of(full).heard] == [32, 48]


def test_a_judgement_hears_and_judges_and_its_view_stays_as_it_is() -> None:
    one = work()
    one.put(window(0), 1.0)
    one.put(window(1, window_s=3.2), 1.0)
    assert (one.is_busy, one.newest_round, one.snapshot.round) == (True, 1, None)
    first = next_of(one)
    outcome = first.run(2.0)
    one.finish(first, outcome, 2.0)
    assert one.has_news
    assert [type(change) for change in outcome.changes] == [SlowRankFound]
    assert (one.snapshot.round, one.snapshot.window) == (1, 16)
    assert one.snapshot.slower_ratios == {1: 1.0, 0: 0.0}, "policy must know in the same window"
    assert not one.is_busy


def test_what_a_judge_cannot_take_costs_that_message_alone() -> None:
    class Choosy(SimpleJudge):
        def hear(self, timings: NodeTimings, now: float) -> None:
            if timings.slot == 7:
                raise ValueError("seven")
            super().hear(timings, now)

    one = JobWork(Choosy("j", RULES), 100)
    for slot in (0, 7, 1):
        one.put(window(slot), 1.0)
    outcome = next_of(one).run(2.0)
    assert [str(failure) for failure in outcome.failures] == ["seven"]
    assert outcome.snapshot.window == 16


def test_a_judge_that_was_replaced_while_it_judges_ends_after_it() -> None:
    one = work()
    one.put(window(0), 1.0)
    one.put(window(1, window_s=3.2), 1.0)
    running = next_of(one)
    one.retire(SimpleJudge("j", RULES), "its job ended")
    one.finish(running, running.run(2.0), 2.0)
    assert not one.has_news
    assert one.snapshot.round is None, "the present judge has heard nothing"
    outcome = next_of(one).run(3.0)
    assert outcome.changes == [KeepsUp(1, 1, "its job ended")]
    assert not one.is_busy


def test_windows_of_a_round_that_was_not_formed_are_forgotten_unheard() -> None:
    one = work()
    for round_ in (1, 9, 1):
        one.put(window(0, round_=round_), 1.0)
    assert one.newest_round == 9
    assert one.forget(lambda timings: "bad" if timings.round == 9 else "") == {"bad": 1}
    assert one.newest_round == 1


def test_windows_that_lack_a_node_are_looked_at_until_they_are_overdue() -> None:
    one = work()
    assert not one.is_due(0.0), "nothing came"
    one.put(window(0), 10.0)
    assert one.is_due(10.0)
    first = next_of(one)
    one.finish(first, first.run(10.0), 10.0)
    assert [one.is_due(at) for at in (10.2, 11.0, 15.0, 17.0, 18.0)] == [
        False, True, True, True, False,
    ]  # fmt: skip


def test_findings_of_other_replicas_are_adopted_in_their_round_only() -> None:
    judge = SimpleJudge("j", RULES)
    known = [known_straggler(0, 1), known_straggler(1, 2)]
    heard = [(window(0, round_=2), 1.0)]
    outcome = JobJudgement(judge=judge, heard=heard, stragglers=known).run(2.0)
    assert [one.rank for one in outcome.adopted] == [1]

"""What facts add to the cases of a job, in any order and any number of times."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.messages import (
    CasesDocument,
    Fact,
    IncidentClosed,
    IncidentExtended,
    Ledger,
    NodeLost,
    NodeReturned,
    OperatorActed,
    RankRecovered,
    RanksStopped,
    RankStalled,
    StragglerCleared,
    StragglerFound,
    VerdictReached,
)
from everstep_services.attribution.analyzers import rank_ends
from everstep_services.attribution.domain.case_facts import JobCases
from everstep_services.attribution.domain.case_queue import JUDGED_MOST, UNJUDGED_MOST
from everstep_services.attribution.service import WatchedIncident, is_due
from everstep_services.attribution.settings import AttributionSettings
from tests.unit.attribution.cases import about, collected, error, exited, formed, opened


def cases_of(*facts: Fact) -> JobCases:
    cases = JobCases("j", CasesDocument())
    for fact in facts:
        cases.take(fact)
    return cases


def closed(incident: str = "i", round_: int = 1) -> IncidentClosed:
    return IncidentClosed(
        **about(round_=round_, id=f"closed-{incident}"), incident=incident, outcome="recovered",
        reason="it is back", ledger=Ledger(), trigger="rank_exited", cause="rank 3 exited with 1",
    )  # fmt: skip


def stalled(rank: int, **more: Any) -> RankStalled:
    given: dict[str, Any] = {"is_fatal": True, **more}
    return RankStalled(
        **about(id=f"stall-{rank}"), node="n0", slot=0, rank=rank, local_rank=rank, waited_s=5.0,
        limit_s=4.0, limit_source="default", phase="step", **given,
    )  # fmt: skip


def lost(node: str) -> NodeLost:
    return NodeLost(
        **about(id=f"lost-{node}"), node=node, silence_s=9.0, limit_s=8.0, reason="silent"
    )


def extended(*nodes: str) -> IncidentExtended:
    return IncidentExtended(
        **about(id=f"extended-{len(nodes)}"), incident="i", reports=(), lost=nodes
    )


STORY = (
    exited(3, error=error()),
    exited(0),
    stalled(1),
    opened(),
    collected("log"),
    RanksStopped(**about(id="stopped"), node="n0", slot=0, ranks=(0, 1), stop_s=0.1),
    lost("n1"),
)


@given(st.permutations(STORY))
def test_the_order_of_facts_does_not_matter(facts: list[Fact]) -> None:
    """What comes before its incident is opened waits for it."""
    case = cases_of(formed(), *facts, closed()).case("i")
    assert case is not None
    assert {end.rank for end in case.ends} == {0, 3}
    assert [stall.rank for stall in case.stalls] == [1]
    assert [piece.evidence for piece in case.evidence] == ["log"]
    assert (case.stopped, [sign.node for sign in case.nodes]) == (("n0",), ["n1"])
    assert (case.outcome, case.world_size, case.node_of(3)) == ("recovered", 4, "n1")


def test_what_leads_to_no_incident_is_forgotten_with_its_round() -> None:
    cases = cases_of(formed(), exited(3), formed(round_=2))
    assert cases.document.cases == ()


def test_an_incident_goes_on_over_rounds_and_a_later_one_is_another() -> None:
    facts = [formed(), exited(3), opened(), formed(round_=2), exited(3, round_=2)]
    case = cases_of(*facts).case("i")
    assert case is not None
    assert [end.round for end in case.ends] == [1, 2]
    again = [closed(), formed(round_=3), exited(1, round_=3), opened(3, incident="k")]
    cases = cases_of(*facts, *again)
    assert [[end.rank for end in one.ends] for one in cases.cases] == [[3, 3], [1]]


def test_a_round_that_fails_again_is_judged_as_soon_as_its_nodes_have_stopped() -> None:
    """A repeated bug ends its job before another round has run: `stop.user_error`."""

    def stopped(round_: int) -> RanksStopped:
        told = about(id=f"stopped-{round_}", round_=round_)
        return RanksStopped(**told, node="n0", slot=0, ranks=(0, 1), stop_s=0.1)

    def is_judged_after(seconds: float) -> bool:
        case = cases.case("i")
        assert case is not None
        return is_due(case, WatchedIncident(0.0, 0.0), seconds, AttributionSettings())

    again = [formed(1, round_=2), exited(1, round_=2)]
    cases = cases_of(formed(1), exited(1), stopped(1), opened())
    judge(cases, "i")
    assert not is_judged_after(0.6)
    for fact in (*again, stopped(1)):
        cases.take(fact)
        assert not is_judged_after(0.6), "its node has not stopped yet"
    cases.take(stopped(2))
    assert is_judged_after(0.6)
    cases.take(closed())
    assert not is_judged_after(0.6)


def test_an_end_before_the_restart_counted_as_a_recovery_is_of_the_next_incident() -> None:
    """A4.6: the same failure in the next incident is seen as such, and advises to stop."""
    first = (formed(), exited(3), opened(), formed(round_=2))
    early = (exited(3, round_=2), closed(), opened(2, incident="k"))
    cases = cases_of(*first, *early)
    assert [[end.round for end in one.ends] for one in cases.cases] == [[1], [2]]


def test_a_thousand_ranks_that_fail_are_one_case_of_bounded_size() -> None:
    """1 000 ranks failing together: one incident, bounded work (A7.1)."""
    long = error(text="x" * 100_000)
    facts = [exited(rank, error=long) for rank in range(4000)]
    cases = cases_of(formed(2000), *facts, opened())
    case = cases.case("i")
    assert case is not None
    assert len(case.ends) + case.more_ends == 4000
    assert len(msgspec.json.encode(cases.document)) < 4 << 20


def judge(cases: JobCases, incident: str) -> None:
    verdict = VerdictReached(
        **about(id=f"verdict-{incident}"),
        incident=incident,
        cause="host",
        confidence=0.9,
        reason="x",
    )
    cases.take(verdict)


def test_no_incident_is_forgotten_before_it_is_judged() -> None:
    """30 of them in a short time: a queue, in which judged ones go first."""
    cases = cases_of(formed())
    for number in range(30):
        cases.take(opened(incident=f"i{number}"))
        cases.take(exited(3, incident=f"i{number}"))
    assert len(cases.cases) == 30
    for number in range(20):
        judge(cases, f"i{number}")
    cases.take(opened(incident="next"))
    left = {case.incident: case.verdict is not None for case in cases.cases}
    assert [name for name, is_judged in left.items() if not is_judged] == [
        *(f"i{number}" for number in range(20, 30)),
        "next",
    ]
    assert sum(left.values()) == JUDGED_MOST - 1
    assert left["i19"], "the newest may still be amended"


def test_a_document_that_is_too_large_loses_judged_cases_first_and_then_details() -> None:
    cases = cases_of(formed(), opened(incident="judged"), opened(incident="open"))
    judge(cases, "judged")
    for rank in range(100):
        cases.take(exited(rank, incident="open"))
    assert cases.make_room()
    assert [case.incident for case in cases.cases] == ["open"]
    assert cases.make_room()
    (case,) = cases.cases
    assert len(case.ends) + case.more_ends == 100
    assert len(case.ends) < 10
    assert not cases.make_room()


def test_cases_evidence_and_signs_are_bounded() -> None:
    cases = cases_of(formed(), opened())
    for number in range(1200):
        cases.take(collected("log", number))
        cases.take(opened(incident=f"i{number}"))
    assert len(cases.cases) == UNJUDGED_MOST
    assert cases.case("i") is None
    assert cases.take(collected("log", 7)) is None, "an incident of long ago"


def test_observed_stalls_and_refused_acts_begin_nothing() -> None:
    refused = OperatorActed(
        **about(id="o"), by="ada", action="stop_job", target="", outcome="refused", reason=""
    )
    cases = cases_of(formed(), refused)
    assert cases.document.cases == ()


def test_a_stop_by_attribution_itself_is_no_act_from_outside() -> None:
    """A7.2: it follows from a verdict, and is no evidence for another one."""
    acts = [
        OperatorActed(
            **about(id=by), by=by, action="stop_job", target="", outcome="accepted", reason=""
        )
        for by in ("attribution", "ada")
    ]
    case = cases_of(formed(), opened(), *acts).case("i")
    assert case is not None
    assert [act.by for act in case.outside] == ["ada"]


def test_a_stall_that_only_warns_is_remembered_apart_from_those_that_end_a_round() -> None:
    cases = cases_of(formed(), stalled(1, is_fatal=False), stalled(2))
    assert cases.cases == ()
    cases.take(opened())
    case = cases.case("i")
    assert case is not None
    assert [one.rank for one in case.warned_stalls] == [1]
    assert [one.rank for one in case.stalls] == [2]


def moving(rank: int) -> RankRecovered:
    return RankRecovered(
        **about(id=f"moves-{rank}"), node="n0", slot=0, rank=rank, local_rank=rank, stalled_s=9.0,
        stall=f"stall-{rank}",
    )  # fmt: skip


@pytest.mark.parametrize("is_fatal", [True, False])
def test_a_stall_counts_until_its_rank_moves_again(*, is_fatal: bool) -> None:
    """A stall that was over explains no later failure, whatever step the others are at."""
    before = [stalled(rank, is_fatal=is_fatal) for rank in (1, 2)]
    case = cases_of(formed(), *before, moving(1), opened(), moving(2)).case("i")
    assert case is not None
    assert [one.rank for one in (*case.stalls, *case.warned_stalls)] == [2]
    freed = stalled(1, is_fatal=is_fatal, signal="monitor")
    case = cases_of(formed(), freed, moving(1), opened()).case("i")
    assert case is not None
    assert [one.rank for one in (*case.stalls, *case.warned_stalls)] == [1], "all restart with it"


def test_a_round_that_goes_on_may_have_another_incident_with_stalls_of_its_own() -> None:
    """As in attach mode, where no stall ends a round (A4.4)."""
    first = (formed(), stalled(1, is_fatal=False), opened(), moving(1), closed())
    cases = cases_of(*first, stalled(2, is_fatal=False), opened(incident="k"))
    found = [[one.rank for one in case.warned_stalls] for case in cases.cases]
    assert found == [[1], [2]]


def test_a_late_report_of_a_round_that_is_over_belongs_to_its_incident() -> None:
    facts = (formed(), exited(3), opened(), formed(round_=2), closed(), exited(0))
    (case,) = cases_of(*facts).cases
    assert [one.rank for one in case.ends] == [3, 0]


def test_what_a_later_round_reports_before_its_incident_is_of_no_earlier_one() -> None:
    """Agents and rendezvous send on their own: the first incident may still count as open."""
    first = (formed(), stalled(2), opened(), formed(round_=2), exited(0, round_=2))
    cases = cases_of(*first, replace(stalled(1), id="late", round=2))
    case = cases.case("i")
    assert case is not None
    assert [one.rank for one in case.stalls] == [2]
    assert rank_ends.first_ends(case) == [], "it is no end of the round that stalled"
    for fact in (closed(), opened(2, incident="k")):
        cases.take(fact)
    found = [([it.rank for it in one.stalls], [it.rank for it in one.ends]) for one in cases.cases]
    assert found == [([2], []), ([1], [0])]


def test_who_was_done_is_remembered_for_an_incident_and_is_none() -> None:
    """A thousand ranks that are done cost no more than some."""
    done = [exited(rank, how="done") for rank in range(1000)]
    cases = cases_of(formed(), *done, done[0])
    assert cases.cases == ()
    cases.take(opened())
    case = cases.case("i")
    assert case is not None
    assert [one.rank for one in case.done] == list(range(64))
    assert (case.more_done, case.ends) == (936, ())
    assert cases_of(formed(), *done, formed(round_=2)).document.cases == ()


def test_slow_ranks_that_are_still_slow_belong_to_the_case() -> None:
    found = [
        StragglerFound(
            **about(id=f"slow-{rank}"), node="n0", slot=0, rank=rank, cause="host", reason="2x"
        )
        for rank in (0, 1)
    ]
    over = StragglerCleared(**about(id="c"), node="n0", rank=0, reason="", finding="slow-0")
    case = cases_of(formed(), *found, over, opened()).case("i")
    assert case is not None
    assert [one.rank for one in case.slow] == [1]


def test_a_node_that_comes_back_amends_the_case_of_its_loss() -> None:
    cases = cases_of(formed(), lost("n1"), opened(trigger="node_lost", node="n1"), closed())
    back = NodeReturned(**about(round_=3, id="b"), node="n1", away_s=30.0, how="cut_off")
    assert cases.take(back) == "i"
    case = cases.case("i")
    assert case is not None
    assert [sign.sign for sign in case.nodes] == ["lost", "returned"]


def test_an_end_that_names_its_incident_is_of_no_other_one() -> None:
    """A stall was over, and a rank was killed in the same round: two incidents (A7.1)."""
    killed = exited(1, how="signal", signal="SIGKILL", incident="second")
    story = (opened(incident="first"), closed("first"), killed, opened(incident="second"))
    cases = cases_of(formed(), *story)
    first, second = cases.case("first"), cases.case("second")
    assert first is not None
    assert second is not None
    assert first.ends == ()
    assert [end.rank for end in second.ends] == [1]


def test_nodes_that_fell_together_are_all_in_the_case_once() -> None:
    """Health tells no loss of a node whose slot is filled before its limit has passed."""
    again = extended("n0", "n1")
    cases = cases_of(formed(), opened(), extended("n0"), again, again, lost("n1"))
    signs = cases.cases[0].nodes
    assert [(it.node, it.sign) for it in signs] == [("n0", "lost"), ("n1", "lost")]
    assert signs[0].reason == "n0 is gone: its agent cannot be reached"
    assert signs[1].reason == "silent"
    assert cases_of(formed(), opened(), lost("n1"), extended("n1")).cases[0].nodes == (signs[1],)

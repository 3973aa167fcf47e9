"""What rank 0 reports of results that cannot be right, as facts and incidents."""

from typing import Any

import pytest

from everstep.messages import (
    Fact,
    IncidentClosed,
    IncidentOpened,
    NumericsActed,
    NumericsCounted,
    NumericsJudged,
    NumericsSuspected,
    decode,
    encode,
)
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.numerics import NumericsRecorder
from tests.fakes.clock import FakeClock
from trainer_sdk.wire import NumericsReported

A, B = "00000000000000aa", "00000000000000bb"
SPIKE = {"case": A, "step": 41, "signal": "loss_spike", "value": 9.5, "high": 3.0, "moved_at": 40}
NAN = {"case": A, "step": 41, "signal": "nan", "moved_at": 41}
JUDGED = {
    "case": A, "step": 41, "signal": "loss_spike", "kind": "persistent", "ranks": [3],
    "node": "node-07", "first": 9.5, "again": [9.5, 9.5], "elsewhere": 2.5, "elsewhere_by": 0,
    "reason": "rank 3 gives 9.5 three times, rank 0 gives 2.5",
}  # fmt: skip
ACTED = {"case": A, "step": 41, "action": "rollback", "outcome": "done", "reason": "policy",
         "to_step": 39, "lost_steps": 2}  # fmt: skip


TOLD = {
    "stop": "the training stopped", "move": "the training moves to other nodes",
    "exclude": "the training asked that its node leaves",
    "skip": "the training went back and passes over data",
}  # fmt: skip


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recorder(clock: FakeClock) -> NumericsRecorder:
    return NumericsRecorder(AgentFacts("j", "node-01", clock), clock)


def heard(recorder: NumericsRecorder, event: str, body: dict[str, Any]) -> list[Fact]:
    facts = recorder.heard(2, NumericsReported(round=2, rank=0, event=event, body=body))
    for fact in facts:
        decode(encode(fact))
    return facts


def kinds(facts: list[Fact]) -> list[type]:
    return [type(fact) for fact in facts]


async def test_a_judged_case_is_an_incident_that_ends_with_what_followed(
    recorder: NumericsRecorder, clock: FakeClock
) -> None:
    assert kinds(heard(recorder, "suspected", SPIKE)) == [NumericsSuspected]
    opened, judged = heard(recorder, "judged", JUDGED)
    assert isinstance(opened, IncidentOpened)
    assert isinstance(judged, NumericsJudged)
    assert (opened.trigger, opened.node, opened.rank, opened.step) == (
        "numerics", "node-07", 3, 41,
    )  # fmt: skip
    assert (opened.reason, opened.trigger_fact) == (JUDGED["reason"], judged.id)
    await clock.advance(2.5)
    acted, closed = heard(recorder, "acted", ACTED)
    assert isinstance(acted, NumericsActed)
    assert isinstance(closed, IncidentClosed)
    assert judged.incident == acted.incident == closed.incident == opened.incident
    assert (closed.outcome, closed.lost_steps, closed.restored_step) == ("recovered", 2, 39)
    assert (closed.ledger.other_s, closed.next_round) == (2.5, 2)
    assert closed.reason == f"{JUDGED['reason']}; the training went back to step 39: policy"
    again = heard(recorder, "acted", ACTED | {"action": "skip"})
    assert kinds(again) == [NumericsActed], "the case has its incident only once"


def test_what_no_healthy_training_has_opens_an_incident_before_any_judgement(
    recorder: NumericsRecorder,
) -> None:
    opened, suspected = heard(recorder, "suspected", NAN)
    assert isinstance(opened, IncidentOpened)
    assert isinstance(suspected, NumericsSuspected)
    assert opened.reason == "at step 41 the loss or the gradient norm is not a number"
    assert suspected.incident == opened.incident
    (judged,) = heard(recorder, "judged", JUDGED | {"signal": "nan"})
    assert isinstance(judged, NumericsJudged)
    assert judged.incident == opened.incident
    (closed,) = recorder.ends()
    assert isinstance(closed, IncidentClosed)
    assert closed.reason == f"{JUDGED['reason']}; the round ended"
    assert recorder.ends() == []


def test_a_training_that_stays_nan_opens_one_incident_a_round(recorder: NumericsRecorder) -> None:
    assert kinds(heard(recorder, "suspected", NAN)) == [IncidentOpened, NumericsSuspected]
    assert kinds(heard(recorder, "suspected", NAN)) == [NumericsSuspected]
    following = heard(recorder, "suspected", NAN | {"case": B, "step": 42})
    assert kinds(following) == [IncidentClosed, NumericsSuspected]


def test_a_result_of_the_round_that_ranks_left_opens_no_incident_in_the_next(
    recorder: NumericsRecorder,
) -> None:
    assert kinds(heard(recorder, "judged", JUDGED | {"moved_from": 1})) == [NumericsJudged]
    assert kinds(heard(recorder, "acted", ACTED | {"action": "observe"})) == [NumericsActed]
    assert recorder.ends() == []


def test_correct_results_blame_no_rank(recorder: NumericsRecorder) -> None:
    opened, judged = heard(recorder, "judged", JUDGED | {"kind": "correct_but_unexpected"})
    assert isinstance(opened, IncidentOpened)
    assert isinstance(judged, NumericsJudged)
    assert (opened.node, opened.rank, judged.ranks) == (None, None, (3,))


def test_a_host_is_named_as_its_node_is(recorder: NumericsRecorder) -> None:
    """History would refuse facts about a node whose name is not allowed."""
    opened, judged = heard(recorder, "judged", JUDGED | {"node": "gpu.example"})
    assert isinstance(opened, IncidentOpened)
    assert isinstance(judged, NumericsJudged)
    assert (opened.node, judged.node) == ("gpu-example", "gpu-example")


@pytest.mark.parametrize("action", TOLD)
def test_the_incident_of_a_round_that_ends_by_a_case_takes_over_that_of_the_case(
    recorder: NumericsRecorder, action: str
) -> None:
    back = {"action": action, "to_step": None, "lost_steps": 0}
    for case in (A, B):
        heard(recorder, "judged", JUDGED | {"case": case})
        assert kinds(heard(recorder, "acted", ACTED | {"case": case} | back)) == [NumericsActed]
    for closed in recorder.ends(incident="the end"):
        assert isinstance(closed, IncidentClosed)
        assert (closed.outcome, closed.merged_into) == ("merged", "the end")
        assert closed.reason == f"{JUDGED['reason']}; {TOLD[action]}: policy"
        assert closed.next_round is None
    assert recorder.ends(incident="another end") == []


def test_a_result_about_which_nothing_could_be_done_is_no_recovery(
    recorder: NumericsRecorder,
) -> None:
    heard(recorder, "judged", JUDGED)
    refused = {"outcome": "refused", "reason": "no checkpoint is older", "to_step": None}
    _, closed = heard(recorder, "acted", ACTED | refused)
    assert isinstance(closed, IncidentClosed)
    assert closed.outcome == "failed"
    assert closed.reason.endswith("; the training could not go back: no checkpoint is older")


def test_an_action_that_was_wanted_and_refused_is_an_incident_once_a_round(
    recorder: NumericsRecorder,
) -> None:
    """A mere spike opens none."""
    refused = ACTED | {"outcome": "refused", "reason": "no checkpoint is older", "to_step": None}
    assert kinds(heard(recorder, "suspected", SPIKE)) == [NumericsSuspected]
    opened, acted, closed = heard(recorder, "acted", refused)
    assert isinstance(opened, IncidentOpened)
    assert isinstance(acted, NumericsActed)
    assert isinstance(closed, IncidentClosed)
    assert opened.reason == "at step 41 the loss left its band: 9.5, expected 3"
    assert opened.incident == acted.incident == closed.incident
    assert (closed.outcome, closed.reason) == (
        "failed", f"{opened.reason}; the training could not go back: no checkpoint is older",
    )  # fmt: skip
    for case in (A, B):
        heard(recorder, "suspected", SPIKE | {"case": case})
        assert kinds(heard(recorder, "acted", refused | {"case": case})) == [NumericsActed]


def test_a_round_that_no_incident_ends_closes_the_case(recorder: NumericsRecorder) -> None:
    heard(recorder, "judged", JUDGED)
    heard(recorder, "acted", ACTED | {"action": "exclude", "to_step": None})
    (closed,) = recorder.ends()
    assert isinstance(closed, IncidentClosed)
    assert (closed.outcome, closed.next_round) == ("recovered", 2)


@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("suspected", {"step": -1}),
        ("suspected", {"step": 2**60}),
        ("suspected", {"signal": ["nan"]}),
        ("suspected", {"ranks": "all"}),
        ("suspected", {"type": "rank_exited.v1"}),
        ("suspected", {"case": None}),
        ("dreamt", {}),
    ],
)
def test_what_no_rank_0_reports_is_dropped(
    recorder: NumericsRecorder, event: str, change: dict[str, Any]
) -> None:
    assert heard(recorder, event, SPIKE | change) == []


def test_numbers_texts_and_lists_are_bounded(recorder: NumericsRecorder) -> None:
    (fact,) = heard(recorder, "suspected", SPIKE | {"value": 1e300, "ranks": list(range(500))})
    assert isinstance(fact, NumericsSuspected)
    assert (fact.value, len(fact.ranks)) == (1e18, 100)
    results = [{"name": str(n), "compared": 9, "different": 2, "largest": 0.5} for n in range(200)]
    (counted,) = heard(recorder, "counted", {"steps": 9, "again": 9, "results": results})
    assert isinstance(counted, NumericsCounted)
    assert len(counted.results) == 100
    _, judged = heard(recorder, "judged", JUDGED | {"reason": "x" * 9000, "id": "mine"})
    assert isinstance(judged, NumericsJudged)
    assert (len(judged.reason), judged.round) == (2000, 2)
    assert judged.id != "mine"

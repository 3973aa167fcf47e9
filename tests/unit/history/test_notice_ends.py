"""How notices are over: the outcome that all lists show, in the order of what happened."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.messages import Fact, IncidentOpened, RoundEnded, VerdictReached
from everstep.messages.documents.notices import Notice
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.numerics import NumericsRecorder
from everstep_services.history.notifications import payloads, texts
from everstep_services.history.notifications.notices import Delivery
from tests.fakes.clock import FakeClock
from tests.unit.history.notice_facts import (
    BEGAN_S,
    asked_to_drain,
    closed,
    fast,
    job_ended,
    judged,
    left,
    lost,
    opened,
    slow,
)
from tests.unit.history.test_notices import World
from trainer_sdk.wire import NumericsReported

AT = datetime.fromtimestamp(BEGAN_S + 2, UTC)


def verdict(incident: str, number: int, fingerprint: str = "f") -> VerdictReached:
    """The failure of this round will come again."""
    return replace(
        judged(incident, "user_code"), round=number, fingerprint=fingerprint, is_transient=False
    )


def failure(incident: str, number: int, fingerprint: str = "f") -> list[Fact]:
    """An incident of this round, after which the next round trains."""
    recovered = replace(closed(incident), next_round=number + 1)
    return [opened(incident), verdict(incident, number, fingerprint), recovered]


def titles(world: World) -> list[str]:
    return [texts.title(one.notice) for one in world.sent if one.target == "slack"]


def test_the_same_failure_in_the_next_round_makes_a_recovery_a_repetition() -> None:
    world = World()
    world.take(*failure("i1", 1))
    world.after(5)
    world.take(*failure("i2", 2), *failure("i3", 3))
    assert world.after(60) == []
    world.take(opened("i4"), verdict("i4", 4), closed("i4", "failed"))
    world.take(job_ended("failed", incident="i4"))
    world.after(5)
    recovered, repeated, failed = titles(world)
    assert recovered == "j: incident recovered (user_code) rank 3 on n1"
    assert repeated == "j: incident repeated (user_code) rank 3 on n1"
    assert failed.startswith("j: the job has failed")
    message = next(one.notice for one in world.sent if one.notice.outcome == "repeated")
    assert (message.more, message.ending) == (1, "then round 4 ended in the same way")
    assert world.after(1000) == []


def test_a_failure_after_which_the_round_went_on_repeats_nothing() -> None:
    world = World()
    for incident in ("i1", "i2"):
        world.take(opened(incident), replace(closed(incident), next_round=1), verdict(incident, 1))
        world.after(400)
    assert {one.notice.outcome for one in world.sent} == {"recovered"}


def test_another_failure_leaves_the_recovery_and_is_told_before_the_end() -> None:
    world = World()
    world.take(*failure("i1", 1, "a"))
    world.after(5)
    world.take(*failure("i2", 2, "b"))
    world.take(opened("i3"), verdict("i3", 3, "c"), closed("i3", "failed"))
    world.take(job_ended("failed", incident="i3"))
    world.after(5)
    words = [title.split(" rank")[0].split(":")[1].strip() for title in titles(world)]
    assert words == ["incident recovered (user_code)"] * 2 + ["the job has failed"]


def round_ended(number: int = 1) -> RoundEnded:
    return RoundEnded(
        id=f"ended-{number}", job="j", at=AT, source="test", round=number, cause="operator",
        reason="ann drained n1",
    )  # fmt: skip


def test_the_end_of_its_round_ends_a_slow_rank_whether_or_not_another_follows() -> None:
    world = World()
    world.take(slow(3))
    world.after(60)
    world.take(round_ended(2))
    assert world.after(1) == []
    world.take(round_ended())
    (over, _) = world.after(1)
    assert (over.step, over.notice.outcome) == ("resolved", "round_ended")
    assert texts.title(over.notice) == "j: the round of a slow rank has ended: rank 3 on n1"
    world.take(fast(3))
    assert world.after(1000) == []


@pytest.mark.parametrize("is_end_first", [False, True])
def test_no_message_about_a_slow_rank_follows_the_end_of_its_round(is_end_first: bool) -> None:
    world = World()
    facts: list[Fact] = [slow(3), round_ended()]
    world.take(*(reversed(facts) if is_end_first else facts))
    assert world.after(1000) == []
    assert len(world.notices) == 0


def test_a_drain_tells_how_it_ended() -> None:
    ends = {
        "node n1 has left j": left("n1"),
        "node n1 was lost before it left j": lost("n1"),
        "j is over before node n1 left it": job_ended("done"),
    }
    for title, fact in ends.items():
        world = World()
        world.take(asked_to_drain("n1"))
        world.after(5)
        world.take(fact)
        world.after(5)
        assert titles(world)[1] == title


@pytest.mark.parametrize(
    ("outcome", "word", "color"),
    [("recovered", "Resolved", "#2eb886"), ("repeated", "Over", "#d72b0d")],
)
def test_slack_shows_no_bad_end_as_a_good_one(outcome: str, word: str, color: str) -> None:
    notice = Notice(
        id="j/i1", event="incident", state="resolved", heard_s=BEGAN_S, job="j", subject="i1",
        outcome=outcome,
    )  # fmt: skip
    message = payloads.slack(Delivery("slack", "resolved", notice), "")
    assert message["text"] == f"[{word}] j: incident {outcome}"
    assert message["attachments"][0]["color"] == color


SAME = "each computation gave the same result: rank 0 has loss 9.5, again 9.5 and 9.5"
JUDGED = {"signal": "loss_spike", "kind": "correct_but_unexpected", "ranks": [0], "reason": SAME}
ACTED = {
    "action": "skip", "outcome": "done", "reason": SAME, "to_step": 39, "lost_steps": 1,
    "samples_from": 312, "samples_to": 328,
}  # fmt: skip


def reported(**bodies: dict[str, Any]) -> list[Fact]:
    """The facts of a case at step 41, as the agent of rank 0 makes them of its reports."""
    clock = FakeClock()
    recorder = NumericsRecorder(AgentFacts("j", "n1", clock), clock)
    head = {"case": "00000000000000aa", "step": 41}
    return [
        replace(fact, at=AT)
        for event, body in bodies.items()
        for fact in recorder.heard(
            2, NumericsReported(round=2, rank=0, event=event, body=head | body)
        )
    ]


def test_a_result_that_cannot_be_right_is_told_with_what_was_done_about_it() -> None:
    world = World()
    facts = reported(judged=JUDGED, acted=ACTED)
    (incident,) = (fact.incident for fact in facts if isinstance(fact, IncidentOpened))
    of_data = replace(
        judged(incident, "data", reason=f"step 41: {SAME}"), culprit_ranks=(), culprit_nodes=()
    )
    world.take(*facts, of_data)
    world.after(5)
    (told,) = (one for one in world.sent if one.target == "slack")
    message = payloads.webhook(told, "https://e")
    assert message["title"] == "j: incident recovered (data)"
    assert message["text"].splitlines() == [
        f"Verdict: data (80%). step 41: {SAME}",
        "End: the training went back to step 39 and passes over data 312 to 327",
        "Cost: 0.0 s, 1 step made again",
    ]
    assert (message["outcome"], message["lost_steps"]) == ("recovered", 1)
    (attachment,) = payloads.slack(told, "https://e")["attachments"]
    assert attachment["text"] == message["text"]
    assert attachment["title_link"] == f"https://e/incidents/{incident}"


def test_a_result_about_which_nothing_could_be_done_is_over_and_not_resolved() -> None:
    world = World()
    refused = {"outcome": "refused", "reason": "no checkpoint is older", "to_step": None}
    world.take(*reported(judged=JUDGED, acted=ACTED | refused | {"lost_steps": 0}))
    world.after(5)
    (told,) = (one for one in world.sent if one.target == "slack")
    message = payloads.slack(told, "")
    assert message["text"] == "[Over] j: incident failed"
    assert (
        "could not go back and pass over data 312 to 327: no checkpoint is older"
        in (message["attachments"][0]["text"])
    )

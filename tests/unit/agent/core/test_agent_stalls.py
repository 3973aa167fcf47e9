"""A stall is reported until something follows from it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from everstep.incident_causes import CONSEQUENCE, NODE, PLAIN
from everstep.messages import Reported
from everstep_services.agent.core.actions import Action, SendReport, ShowLine
from everstep_services.agent.core.agent import Agent
from tests.unit.agent.orders import KILLED, running, stop, told


def shown(acts: Sequence[Action]) -> list[str]:
    return [act.text for act in acts if isinstance(act, ShowLine)]


def stall(agent: Agent, now: float, rank: int = 1, *, is_doubtful: bool = False) -> SendReport:
    acts = agent.rank_stalled(rank, "it hangs", 40.0, "f" * 32, now, is_doubtful=is_doubtful)
    assert shown(acts) == ["it hangs"]
    tell = acts[-1]
    assert isinstance(tell, SendReport)
    return tell


def heard(agent: Agent, tell: SendReport, now: float) -> None:
    assert agent.reported(tell, Reported(round=tell.round, is_current=True), now) == []


def test_a_stall_from_which_nothing_follows_is_told_again_with_the_same_fact() -> None:
    agent = running()
    first = stall(agent, now=0)
    heard(agent, first, now=1)
    assert agent.wake_at == 11
    assert agent.tick(now=10.9) == []
    [again] = agent.tick(now=11)
    assert again == replace(first, waited_s=51.0)
    assert agent.tick(now=11.5) == [], "it has not been heard yet"
    heard(agent, first, now=12)
    assert agent.tick(now=22) == [replace(first, waited_s=62.0)]


def test_what_nobody_has_heard_yet_is_not_told_again() -> None:
    agent = running()
    stall(agent, now=0)
    assert agent.wake_at is None
    assert agent.tick(now=3600) == []


def test_a_rank_that_moves_again_or_is_gone_is_told_of_no_more() -> None:
    agent = running()
    heard(agent, stall(agent, now=0, rank=0), now=0)
    heard(agent, stall(agent, now=0, rank=1), now=0)
    assert told(agent.rank_moves(0, "it moves", "e" * 32)) == ["rank_recovered"]
    agent.rank_gone(1, KILLED)
    assert agent.wake_at is None
    assert agent.tick(now=100) == []


@pytest.mark.parametrize("end", ["round", "node"])
def test_a_stall_is_told_of_no_more_when_its_round_or_its_node_goes(end: str) -> None:
    agent = running()
    tell = stall(agent, now=0)
    heard(agent, tell, now=0)
    if end == "round":
        agent.ordered(stop())
    else:
        agent.preempted(15, "SIGTERM", now=1)
    heard(agent, tell, now=1)
    assert told(agent.tick(now=100)) == []
    assert agent.wake_at is None or agent.wake_at > 100


def answered(agent: Agent, tell: SendReport, cause: str, weight: int) -> list[str]:
    """The lines that an answer to the report of a stall brings to the console."""
    reply = Reported(round=tell.round, is_current=True, cause=cause, weight=weight)
    return shown(agent.reported(tell, reply, now=1))


def test_a_doubtful_notice_is_corrected_once_and_only_by_better_evidence() -> None:
    agent = running()
    waits = stall(agent, now=0, is_doubtful=True)
    assert answered(agent, waits, "", 0) == []
    excuse = "rank 5 is within its limit for 20 s more"
    assert answered(agent, waits, excuse, CONSEQUENCE) == [f"what rank 1 may wait for: {excuse}"]
    assert answered(agent, waits, "rank 5 is within its limit for 10 s more", CONSEQUENCE) == []
    other = stall(agent, now=2, rank=0, is_doubtful=True)
    cause = "rank 5 has made no progress for 60 s"
    assert answered(agent, other, cause, PLAIN) == [f"what rank 0 waits for: {cause}"]
    assert answered(agent, waits, cause, PLAIN) == []
    assert answered(agent, waits, excuse, CONSEQUENCE) == []
    assert answered(agent, waits, "node-2 is lost", NODE) == [
        "what rank 1 waits for: node-2 is lost"
    ]
    for rank in (0, 1):
        assert shown(agent.rank_moves(rank, "it moves", "e" * 32)) == ["it moves"]
    assert answered(agent, stall(agent, now=9, is_doubtful=True), cause, PLAIN), "another stall"


def test_a_notice_without_a_doubt_is_corrected_by_no_other_stall_nor_by_itself() -> None:
    agent = running()
    sleeps = stall(agent, now=0)
    assert answered(agent, sleeps, "rank 5 has made no progress for 60 s", PLAIN) == []
    waits = stall(agent, now=0, rank=0, is_doubtful=True)
    assert answered(agent, waits, sleeps.reason, PLAIN) == [], "the console has that line"

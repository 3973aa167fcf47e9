"""A stall is reported until something follows from it."""

from dataclasses import replace

import pytest

from everstep.messages import Reported
from everstep_services.agent.core.actions import SendReport
from everstep_services.agent.core.agent import Agent
from tests.unit.agent.orders import KILLED, running, stop, told


def stall(agent: Agent, now: float, rank: int = 1) -> SendReport:
    [tell] = agent.rank_stalled(rank, "it hangs", 40.0, "f" * 32, now)
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

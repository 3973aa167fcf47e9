"""How long an agent waits whose ranks are over, and whom nobody answers."""

import pytest
from msgspec import structs

from everstep.messages import Reported
from everstep_services.agent.core.actions import ExitAgent, SendReport, ShowLine, StopRound
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.settings import AgentSettings
from tests.unit.agent.orders import DONE, KILLED, start


def over(exits: list[RankExit], slots: int = 1) -> Agent:
    """An agent whose ranks have ended so; nobody has answered its reports."""
    agent = Agent(AgentSettings(unheard_within_s=100))
    agent.ordered(structs.replace(start(1, ranks=len(exits)), slots=slots))
    for rank, ending in enumerate(exits):
        agent.rank_runs(rank)
        agent.rank_gone(rank, ending)
    return agent


@pytest.mark.parametrize(
    ("exits", "slots", "code"),
    [([DONE, DONE], 1, 0), ([DONE, DONE], 2, 94), ([DONE, KILLED], 1, 94)],
    ids=["done", "others-may-need-it", "failed"],
)
def test_ranks_that_are_over_do_not_wait_for_ever_for_an_answer(
    exits: list[RankExit], slots: int, code: int
) -> None:
    agent = over(exits, slots)
    assert agent.unheard(1000, "the bus is away") == []
    [waits] = agent.unheard(1005, "the bus is away")
    assert isinstance(waits, ShowLine)
    assert waits.text.endswith(f"for at most 100 s, and then exits with {code}")
    assert agent.unheard(1099.9, "the bus is away") == []
    [stop] = agent.unheard(1100, "the bus is away")
    is_done = exits == [DONE, DONE]
    assert stop == StopRound(1, agent.settings.stop_grace_s, 0.0, None, is_done=is_done)
    [exiting] = agent.stopped(1)
    assert isinstance(exiting, ExitAgent)
    assert exiting.code == code
    assert "the bus is away" in exiting.reason


def test_an_answer_begins_the_wait_anew() -> None:
    agent = over([DONE])
    agent.unheard(1000, "away")
    agent.unheard(1010, "away")
    told, reply = SendReport(1, "finished", ""), Reported(is_current=True, round=1)
    again = "rendezvous answers again: the agent had waited for 50 s"
    assert agent.reported(told, reply, now=1050) == [ShowLine(again)]
    assert agent.reported(told, reply, now=1051) == []
    assert agent.unheard(1100, "away") == []
    assert agent.unheard(1200, "away") != []


def test_ranks_at_work_wait_for_nobody() -> None:
    agent = Agent(AgentSettings(unheard_within_s=100))
    agent.ordered(start(1, ranks=2))
    agent.rank_runs(0)
    agent.rank_runs(1)
    agent.rank_gone(0, DONE)
    assert agent.unheard(0, "away") == agent.unheard(1e6, "away") == []

"""Which ranks an agent keeps when their round ends, and until when."""

from typing import Any

import pytest

from everstep.messages import Reported, SaveCheckpoint, SaveParked
from everstep_services.agent.core.actions import (
    Action,
    AskToJoin,
    EndParked,
    ExitAgent,
    SendReport,
    ShowLine,
    StopRound,
)
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import RankExit
from tests.unit.agent.orders import DONE, KILLED, common, leave, reply, running, start, stop

BOTH = (0, 1)


def keeps(acts: list[Action]) -> tuple[int, ...]:
    (stopping,) = (act for act in acts if isinstance(act, StopRound))
    return stopping.keeps


@pytest.mark.parametrize(
    ("cause", "kept"),
    [
        ("rank_exited", BOTH),
        ("rank_stalled", BOTH),
        ("start_failed", BOTH),
        ("node_lost", BOTH),
        ("node_left", BOTH),
        ("check_failed", BOTH),
        ("preempted", BOTH),
        ("grow", BOTH),
        ("operator", ()),
        ("numerics", ()),
        ("of a newer release", ()),
    ],
)
def test_the_cause_tells_whether_ranks_are_kept(cause: str, kept: tuple[int, ...]) -> None:
    assert keeps(running().ordered(stop(cause=cause))) == kept


def gone(agent: Agent) -> None:
    agent.rank_gone(0, KILLED)


def raised(agent: Agent) -> None:
    agent.script_failed(0, RankExit(code=1))


def stalled(agent: Agent, **rest: Any) -> None:
    agent.rank_stalled(0, "rank 0 has stalled", 10.0, "f" * 32, now=1, **rest)


def waits(agent: Agent) -> None:
    stalled(agent, waits_for_others=True)


def may_wait(agent: Agent) -> None:
    stalled(agent, is_doubtful=True)


def recovered(agent: Agent) -> None:
    stalled(agent)
    agent.rank_moves(0, "rank 0 moves", "f" * 32)


@pytest.mark.parametrize(
    ("happens", "kept"),
    [
        (gone, (1,)),
        (raised, (1,)),
        (stalled, (1,)),
        (waits, BOTH),
        (may_wait, BOTH),
        (recovered, BOTH),
    ],
)
def test_a_rank_that_has_failed_is_not_kept(happens: Any, kept: tuple[int, ...]) -> None:
    agent = running()
    happens(agent)
    assert keeps(agent.ordered(stop())) == kept


def test_ranks_are_kept_before_their_round_runs() -> None:
    """A second failure comes while the first is mended."""
    agent = Agent(running().settings)
    agent.ordered(start())
    assert keeps(agent.ordered(stop())) == BOTH


def test_a_node_that_leaves_or_is_accused_keeps_none() -> None:
    agent = running()
    agent.preempted(15, "SIGTERM", now=1)
    assert keeps(agent.tick(now=10_000)) == ()
    assert keeps(running().ordered(stop(cause="check_failed"), is_accused=True)) == ()
    assert keeps(running().ordered(leave())) == ()


def test_a_node_that_was_cut_off_keeps_none() -> None:
    agent = running()
    answer = Reported(round=3, is_current=False)
    assert keeps(agent.reported(SendReport(1, "rank_exited", "it did"), answer, now=1)) == ()
    assert keeps(running().ordered(stop(), is_stale=True)) == ()


def test_a_finished_round_keeps_none() -> None:
    agent = running()
    agent.rank_gone(0, DONE)
    agent.rank_gone(1, DONE)
    assert keeps(agent.ordered(stop())) == ()


def parked() -> Agent:
    agent = running()
    agent.ordered(stop())
    assert agent.stopped(1, parked=1) == [AskToJoin()]
    return agent


def test_a_spare_ends_parked_ranks_once() -> None:
    agent = parked()
    ends = EndParked(agent.settings.stop_grace_s)
    assert agent.joined(reply(2, standing="waiting"), now=1) == []
    spare = reply(2, standing="spare")
    assert agent.joined(spare, now=1) == [ShowLine("standing by as a spare"), ends]
    assert agent.joined(spare, now=2) == []


def test_a_round_takes_parked_ranks_over() -> None:
    agent = parked()
    assert agent.ordered(start(2))[-1] == start(2)
    agent.ordered(stop(2))
    agent.stopped(2)
    assert agent.joined(reply(3, standing="spare"), now=1) == [ShowLine("standing by as a spare")]


def test_an_agent_that_goes_takes_parked_ranks_with_it() -> None:
    """Its warden ends them as its last deed."""
    acts = parked().ordered(leave())
    assert [type(act) for act in acts] == [ExitAgent]


def test_an_agreed_save_changes_nothing() -> None:
    agent = running()
    order = SaveCheckpoint(**common(1), after_step=7, occasion="requested", then_stop=True)
    agent.asked_to_save(order, now=1)
    assert keeps(agent.ordered(stop(cause="grow"))) == BOTH


def test_parked_ranks_save_once_and_the_agent_joins_again() -> None:
    assert parked().ordered(save(round=2)) == [], "that round has begun without this node"
    agent = parked()
    assert agent.unsaved == 1
    acts = agent.ordered(save(round=1))
    assert acts == [ShowLine("the ranks that are parked save their states"), save(round=1)]
    assert agent.saved() == [AskToJoin()]
    assert agent.unsaved == 0
    assert agent.ordered(save(round=1)) == []


def save(round: int) -> SaveParked:
    return SaveParked(
        id="s", job="j", round=round, reason="", first_rank=0, world_size=1, master_address="n",
        master_port=1, within_s=30.0,
    )  # fmt: skip

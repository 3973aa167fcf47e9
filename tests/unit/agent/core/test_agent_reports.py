"""What an agent reports of ended ranks, and says of the causes of a round's end."""

from datetime import UTC, datetime

import pytest

from everstep.messages import ErrorRecord, FaultInjected
from everstep_services.agent.core.actions import (
    AskToJoin,
    SendReport,
    ShowLine,
    StopRound,
    StopWithoutWait,
)
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.settings import AgentSettings
from tests.unit.agent.orders import DONE, KILLED, reply, running, start, stop, told


def injected(agent: Agent, round_: int) -> None:
    now = datetime(2026, 11, 29, tzinfo=UTC)
    agent.injected(FaultInjected(
        id="f", job="j", at=now, source="agent/n0", round=round_, fault="kill", by="ann@n0", rank=1,
    ))  # fmt: skip


@pytest.mark.parametrize(("round_", "after"), [(1, ", after ann@n0 injected kill"), (2, "")])
def test_an_end_that_somebody_made_on_purpose_says_so(round_: int, after: str) -> None:
    """All that is said of the round's end, also before a verdict, has this report's words."""
    agent = running()
    injected(agent, round_)
    (tell,) = agent.rank_gone(1, KILLED)
    assert isinstance(tell, SendReport)
    by = "ann@n0" if after else ""
    assert (tell.reason, tell.injected_by) == (f"rank 1 was ended by SIGKILL{after}", by)
    stalled = running()
    injected(stalled, round_)
    _, tell = stalled.rank_stalled(1, "rank 1 is stopped", 6.0, "f", now=9.0)
    assert isinstance(tell, SendReport)
    assert (tell.reason, tell.injected_by) == (f"rank 1 is stopped{after}", by)


@pytest.mark.parametrize("has_exited", [True, False])
def test_a_rank_that_lost_its_peer_tells_who_had_left_before(has_exited: bool) -> None:
    agent = running()
    assert (agent.rank_gone(1, DONE) if has_exited else agent.script_returned(1, now=1)) == []
    lost = ErrorRecord(name="RuntimeError", text="Connection closed by peer [10.0.0.1]:7")
    (tell,) = agent.script_failed(0, RankExit(code=1, error=lost))
    assert isinstance(tell, SendReport)
    assert tell.reason.startswith("rank 0, perhaps because of another rank, exited with 1: ")
    assert tell.reason.endswith("; rank 1 had left before")
    (own,) = running().rank_gone(0, KILLED)
    assert isinstance(own, SendReport)
    assert own.reason == "rank 0 was ended by SIGKILL"


def test_the_first_failure_is_told_and_what_follows_from_it_is_not() -> None:
    agent = running()
    assert told(agent.rank_gone(1, KILLED)) == ["rank_exited"]
    assert agent.rank_gone(0, RankExit(signal="SIGABRT")) == []


def test_a_second_failure_that_may_be_the_cause_is_told() -> None:
    agent = running()
    agent.rank_gone(0, RankExit(signal="SIGABRT"))
    assert told(agent.rank_gone(1, KILLED)) == ["rank_exited"]


def test_what_had_ended_by_itself_before_it_was_stopped_is_told_though_late() -> None:
    agent = running()
    agent.rank_gone(0, RankExit(signal="SIGABRT"))
    agent.ordered(stop(1))
    assert agent.rank_gone(1, KILLED) == []
    assert told(agent.rank_fell(1, KILLED)) == ["rank_exited"]
    assert agent.rank_fell(1, KILLED) == [], "once"


def test_what_falls_with_its_round_is_no_cause() -> None:
    agent = running()
    agent.rank_gone(1, KILLED)
    agent.ordered(stop(1))
    assert agent.rank_fell(0, RankExit(signal="SIGABRT")) == []
    assert agent.rank_fell(0, RankExit()) == []


def test_an_exception_is_told_before_its_process_is_gone_and_once() -> None:
    agent = running()
    raised = RankExit(code=1, error=ErrorRecord(name="ValueError", text="no"))
    assert told(agent.script_failed(1, raised)) == ["rank_exited"]
    assert agent.rank_gone(1, RankExit(code=1)) == []
    assert told(agent.rank_gone(0, KILLED)) == ["rank_exited"]


def test_while_only_consequences_are_known_ranks_may_end_by_themselves_first() -> None:
    agent = running()
    assert agent.ordered(stop(cause_within_s=0.3)) == [
        StopRound(1, 2.0, 0.0, "i1", 0.3, keeps=(0, 1))
    ]
    assert told(agent.rank_fell(1, KILLED)) == ["rank_exited"]
    assert agent.ordered(stop(cause_within_s=0.3)) == []
    assert agent.ordered(stop()) == [ShowLine("round 1 is over: because"), StopWithoutWait()]
    assert agent.ordered(stop()) == [], "once"


def test_ranks_that_may_show_the_cause_are_started_though_their_round_is_over() -> None:
    """An import fails everywhere; here no rank had been started when the first failed there."""
    agent = Agent(AgentSettings())
    agent.ordered(start())
    assert agent.wants(start())
    assert agent.ordered(stop(cause_within_s=3.0)) == [
        StopRound(1, 2.0, 0.0, "i1", 3.0, keeps=(0, 1))
    ]
    assert agent.wants(start())
    assert not agent.wants(start(2))
    assert agent.rank_runs(0) == []
    assert told(agent.rank_fell(0, RankExit(code=1))) == ["rank_exited"]
    agent.ordered(stop())
    assert not agent.wants(start()), "the cause is known"


def test_ranks_of_a_round_whose_cause_is_known_are_not_started() -> None:
    agent = Agent(AgentSettings())
    agent.ordered(start())
    agent.ordered(stop())
    assert not agent.wants(start())


def test_the_console_waits_for_the_cause_while_only_consequences_are_known() -> None:
    """A4.5: who reads one line must not look at the wrong rank."""
    agent = running()
    victim, cause = stop(cause_within_s=0.3, reason="rank 0"), stop(reason="rank 1")
    assert agent.ordered(victim) == [StopRound(1, 2.0, 0.0, "i1", 0.3, keeps=(0, 1))]
    assert agent.ordered(cause) == [ShowLine("round 1 is over: rank 1"), StopWithoutWait()]
    assert agent.stopped(1) == [AskToJoin()]


def test_a_round_of_which_only_consequences_were_heard_is_said_to_be_over_all_the_same() -> None:
    agent = running()
    agent.ordered(stop(cause_within_s=0.3, reason="rank 0"))
    assert agent.stopped(1) == [AskToJoin()]
    assert agent.joined(reply(1), now=1) == [ShowLine("round 1 is over: rank 0")]
    assert agent.joined(reply(1), now=2) == [], "once"


def test_the_console_hears_what_the_last_report_of_a_round_has_changed() -> None:
    """All ranks may have ended before the order with the better cause comes."""
    agent = running()
    agent.ordered(stop(cause_within_s=0.3, reason="rank 0", weight=1))
    assert agent.stopped(1) == [AskToJoin()]
    assert agent.ordered(stop(reason="rank 1", weight=2)) == [ShowLine("round 1 is over: rank 1")]
    assert agent.joined(reply(1), now=1) == []


def test_an_older_order_replaces_no_better_cause_that_was_not_shown_yet() -> None:
    agent = running()
    agent.ordered(stop(cause_within_s=0.3, reason="rank 1", weight=2))
    agent.ordered(stop(cause_within_s=0.3, reason="rank 0", weight=1))
    agent.stopped(1)
    shown = agent.interrupted(2, "SIGINT", now=1)[0]
    assert shown == ShowLine("round 1 is over: rank 1")


def test_a_cause_that_was_wrong_is_put_right_also_after_the_ranks_have_stopped() -> None:
    agent = running()
    assert agent.ordered(stop(reason="rank 0"))[0] == ShowLine("round 1 is over: rank 0")
    assert agent.ordered(stop(reason="node-2")) == [ShowLine("what ended round 1: node-2")]
    assert agent.ordered(stop(reason="node-2")) == [], "once"
    assert agent.stopped(1) == [AskToJoin()]
    assert agent.ordered(stop(reason="node-3")) == [ShowLine("what ended round 1: node-3")]


def test_a_cause_is_put_right_only_by_a_better_one() -> None:
    """An order that was sent before may come after: the lost node is not taken back for a rank."""
    agent = running()
    assert agent.ordered(stop(reason="node-2", weight=3))[0] == ShowLine("round 1 is over: node-2")
    assert agent.ordered(stop(reason="rank 0", weight=1)) == []
    assert agent.stopped(1) == [AskToJoin()]
    assert agent.ordered(stop(reason="rank 0", weight=1)) == []


def test_an_agent_without_ranks_in_a_round_says_nothing_of_its_end() -> None:
    agent = Agent(AgentSettings())
    agent.begin()
    agent.joined(reply(1), now=0)
    assert agent.ordered(stop()) == []

"""What an agent does, with plain numbers."""

from typing import Any

import pytest

from everstep.messages import AwaitRound, Joined, LeaveJob, Order, Reported, StandBy
from everstep_services.agent.core.actions import (
    AskRanksToStop,
    AskToJoin,
    ExitAgent,
    PassNotice,
    RecordMissed,
    RecordNotice,
    SendReport,
    ShowLine,
    SignalRanks,
    StopRound,
)
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.settings import AgentSettings
from tests.unit.agent.orders import DONE, KILLED, common, leave, reply, running, start, stop, told


def test_it_joins_starts_and_says_when_all_ranks_run() -> None:
    agent = Agent(AgentSettings())
    assert agent.begin() == [AskToJoin()]
    assert agent.joined(reply(0), now=0) == []
    assert agent.ordered(start()) == [start()]
    assert agent.rank_runs(0) == []
    assert told(agent.rank_runs(1)) == ["started"]


def test_the_same_order_twice_starts_once() -> None:
    agent = running()
    assert agent.ordered(start()) == []
    assert agent.joined(reply(1, order=start()), now=1) == []


def test_an_order_of_an_older_round_is_refused() -> None:
    agent = running(round=5)
    before: tuple[Order, ...] = (start(4), stop(4), leave(4))
    assert [agent.ordered(order) for order in before] == [[], [], []]
    assert agent.refused_orders == 3
    assert agent.state == "running"


def test_a_lost_order_comes_with_the_next_answer() -> None:
    agent = Agent(AgentSettings())
    agent.joined(reply(0), now=0)
    assert agent.wake_at == 5
    assert agent.tick(now=5) == [AskToJoin()]
    acts = agent.joined(reply(1, order=start()), now=5)
    assert acts[-1] == start()


def test_a_stop_order_stops_and_the_agent_joins_again() -> None:
    agent = running()
    said, stopping = agent.ordered(stop())
    assert said == ShowLine("round 1 is over: because")
    assert stopping == StopRound(1, 2.0, 0.0, "i1", keeps=(0, 1))
    assert agent.ordered(stop()) == []
    assert agent.rank_gone(0, KILLED) == []
    assert agent.stopped(1) == [AskToJoin()]
    assert (agent.last_round, agent.last_slot, agent.order) == (1, 0, None)


def test_early_ends_with_0_are_no_failure_and_the_last_one_is_the_end() -> None:
    agent = running()
    assert agent.rank_gone(0, DONE) == []
    assert told(agent.rank_gone(1, DONE)) == ["finished"]
    assert agent.ordered(leave()) == [StopRound(1, 0.0, 0.0, None, is_done=True)]
    assert agent.stopped(1) == [
        ExitAgent(0, "done", "the job is done: because", is_sent=True, ends_job=True)
    ]


def test_only_slot_0_tells_of_the_first_step_and_once() -> None:
    agent = running()
    assert agent.rank_stepped(1, 1) == []
    assert told(agent.rank_stepped(0, 1)) == ["first_step"]
    assert agent.rank_stepped(0, 1) == []
    assert running(slot=1).rank_stepped(2, 1) == []


def test_an_agent_that_slept_through_two_rounds_stops_its_old_ranks() -> None:
    """The agent stops its ranks and stands by as a spare (A2.3)."""
    agent = running(round=1)
    answer = Reported(round=3, is_current=False)
    acts = agent.reported(SendReport(1, "rank_exited", "it did"), answer, now=1)
    assert [type(act) for act in acts] == [ShowLine, StopRound]
    assert agent.stopped(1) == [AskToJoin()]
    assert agent.joined(reply(3, standing="spare"), now=1) == [ShowLine("standing by as a spare")]
    assert agent.joined(reply(3, standing="spare"), now=2) == []
    assert agent.state == "standby"


def test_ranks_of_a_round_that_were_stopped_are_not_started_again() -> None:
    """The answer to `join` repeats the order to start, and comes after the order to stop."""
    agent = running()
    agent.ordered(stop())
    assert agent.joined(reply(1, order=start()), now=1) == []
    assert agent.stopped(1) == [AskToJoin()]
    assert agent.joined(reply(1, order=start()), now=2) == []
    assert (agent.order, agent.wake_at) == (None, 7), "it asks again"
    assert agent.ordered(start()) == []
    assert agent.ordered(start(2))[-1] == start(2)


def test_ranks_of_a_round_that_was_over_before_its_order_came_are_not_started() -> None:
    """The order to stop has overtaken the order to start: rendezvous learns that none runs."""
    agent = Agent(AgentSettings())
    agent.joined(reply(1), now=0)
    assert agent.ordered(stop(2)) == []
    assert agent.ordered(start(2)) == [AskToJoin()]
    assert (agent.order, agent.last_round, agent.last_slot) == (None, 2, 0)
    assert agent.ordered(start(2)) == [], "once"
    assert agent.ordered(start(3))[-1] == start(3)


def test_a_stale_agent_may_have_a_slot_in_the_newest_round_all_the_same() -> None:
    """The answer is about its older ranks, whether or not these have stopped meanwhile."""
    agent = running(round=1)
    stale = Joined(round=2, is_accepted=False, reason="over", cause="stale", order=stop(2))
    assert agent.joined(stale, now=1)[-1] == StopRound(1, 2.0, 0.0, "i1")
    assert agent.stopped(1) == [AskToJoin()]
    agent.joined(stale, now=2)
    assert agent.joined(reply(2, order=start(2)), now=3) == [start(2)]


def test_a_start_of_a_later_round_stops_the_ranks_of_the_earlier_first() -> None:
    agent = running(round=1)
    acts = agent.ordered(start(2))
    assert [type(act) for act in acts] == [ShowLine, StopRound]
    assert agent.ordered(start(2)) == []
    assert agent.stopped(1) == [AskToJoin()]
    assert agent.joined(reply(2, order=start(2)), now=1) == [start(2)]


def test_a_bus_that_comes_back_changes_nothing_for_a_round_that_still_runs() -> None:
    agent = running()
    assert agent.bus_back() == [AskToJoin()]
    assert agent.joined(reply(1, standing="member", order=start()), now=1) == []
    assert agent.state == "running"
    assert agent.wake_at is None, "its next question waits for the end of the round"


def test_preempted_ranks_that_end_well_make_91() -> None:
    agent = running()
    acts = agent.preempted(15, "SIGTERM", now=0)
    assert acts[0] == PassNotice(15)
    assert told(acts) == ["preempted"]
    assert agent.rank_gone(0, DONE) == []
    assert agent.rank_gone(1, DONE) == [StopRound(1, 0.0, 0.0, None)]
    [exiting] = agent.stopped(1)
    assert isinstance(exiting, ExitAgent)
    assert (exiting.code, exiting.cause, exiting.had_work) == (91, "preempted", True)


def test_preempted_ranks_that_the_signal_ends_make_143() -> None:
    agent = running()
    agent.preempted(15, "SIGTERM", now=0)
    agent.rank_gone(0, RankExit(signal="SIGTERM"))
    agent.rank_gone(1, RankExit(signal="SIGTERM"))
    [exiting] = agent.stopped(1)
    assert isinstance(exiting, ExitAgent)
    assert exiting.code == 128 + 15


def test_the_grace_of_a_preemption_ends() -> None:
    agent = Agent(AgentSettings(preempt_grace_s=600))
    agent.ordered(start())
    agent.rank_runs(0)
    agent.rank_runs(1)
    agent.preempted(15, "SIGTERM", now=10)
    assert agent.tick(now=12) == [AskRanksToStop(None)]
    assert agent.wake_at == 610
    assert agent.tick(now=609) == []
    assert agent.tick(now=610) == [RecordMissed("ranks still ran"), StopRound(1, 0.0, 0.0, None)]


def test_a_round_that_ends_while_preempted_ranks_still_save_leaves_them_alone() -> None:
    agent = running()
    agent.preempted(15, "SIGTERM", now=0)
    assert agent.ordered(stop()) == []
    assert agent.rank_gone(0, DONE) == []
    assert agent.rank_gone(1, DONE) == [StopRound(1, 0.0, 0.0, None)]


def test_control_c_asks_the_ranks_first_and_kills_the_second_time() -> None:
    agent = running()
    assert agent.interrupted(2, "SIGINT", now=0)[0] == SignalRanks(2)
    assert agent.interrupted(2, "SIGINT", now=1) == [StopRound(1, 0.0, 0.0, None)]
    [exiting] = agent.stopped(1)
    assert isinstance(exiting, ExitAgent)
    assert (exiting.code, exiting.cause) == (130, "operator")


def test_a_spare_leaves_at_once() -> None:
    agent = Agent(AgentSettings())
    agent.ordered(StandBy(**common(1)))
    [_, exiting] = agent.preempted(15, "SIGTERM", now=0)
    assert isinstance(exiting, ExitAgent)
    assert (exiting.code, exiting.had_work) == (91, False)


def test_a_job_that_is_over_is_left_with_its_exit_code() -> None:
    agent = Agent(AgentSettings())
    refused = Joined(
        round=7, is_accepted=False, cause="job_over", reason="the job is done", exit_code=0
    )
    assert agent.joined(refused, now=0) == [
        ExitAgent(0, "refused", "the job is done", is_sent=True, ends_job=True)
    ]


@pytest.mark.parametrize(
    ("answer", "ends_job"),
    [
        ({"is_accepted": False, "cause": "job_over", "exit_code": 93}, True),
        ({"is_accepted": True, "exit_code": 0}, True),
        ({"is_accepted": True, "standing": "leaving", "exit_code": 90}, False),
        ({"is_accepted": False, "cause": "unhealthy", "exit_code": 90}, False),
        ({"is_accepted": False, "cause": "excluded", "exit_code": 90}, False),
        ({"is_accepted": False, "cause": "wrong_version", "exit_code": 2}, False),
        ({"is_accepted": False, "cause": "misconfigured", "exit_code": 2}, False),
        ({"is_accepted": False, "cause": "different_job", "exit_code": 2}, False),
        ({"is_accepted": False, "cause": "duplicate", "exit_code": 2}, False),
    ],
)
def test_only_the_end_of_the_job_makes_the_code_of_an_agent_that_of_the_job(
    answer: dict[str, Any], ends_job: bool
) -> None:
    """Others train on without a node that is refused or replaced (A12.3)."""
    (exiting,) = Agent(AgentSettings()).joined(Joined(round=1, reason="because", **answer), now=0)
    assert isinstance(exiting, ExitAgent)
    assert (exiting.code, exiting.ends_job) == (answer["exit_code"], ends_job)


def test_a_refusal_is_said_once_and_asked_again_when_told_to() -> None:
    agent = Agent(AgentSettings())
    refused = Joined(
        round=0,
        is_accepted=False,
        reason="node-1 fails check gpu",
        cause="unhealthy",
        standing="refused",
        retry_after_s=30,
    )
    [said] = agent.joined(refused, now=0)
    assert isinstance(said, ShowLine)
    assert agent.joined(refused, now=0) == []
    assert agent.wake_at == 30


def test_a_rank_whose_script_returned_and_that_does_not_exit_is_done() -> None:
    """After 30 s the rank is killed, and counts as finished (A12.5)."""
    agent = Agent(AgentSettings())
    agent.ordered(start())
    agent.rank_runs(0)
    agent.rank_runs(1)
    agent.script_returned(0, now=50)
    agent.rank_gone(1, DONE)
    assert agent.wake_at == 80
    acts = agent.tick(now=80)
    assert acts[1:] == [SignalRanks(9, (0,))]
    assert told(agent.rank_gone(0, KILLED)) == ["finished"]


def test_ranks_that_cannot_be_started_are_told() -> None:
    agent = Agent(AgentSettings())
    agent.ordered(start())
    [tell] = agent.start_failed(1, "no such file: train.py")
    assert isinstance(tell, SendReport)
    assert (tell.event, tell.reason) == ("start_failed", "no such file: train.py")
    assert agent.start_failed(0, "an old one") == []


def test_a_last_rank_that_does_nothing_at_all_is_done() -> None:
    """After two idle minutes the rank is killed, and counts as finished (A12.5)."""
    agent = running()
    assert agent.last_ranks == frozenset()
    agent.rank_gone(1, DONE)
    assert agent.last_ranks == {0}
    assert agent.idle({0: 119.0}) == []
    acts = agent.idle({0: 120.0})
    assert acts[1:] == [SignalRanks(9, (0,))]
    assert agent.idle({0: 121.0}) == []
    assert told(agent.rank_gone(0, KILLED)) == ["finished"]


def test_ranks_that_are_idle_while_none_has_ended_are_left_alone() -> None:
    agent = running()
    assert agent.idle({0: 1e6, 1: 1e6}) == []


def test_a_rank_that_fails_ends_the_search_for_hanging_ends() -> None:
    agent = running()
    agent.rank_gone(1, KILLED)
    assert agent.last_ranks == frozenset()


def test_why_it_has_to_wait_is_said_once_however_it_is_heard() -> None:
    agent = Agent(AgentSettings())
    waits = AwaitRound(
        id="f" * 32, job="j", round=4, reason="waits 15 s before round 5: it crashed"
    )
    said = ShowLine("job j waits 15 s before round 5: it crashed")
    assert agent.ordered(waits) == [said]
    assert agent.joined(reply(4, order=waits), now=1) == []
    later = AwaitRound(id="f" * 32, job="j", round=4, reason="waits up to 600 s for round 5")
    assert agent.joined(reply(4, order=later), now=2) == [
        ShowLine("job j waits up to 600 s for round 5")
    ]


def test_what_it_runs_and_what_became_of_it_goes_with_its_question() -> None:
    agent = running()
    assert (agent.order, agent.running_state) == (start(), "")
    agent.rank_gone(0, DONE)
    assert agent.running_state == ""
    agent.rank_gone(1, DONE)
    assert str(agent.running_state) == "finished"
    agent = running()
    agent.rank_gone(0, KILLED)
    assert agent.running_state == "failed"


def test_it_joins_again_when_rendezvous_does_not_know_its_round() -> None:
    agent = running()
    tell = SendReport(1, "rank_exited", "it did")
    assert agent.reported(tell, Reported(round=1, is_current=False), now=1) == [AskToJoin()]
    assert agent.reported(tell, Reported(round=1, is_current=True), now=1) == []
    assert agent.state == "running"


def test_a_node_that_is_sent_away_says_why_and_not_that_the_job_is_over() -> None:
    agent = Agent(AgentSettings())
    order = LeaveJob(**common(1), exit_code=90, state="excluded")
    assert agent.ordered(order) == [
        ExitAgent(90, "excluded", "because", is_sent=True, has_seat=True)
    ]


def test_a_signal_before_all_ranks_run_ends_it_at_once() -> None:
    agent = Agent(AgentSettings(stop_grace_s=3))
    agent.ordered(start())
    agent.rank_runs(0)
    noticed = RecordNotice("SIGTERM", 600)
    assert agent.preempted(15, "SIGTERM", now=1) == [noticed, StopRound(1, 3, 0.0, None)]
    [exiting] = agent.stopped(1)
    assert isinstance(exiting, ExitAgent)
    assert (exiting.code, exiting.had_work) == (91, False)


def test_a_node_that_waits_for_others_and_is_preempted_asks_for_a_requeue() -> None:
    """A12.1: its round is over, and it has nothing to lose."""
    agent = running()
    agent.ordered(stop())
    agent.stopped(1)
    [_, exiting] = agent.preempted(15, "SIGTERM", now=99)
    assert isinstance(exiting, ExitAgent)
    assert (exiting.code, exiting.cause, exiting.had_work) == (91, "preempted", False)


def test_a_replaced_node_leaves_alike_by_the_order_and_by_the_answer() -> None:
    """Whichever arrives first: the job goes on, and the node is not refused."""
    by_answer, by_order = Agent(AgentSettings()), Agent(AgentSettings())
    answer = Joined(
        round=1, is_accepted=True, reason="n1 is replaced", standing="leaving", exit_code=0
    )
    exits = by_answer.joined(answer, now=1)
    assert exits == [ExitAgent(0, "excluded", "n1 is replaced", is_sent=True, has_seat=True)]
    order = LeaveJob(**{**common(1), "reason": "n1 is replaced"}, exit_code=0, state="excluded")
    assert by_order.ordered(order) == exits


def test_a_spare_answers_a_comparison_and_reports_no_other_probe() -> None:
    agent = Agent(AgentSettings())
    assert agent.check_compared("nic", "failed", "down") == [], "it has not joined"
    agent.joined(reply(3, standing="spare"), now=1)
    (report,) = agent.check_compared("nic", "failed", "down")
    assert isinstance(report, SendReport)
    assert (report.round, report.event, report.check_state) == (3, "check_compared", "failed")
    assert agent.check_failed("nic", "end_round", "down", "f" * 32) == []
    assert agent.reported(report, Reported(round=3, is_current=False), now=2) == []


def test_an_answer_that_an_order_overtook_takes_no_spare_its_standing() -> None:
    """The answer to `join` says that the job forms; the order to stand by says that it has."""
    agent = Agent(AgentSettings())
    assert agent.ordered(StandBy(**common(1))) == [ShowLine("standing by as a spare")]
    assert agent.joined(reply(0, standing="waiting"), now=1) == []
    (report,) = agent.check_compared("nic", "ok", "up")
    assert isinstance(report, SendReport)
    assert agent.joined(reply(1, standing="spare"), now=2) == [], "it is not said again"
    agent.joined(reply(1, standing="waiting"), now=3)
    assert agent.check_compared("nic", "ok", "up") == [], "round 1 is ending"


def test_a_spare_tells_when_it_trains_and_when_it_stands_by_again() -> None:
    agent = Agent(AgentSettings())
    assert agent.ordered(StandBy(**common(1))) == [ShowLine("standing by as a spare")]
    assert agent.ordered(start(2)) == [ShowLine("this spare joins round 2"), start(2)]
    agent.ordered(stop(2))
    agent.stopped(2)
    assert agent.ordered(StandBy(**common(3))) == [ShowLine("standing by as a spare")]

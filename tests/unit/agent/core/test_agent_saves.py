"""What an agent does when nodes are about to be taken away, and when a save is ordered."""

from typing import Any

import pytest

from everstep.messages import Reported, SaveCheckpoint, StartRanks, StopRanks
from everstep_services.agent.core.actions import (
    Action,
    AskRanksToSave,
    AskRanksToStop,
    ExitAgent,
    PassNotice,
    RecordMissed,
    RecordNotice,
    RecordSaved,
    RecordStopSeen,
    ReportProgress,
    SendReport,
    StopRound,
)
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.settings import AgentSettings

DONE = RankExit(code=0)


def start(slot: int = 0) -> StartRanks:
    return StartRanks(
        **_common(1), slot=slot, slots=2, first_rank=0, ranks=2, world_size=4,
        master_address="node-0", master_port=23456,
    )  # fmt: skip


def save(after_step: int | None, round: int = 1, **fields: Any) -> SaveCheckpoint:
    values: dict[str, Any] = {"occasion": "preemption", "then_stop": True, "within_s": 60.0}
    return SaveCheckpoint(**_common(round), after_step=after_step, **(values | fields))


def _common(round: int) -> dict[str, Any]:
    return {"id": f"{round:032x}", "job": "j", "round": round, "reason": "node-9 goes"}


def running(slot: int = 0, **limits: Any) -> Agent:
    agent = Agent(AgentSettings(**limits))
    agent.ordered(start(slot))
    agent.rank_runs(0)
    agent.rank_runs(1)
    return agent


def told(acts: list[Action]) -> list[str]:
    return [act.event for act in acts if isinstance(act, SendReport)]


def exit_code(acts: list[Action]) -> int:
    [exiting] = [act for act in acts if isinstance(act, ExitAgent)]
    return exiting.code


def test_a_notice_is_on_record_told_and_passed_on_once() -> None:
    agent = running(preempt_grace_s=900)
    acts = agent.preempted(10, "SIGUSR1", now=0)
    assert acts[:2] == [PassNotice(10), RecordNotice("SIGUSR1", 900)]
    assert told(acts) == ["preempted"]
    assert agent.preempted(15, "SIGTERM", now=1) == [PassNotice(15)]


def test_it_says_how_far_its_ranks_are_when_asked() -> None:
    agent = running()
    assert agent.asked_to_save(save(None), now=0) == [ReportProgress(1)]
    assert agent.asked_to_save(save(None, round=2), now=0) == [], "another round"


def test_ranks_are_asked_to_stop_once_though_the_order_is_repeated() -> None:
    agent = running()
    agent.preempted(15, "SIGTERM", now=0)
    assert agent.asked_to_save(save(7), now=1) == [AskRanksToStop(7)]
    assert agent.asked_to_save(save(7), now=2) == []
    assert agent.tick(now=3) == [], "it does not stop them by itself as well"


@pytest.mark.parametrize("goes", [True, False], ids=["it-goes", "it-stays"])
def test_ranks_that_could_not_be_asked_yet_are_asked_when_the_order_is_repeated(goes: bool) -> None:
    agent = running()
    if goes:
        agent.preempted(15, "SIGTERM", now=0)
    for now in (1, 2):
        assert agent.asked_to_save(save(0), now=now) == [AskRanksToStop(0)]
        agent.unasked(0, now)
    assert agent.asked_to_save(save(7), now=3) == [AskRanksToStop(7)]
    assert agent.asked_to_save(save(7), now=4) == []


def test_ranks_do_not_wait_for_a_control_plane_that_says_nothing() -> None:
    agent = running(agree_within_s=2)
    agent.preempted(15, "SIGTERM", now=0)
    assert agent.wake_at == 2
    assert agent.tick(now=2) == [AskRanksToStop(None)]
    assert agent.asked_to_save(save(7), now=3) == [], "their step is settled"


def test_nor_for_longer_than_half_of_the_time_that_they_have() -> None:
    agent = running(agree_within_s=20, preempt_grace_s=10)
    agent.preempted(15, "SIGTERM", now=0)
    assert agent.tick(now=4) == []
    assert agent.tick(now=5) == [AskRanksToStop(None)]


def test_ranks_wait_longer_for_a_control_plane_that_has_heard() -> None:
    agent = running(agree_within_s=2, preempt_grace_s=60)
    agent.preempted(15, "SIGTERM", now=0)
    agent.reported(SendReport(1, "preempted", "why"), Reported(round=1, is_current=True), now=1)
    assert agent.wake_at == 21
    assert agent.asked_to_save(save(7), now=6) == [AskRanksToStop(7)], "the step of all, not of one"
    agent = running(agree_within_s=2, preempt_grace_s=10)
    agent.preempted(15, "SIGTERM", now=0)
    agent.reported(SendReport(1, "preempted", "why"), Reported(round=1, is_current=True), now=1)
    assert agent.wake_at == 5.5, "they need time to save"
    assert agent.tick(now=6) == [AskRanksToStop(None)]


def test_a_node_that_saved_leaves_with_91_and_says_what_is_safe() -> None:
    agent = running(preempt_grace_s=60)
    agent.preempted(15, "SIGTERM", now=0)
    agent.asked_to_save(save(7), now=1)
    assert agent.rank_stops(0, 7, now=3) == []
    assert agent.rank_stops(1, 7, now=4) == [RecordStopSeen(7, 4)]
    assert agent.rank_stops(1, 7, now=4) == [], "the datagram and the page had reported it"
    agent.rank_gone(0, DONE)
    assert agent.rank_gone(1, DONE) == [RecordSaved(7, 60), StopRound(1, 0.0, 0.0, None)]
    assert exit_code(agent.stopped(1)) == 91


def test_only_slot_0_says_what_is_safe() -> None:
    agent = running(slot=1)
    agent.preempted(15, "SIGTERM", now=0)
    agent.rank_stops(0, 7, now=3)
    agent.rank_stops(1, 7, now=3)
    agent.rank_gone(0, DONE)
    assert agent.rank_gone(1, DONE) == [StopRound(1, 0.0, 0.0, None)]


def test_ranks_that_do_not_end_in_time_have_missed_it() -> None:
    agent = running(preempt_grace_s=60)
    agent.preempted(15, "SIGTERM", now=0)
    agent.asked_to_save(save(7), now=1)
    assert agent.tick(now=60) == [RecordMissed("ranks still ran"), StopRound(1, 0.0, 0.0, None)]
    assert exit_code(agent.stopped(1)) == 128 + 15


def test_a_rank_that_fails_while_it_saves_has_missed_it() -> None:
    agent = running()
    agent.preempted(15, "SIGTERM", now=0)
    agent.rank_gone(0, DONE)
    acts = agent.rank_gone(1, RankExit(code=1))
    assert [type(act) for act in acts] == [RecordMissed, StopRound]
    assert exit_code(agent.stopped(1)) == 128 + 15


def test_when_all_nodes_go_it_goes_with_them() -> None:
    agent = running()
    acts = agent.asked_to_save(save(7, then_leave=True), now=10)
    assert acts[0] == PassNotice(15, to_handlers=True)
    assert acts[-1] == AskRanksToStop(7)
    assert agent.wake_at == 70
    agent.rank_gone(0, DONE)
    agent.rank_gone(1, DONE)
    assert exit_code(agent.stopped(1)) == 91


def test_where_others_go_it_stops_its_ranks_and_stays() -> None:
    agent = running()
    assert agent.asked_to_save(save(7), now=0) == [AskRanksToStop(7)]
    agent.rank_stops(0, 7, now=1)
    agent.rank_stops(1, 7, now=1)
    agent.rank_gone(0, DONE)
    assert told(agent.rank_gone(1, DONE)) == ["stopped"]
    assert agent.running_state == "stopped"
    assert agent.ordered(StopRanks(**_common(1), cause="preempted")) != []


def test_a_training_that_ends_before_it_was_to_stop_is_finished() -> None:
    agent = running()
    agent.asked_to_save(save(700), now=0)
    agent.rank_gone(0, DONE)
    assert told(agent.rank_gone(1, DONE)) == ["finished"]


def test_a_person_who_stops_a_job_is_no_preemption() -> None:
    agent = running()
    agent.asked_to_save(save(7, occasion="requested"), now=0)
    agent.rank_stops(0, 7, now=1)
    assert agent.rank_stops(1, 7, now=1) == []


@pytest.mark.parametrize("then_leave", [False, True])
def test_a_save_that_goes_on_stops_nothing(then_leave: bool) -> None:
    agent = running()
    order = save(7, occasion="requested", then_stop=False, then_leave=then_leave)
    assert agent.asked_to_save(order, now=0) == [AskRanksToSave(7)]

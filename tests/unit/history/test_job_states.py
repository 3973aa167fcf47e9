"""The table of job states: all that senders and queries produce, no other, and what follows."""

from typing import get_args

from everstep.job_states import (
    AT_WORK,
    JOB_STATES,
    OVER,
    WITH_RANKS,
    JobEndState,
    RoundState,
    state_of_job,
)
from everstep.store.projected.jobs import PHASES
from everstep_services.agent.attached import attendance
from everstep_services.rendezvous.domain import ends


def test_each_state_is_produced_and_no_other() -> None:
    ended = {*get_args(ends.JobEnd), *get_args(attendance.JobEnd)}
    assert set(get_args(JobEndState)) == ended
    assert set(PHASES.values()) == set(get_args(RoundState))
    at_work = {state_of_job(state) for state in PHASES.values()}
    assert set(JOB_STATES) == {*at_work, "idle", *ended}
    assert set(AT_WORK) == at_work


def test_a_job_is_at_work_or_over_or_idle_and_only_a_job_at_work_has_ranks() -> None:
    assert sorted(JOB_STATES) == sorted((*AT_WORK, "idle", *OVER))
    assert set(WITH_RANKS) < set(AT_WORK)

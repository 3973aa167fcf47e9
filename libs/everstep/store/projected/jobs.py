"""The projected tables of jobs, allocations, rounds, their members, and exits of ranks."""

from collections.abc import Mapping

from everstep.job_states import RoundState
from everstep.store.projected.changes import ProjectedTable, greatest, least, led_by, once, total

WAITING, FORMED, STARTED, ENDED = 1, 2, 3, 4
"""Phases of a round, in the order in which they win; `PHASES` names them for people."""
PHASES: Mapping[int, RoundState] = {
    WAITING: "forming",
    FORMED: "starting",
    STARTED: "running",
    ENDED: "ended",
}
PHASES_A_ROUND = 10
"""A job's `phase_order` is its round times this, and the phase: a later round always wins."""

JOBS = ProjectedTable(
    "jobs",
    key={"job": "text"},
    columns={
        "first_n": least("int"),
        "opened_n": least("int"),
        "last_n": greatest("int"),
        "updated_us": greatest("int"),
        "facts": total(),
        **led_by(
            "spec_n",
            "int",
            name="text",
            labels="json",
            command="json",
            config_fingerprint="text",
            nodes_min="int",
            nodes_max="int",
            ranks_per_node="int",
            spares="int",
            max_restarts="int",
            max_restarts_per_hour="int",
            no_progress_limit="int",
        ),
        "started_us": least("int"),
        "user": greatest("text"),
        "version": greatest("text"),
        "live_allocations": total(),
        "begun_fact": greatest("text"),
        "round": greatest("int"),
        "phase_order": greatest("int"),
        "rounds": total(),
        "restarts": greatest("int"),
        "world_size": greatest("int"),
        "last_step": greatest("int"),
        "stepped_us": greatest("int"),
        "total_steps": greatest("int"),
        "is_counted_anew": least("bool"),
        "lost_steps": total(),
        "unknown_losses": total(),
        "ranks_failed": total(),
        "stalls": total(),
        "nodes_lost": total(),
        "incidents": total(),
        **led_by("budgets_n", "int", budgets="json"),
        **led_by(
            "ended_fact",
            "text",
            ended_us="int",
            end_state="text",
            end_reason="text",
            end_incident="text",
            exit_code="int",
        ),
    },
)
"""`opened_n` is the first fact that only a job which was begun can have: without one there is no
job, whatever else names it. `begun_fact` is of the latest allocation: if that is later than
`ended_fact`, the job goes on. `stepped_us` is when steps were last reported, by our clock.
`is_counted_anew` is over once a script gives a number: a first step may have none yet."""

ALLOCATIONS = ProjectedTable(
    "allocations",
    key={"job": "text", "allocation": "text"},
    columns={
        "first_n": least("int"),
        **led_by(
            "started_fact",
            "text",
            started_us="int",
            scheduler="text",
            scheduler_job="text",
            attempt="int",
            nodes_promised="int",
            time_limit_s="float",
            grace_s="float",
        ),
        "nodes_joined": total(),
        "rounds": total(),
        **led_by(
            "ended_fact",
            "text",
            ended_us="int",
            end_state="text",
            end_reason="text",
            exit_code="int",
            lasted_s="float",
        ),
    },
)

ROUNDS = ProjectedTable(
    "rounds",
    key={"job": "text", "round": "int"},
    columns={
        "first_n": least("int"),
        "last_n": greatest("int"),
        "facts": total(),
        "phase_order": greatest("int"),
        **led_by(
            "waiting_n", "int", nodes_waiting="int", nodes_needed="int", waiting_reason="text"
        ),
        **led_by(
            "formed_fact",
            "text",
            formed_us="int",
            formed_cause="text",
            formed_reason="text",
            allocation="text",
            world_size="int",
            nodes="int",
            spares="int",
            replaced="int",
            restarts="int",
            recovers_incident="text",
            waited_s="float",
        ),
        **led_by(
            "started_fact",
            "text",
            started_us="int",
            start_s="float",
            master_address="text",
            master_port="int",
            warm_ranks="int",
            slowest_node="text",
        ),
        "first_step": least("int"),
        "first_step_us": least("int"),
        "last_step": greatest("int"),
        "lost_steps": greatest("int"),
        "ranks_started": total(),
        "ranks_exited": total(),
        "ranks_failed": total(),
        "ranks_stopped": total(),
        "ranks_killed": total(),
        "stalls": total(),
        **led_by(
            "ended_fact",
            "text",
            ended_us="int",
            end_cause="text",
            end_reason="text",
            end_node="text",
            end_rank="int",
            end_incident="text",
            end_trigger="text",
            lasted_s="float",
        ),
    },
)

MEMBERS = ProjectedTable(
    "round_members",
    key={"job": "text", "round": "int", "slot": "int"},
    columns={
        **led_by("formed_fact", "text", node="text", first_rank="int", ranks="int"),
        **led_by(
            "stopped_fact",
            "text",
            stopped_us="int",
            stopped_ranks="json",
            killed_ranks="json",
            stop_s="float",
            evidence_s="float",
            device_wait_s="float",
            device_held_bytes="int",
        ),
        "ranks_killed": greatest("int"),
    },
)

EXITS = ProjectedTable(
    "rank_exits",
    key={"n": "int"},
    columns={
        **once(
            id="text",
            job="text",
            round="int",
            rank="int",
            local_rank="int",
            node="text",
            slot="int",
            at_us="int",
            how="text",
            is_failure="bool",
            exit_code="int",
            signal="text",
            error_name="text",
            error_text="text",
            error_place="text",
            error_chain="json",
            traceback="text",
            first_error="text",
            log="json",
            pid="int",
            core_dumped="bool",
            lasted_s="float",
            step="int",
            section="text",
            incident="text",
        ),
    },
)

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
        **least(int="first_n opened_n started_us", bool="is_counted_anew"),
        **greatest(
            int=("last_n updated_us round phase_order restarts last_step stepped_us total_steps"),
            text="user version begun_fact",
        ),
        **total(
            "facts live_allocations rounds lost_steps unknown_losses ranks_failed stalls "
            "nodes_lost incidents"
        ),
        **led_by(
            "spec_n",
            int=(
                "spec_n nodes_min nodes_max ranks_per_node spares max_restarts "
                "max_restarts_per_hour no_progress_limit"
            ),
            text="name config_fingerprint",
            json="labels command",
        ),
        **led_by("formed_fact", text="formed_fact", int="world_size"),
        **led_by("budgets_n", int="budgets_n", json="budgets"),
        **led_by(
            "ended_fact",
            text="ended_fact end_state end_reason end_incident",
            int="ended_us exit_code",
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
        **least(int="first_n"),
        **led_by(
            "started_fact",
            text="started_fact scheduler scheduler_job",
            int="started_us attempt nodes_promised",
            float="time_limit_s grace_s",
        ),
        **total("nodes_joined rounds"),
        **led_by(
            "ended_fact",
            text="ended_fact end_state end_reason",
            int="ended_us exit_code",
            float="lasted_s",
        ),
    },
)

ROUNDS = ProjectedTable(
    "rounds",
    key={"job": "text", "round": "int"},
    columns={
        **least(int="first_n first_step first_step_us"),
        **greatest(int="last_n phase_order last_step lost_steps"),
        **total("facts ranks_started ranks_exited ranks_failed ranks_stopped ranks_killed stalls"),
        **led_by("waiting_n", int="waiting_n nodes_waiting nodes_needed", text="waiting_reason"),
        **led_by(
            "formed_fact",
            text="formed_fact formed_cause formed_reason allocation recovers_incident",
            int="formed_us world_size nodes spares replaced restarts",
            float="waited_s",
        ),
        **led_by(
            "started_fact",
            text="started_fact master_address slowest_node",
            int="started_us master_port warm_ranks",
            float="start_s",
        ),
        **led_by(
            "healed_fact",
            text="healed_fact healed",
            int="healed_us healed_step healed_kept",
            float="healed_took_s",
        ),
        **led_by(
            "ended_fact",
            text="ended_fact end_cause end_reason end_node end_incident end_trigger",
            int="ended_us end_rank",
            float="lasted_s",
        ),
    },
)

MEMBERS = ProjectedTable(
    "round_members",
    key={"job": "text", "round": "int", "slot": "int"},
    columns={
        **led_by("formed_fact", text="formed_fact node", int="first_rank ranks"),
        **led_by(
            "stopped_fact",
            text="stopped_fact",
            int="stopped_us device_held_bytes",
            json="stopped_ranks killed_ranks",
            float="stop_s evidence_s device_wait_s",
        ),
        **greatest(int="ranks_killed"),
    },
)

EXITS = ProjectedTable(
    "rank_exits",
    key={"n": "int"},
    columns={
        **once(
            text=(
                "id job node how signal error_name error_text error_place traceback first_error "
                "section incident"
            ),
            int="round rank local_rank slot at_us exit_code pid step",
            bool="is_failure core_dumped",
            json="error_chain log",
            float="lasted_s",
        )
    },
)

"""The projected tables of checkpoints: commits, failures, delays, and the last restore."""

from everstep.store.projected.changes import ProjectedTable, led_by, total

SAVES = ProjectedTable(
    "job_saves",
    key={"job": "text", "tier": "text"},
    columns={
        **led_by(
            "committed_n",
            int="committed_n committed_step committed_us committed_round size_bytes",
            text="path manifest_hash occasion",
            float="lag_s stall_s write_s",
        ),
        **total("commits failures bad_found deleted"),
        **led_by(
            "failed_n",
            int="failed_n failed_us failed_step",
            text="failed_node failed_stage failed_reason",
        ),
        **led_by(
            "interval_n", int="interval_n every_steps", float="every_s", text="interval_reason"
        ),
    },
)
"""One row for each tier of a job: the newest commit, the newest failure, how often it saves."""

DELAYS = ProjectedTable(
    "save_delays",
    key={"job": "text", "node": "text"},
    columns={
        **led_by(
            "delay_n",
            int="delay_n delay_us waiting waiting_bytes",
            float="delay_lag_s",
            text="delay_reason",
        ),
        **led_by(
            "refusal_n",
            int="refusal_n refusal_us refusal_step needed_bytes available_bytes",
            text="refusal_reason place",
        ),
        **total("refusals"),
    },
)
"""Saves that wait for a slow storage, and those that did not fit, as each node reported last."""

RESTORES = ProjectedTable(
    "job_restores",
    key={"job": "text"},
    columns={
        **led_by(
            "restored_n",
            int="restored_n restored_us restored_round restored_step rejected",
            text="outcome restored_reason",
            json="tiers",
            float="restored_s",
        ),
        **total("restores failed_restores fresh_starts"),
        **led_by(
            "copies_n",
            int="copies_n copies_us survivable_losses",
            bool="is_degraded",
            text="copies_reason",
        ),
    },
)
"""What the newest round began from (`restored`, `fresh` or `failed`), and whether as many nodes may
be lost as wanted."""

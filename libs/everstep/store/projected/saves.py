"""The projected tables of checkpoints: commits, failures, delays, and the last restore."""

from everstep.store.projected.changes import ProjectedTable, led_by, total

SAVES = ProjectedTable(
    "job_saves",
    key={"job": "text", "tier": "text"},
    columns={
        **led_by(
            "committed_n",
            "int",
            committed_step="int",
            committed_us="int",
            committed_round="int",
            path="text",
            manifest_hash="text",
            size_bytes="int",
            occasion="text",
            lag_s="float",
            stall_s="float",
            write_s="float",
        ),
        "commits": total(),
        **led_by(
            "failed_n",
            "int",
            failed_us="int",
            failed_step="int",
            failed_node="text",
            failed_stage="text",
            failed_reason="text",
        ),
        "failures": total(),
        **led_by(
            "interval_n",
            "int",
            every_steps="int",
            every_s="float",
            interval_reason="text",
        ),
        "bad_found": total(),
        "deleted": total(),
    },
)
"""One row for each tier of a job: the newest commit, the newest failure, how often it saves."""

DELAYS = ProjectedTable(
    "save_delays",
    key={"job": "text", "node": "text"},
    columns={
        **led_by(
            "delay_n",
            "int",
            delay_us="int",
            delay_lag_s="float",
            waiting="int",
            waiting_bytes="int",
            delay_reason="text",
        ),
        **led_by(
            "refusal_n",
            "int",
            refusal_us="int",
            refusal_step="int",
            refusal_reason="text",
            needed_bytes="int",
            available_bytes="int",
            place="text",
        ),
        "refusals": total(),
    },
)
"""Saves that wait for a slow storage, and those that did not fit, as each node reported last."""

RESTORES = ProjectedTable(
    "job_restores",
    key={"job": "text"},
    columns={
        **led_by(
            "restored_n",
            "int",
            restored_us="int",
            restored_round="int",
            outcome="text",
            restored_step="int",
            tiers="json",
            restored_reason="text",
            restored_s="float",
            rejected="int",
        ),
        "restores": total(),
        "failed_restores": total(),
        "fresh_starts": total(),
        **led_by(
            "copies_n",
            "int",
            copies_us="int",
            survivable_losses="int",
            is_degraded="bool",
            copies_reason="text",
        ),
    },
)
"""What the newest round began from (`restored`, `fresh` or `failed`), and whether as many nodes may
be lost as wanted."""

"""The projected tables of incidents: their story, evidence, verdicts, decisions and actions."""

from everstep.store.projected.changes import ProjectedTable, greatest, least, led_by, once

INCIDENTS = ProjectedTable(
    "incidents",
    key={"job": "text", "incident": "text"},
    columns={
        **least(int="first_n"),
        **greatest(int="last_n ranks_affected"),
        **led_by(
            "opened_fact", text="opened_fact phase section", int="opened_us round step progress_us"
        ),
        **led_by(
            "cause_order",
            text="cause_order trigger reason trigger_fact node injected_by",
            int="rank",
        ),
        **led_by("extended_fact", text="extended_fact extended_reason", json="nodes_affected"),
        **led_by(
            "verdict_order",
            text="verdict_order verdict_fact verdict_reason cause advice fingerprint",
            int="verdict_us",
            float="confidence",
            json="culprit_ranks culprit_nodes",
            bool="is_transient is_inconclusive",
        ),
        **led_by(
            "closed_fact",
            text="closed_fact outcome story restored_tier merged_into",
            int="closed_us lost_steps restored_step next_round reports",
            float=(
                "unfinished_s detect_s evidence_s decide_s stop_s rendezvous_s start_s restore_s "
                "heal_s first_step_s no_step_s other_s wall_s lost_s"
            ),
        ),
    },
)
"""`cause_order`: the cause given when the incident closes wins over the one given at first.
`verdict_order` puts a person's verdict first, then the revision, then the id: the highest holds."""

VERDICTS = ProjectedTable(
    "verdicts",
    key={"verdict_fact": "text"},
    columns={
        **least(int="n"),
        **once(
            text=(
                "job incident verdict_reason cause cause_kind advice retry fingerprint explanation"
            ),
            int="verdict_us revision",
            float="confidence took_s",
            bool="is_inconclusive is_corrected is_transient",
            json="culprit_ranks culprit_nodes grounds alternatives gaps analyzers",
        ),
    },
)
"""Every revision of every verdict."""

CORRECTIONS = ProjectedTable(
    "verdict_corrections",
    key={"correction_fact": "text"},
    columns={
        **least(int="n"),
        **once(
            text="job incident corrected_by cause note was_cause",
            int="corrected_us",
            json="culprit_ranks culprit_nodes",
            bool="is_confirmation",
        ),
    },
)
"""Corrections of verdicts by people."""

ACTIONS = ProjectedTable(
    "actions",
    key={"decision": "text"},
    columns={
        **least(int="n"),
        **once(
            text="job incident action decided_by rule mode reason",
            int="round decided_us",
            json="budgets considered unknowns rests_on nodes_out nodes_in",
            float="delay_s decide_s",
        ),
        **led_by(
            "taken_fact", text="taken_fact outcome outcome_reason", int="taken_us", float="took_s"
        ),
    },
)
"""By the id of the `action_decided`; the outcome may be recorded first."""

EVIDENCE = ProjectedTable(
    "evidence",
    key={"id": "text"},
    columns={
        **least(int="n"),
        **once(
            text="job incident node kind stream summary missing_reason",
            int="round at_us rank",
            json="blob",
            float="took_s",
        ),
    },
)

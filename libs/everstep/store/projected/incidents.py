"""The projected tables of incidents: their story, evidence, verdicts, decisions and actions."""

from everstep.store.projected.changes import ProjectedTable, greatest, least, led_by, once

INCIDENTS = ProjectedTable(
    "incidents",
    key={"job": "text", "incident": "text"},
    columns={
        "first_n": least("int"),
        "last_n": greatest("int"),
        **led_by(
            "opened_fact",
            "text",
            opened_us="int",
            round="int",
            step="int",
            phase="text",
            section="text",
            progress_us="int",
        ),
        **led_by(
            "cause_order",
            "text",
            trigger="text",
            reason="text",
            trigger_fact="text",
            node="text",
            rank="int",
            injected_by="text",
        ),
        **led_by("extended_fact", "text", extended_reason="text", nodes_affected="json"),
        "ranks_affected": greatest("int"),
        **led_by(
            "verdict_order",
            "text",
            verdict_fact="text",
            verdict_us="int",
            verdict_reason="text",
            cause="text",
            confidence="float",
            culprit_ranks="json",
            culprit_nodes="json",
            advice="text",
            is_transient="bool",
            fingerprint="text",
            is_inconclusive="bool",
        ),
        **led_by(
            "closed_fact",
            "text",
            closed_us="int",
            outcome="text",
            story="text",
            unfinished_s="float",
            detect_s="float",
            evidence_s="float",
            decide_s="float",
            stop_s="float",
            rendezvous_s="float",
            start_s="float",
            restore_s="float",
            first_step_s="float",
            no_step_s="float",
            other_s="float",
            wall_s="float",
            lost_steps="int",
            lost_s="float",
            restored_step="int",
            restored_tier="text",
            next_round="int",
            reports="int",
            merged_into="text",
        ),
    },
)
"""`cause_order`: the cause given when the incident closes wins over the one given at first.
`verdict_order` puts a person's verdict first, then the revision, then the id: the highest holds."""

VERDICTS = ProjectedTable(
    "verdicts",
    key={"verdict_fact": "text"},
    columns={
        "n": least("int"),
        **once(
            job="text",
            incident="text",
            verdict_us="int",
            revision="int",
            verdict_reason="text",
            cause="text",
            cause_kind="text",
            confidence="float",
            is_inconclusive="bool",
            is_corrected="bool",
            culprit_ranks="json",
            culprit_nodes="json",
            advice="text",
            is_transient="bool",
            retry="text",
            fingerprint="text",
            grounds="json",
            alternatives="json",
            gaps="json",
            analyzers="json",
            explanation="text",
            took_s="float",
        ),
    },
)
"""Every revision of every verdict."""

CORRECTIONS = ProjectedTable(
    "verdict_corrections",
    key={"correction_fact": "text"},
    columns={
        "n": least("int"),
        **once(
            job="text",
            incident="text",
            corrected_us="int",
            corrected_by="text",
            cause="text",
            note="text",
            culprit_ranks="json",
            culprit_nodes="json",
            was_cause="text",
            is_confirmation="bool",
        ),
    },
)
"""Corrections of verdicts by people."""

ACTIONS = ProjectedTable(
    "actions",
    key={"decision": "text"},
    columns={
        "n": least("int"),
        **once(
            job="text",
            incident="text",
            action="text",
            round="int",
            decided_us="int",
            decided_by="text",
            rule="text",
            mode="text",
            reason="text",
            budgets="json",
            considered="json",
            unknowns="json",
            rests_on="json",
            nodes_out="json",
            nodes_in="json",
            delay_s="float",
            decide_s="float",
        ),
        **led_by(
            "taken_fact",
            "text",
            taken_us="int",
            outcome="text",
            outcome_reason="text",
            took_s="float",
        ),
    },
)
"""By the id of the `action_decided`; the outcome may be recorded first."""

EVIDENCE = ProjectedTable(
    "evidence",
    key={"id": "text"},
    columns={
        "n": least("int"),
        **once(
            job="text",
            incident="text",
            round="int",
            at_us="int",
            node="text",
            rank="int",
            kind="text",
            stream="text",
            blob="json",
            summary="text",
            missing_reason="text",
            took_s="float",
        ),
    },
)

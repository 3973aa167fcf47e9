"""The projected tables of nodes and stalls: standing, checks, watch, limits, which rank stopped."""

from everstep.store.projected.changes import ProjectedTable, greatest, least, led_by, once, total

NODES = ProjectedTable(
    "nodes",
    key={"node": "text"},
    columns={
        "first_n": least("int"),
        "last_n": greatest("int"),
        "updated_us": greatest("int"),
        **led_by("state_n", "int", state="text", state_us="int", state_reason="text"),
        **led_by(
            "joined_n",
            "int",
            job="text",
            allocation="text",
            joined_us="int",
            address="text",
            ranks="int",
            failure_domain="text",
            topology="json",
            device="text",
            version="text",
            nvlink_domain="text",
        ),
        **led_by("health_n", "int", is_healthy="bool", health_us="int", health_reason="text"),
        **led_by("refused_n", "int", refused_us="int", refused_cause="text", refused_reason="text"),
        **led_by(
            "suspicion_n",
            "int",
            is_suspect="bool",
            suspect_us="int",
            suspect_cause="text",
            suspect_reason="text",
            suspect_class="text",
            strikes="int",
            strikes_limit="int",
        ),
        **led_by(
            "exclusion_n",
            "int",
            is_excluded="bool",
            excluded_us="int",
            excluded_until_us="int",
            excluded_by="text",
            excluded_reason="text",
        ),
        **led_by("spared_n", "int", spared_us="int", spared_reason="text"),
        "joins": total(),
        "losses": total(),
        "refusals": total(),
        "suspicions": total(),
        "ranks_failed": total(),
        "stalls": total(),
    },
)
"""`spared`: it would have been excluded, and was not, because health only observes."""

NODE_CHECKS = ProjectedTable(
    "node_checks",
    key={"n": "int"},
    columns={
        **once(
            id="text",
            node="text",
            job="text",
            at_us="int",
            occasion="text",
            is_healthy="bool",
            took_s="float",
            checks="json",
            results="json",
            policy="text",
            failures="int",
            is_acted_on="bool",
        ),
    },
)

WATCHES = ProjectedTable(
    "node_watches",
    key={"job": "text", "node": "text"},
    columns=led_by(
        "watch_n",
        "int",
        watch_state="text",
        watch_reason="text",
        watch_us="int",
        until_s="float",
        sections="json",
    ),
)
"""Whether stalls are looked for, as each agent of a job reported last."""

LIMITS = ProjectedTable(
    "job_limits",
    key={"job": "text"},
    columns=led_by(
        "limits_n",
        "int",
        limits="json",
        limits_reason="text",
        limits_us="int",
        limits_revision="int",
    ),
)

STALLS = ProjectedTable(
    "rank_stalls",
    key={"id": "text"},
    columns={
        "n": least("int"),
        **once(job="text", round="int", rank="int", node="text"),
        "at_us": least("int"),
        **once(
            phase="text",
            section="text",
            step="int",
            shown_by="text",
            blocked_in="text",
            process_state="text",
            waited_s="float",
            limit_s="float",
            limit_source="text",
            is_fatal="bool",
            recovered_us="int",
            stalled_s="float",
        ),
    },
)

LOCATED = ProjectedTable(
    "stalls_located",
    key={"id": "text"},
    columns={
        "n": least("int"),
        **once(
            job="text",
            round="int",
            at_us="int",
            first_ranks="json",
            first_nodes="json",
            waiting_ranks="int",
            section="text",
            lead_s="float",
            is_certain="bool",
            reason="text",
        ),
    },
)
"""Which ranks stopped first, and how many merely waited; one row for each finding."""

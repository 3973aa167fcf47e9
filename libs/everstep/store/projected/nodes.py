"""The projected tables of nodes and stalls: standing, checks, watch, limits, which rank stopped."""

from everstep.store.projected.changes import ProjectedTable, greatest, least, led_by, once, total

NODES = ProjectedTable(
    "nodes",
    key={"node": "text"},
    columns={
        **least(int="first_n"),
        **greatest(int="last_n updated_us"),
        **led_by("state_n", int="state_n state_us", text="state state_reason"),
        **led_by(
            "joined_n",
            int="joined_n joined_us ranks",
            text="job allocation address failure_domain device version nvlink_domain",
            json="topology",
        ),
        **led_by("health_n", int="health_n health_us", bool="is_healthy", text="health_reason"),
        **led_by("refused_n", int="refused_n refused_us", text="refused_cause refused_reason"),
        **led_by(
            "suspicion_n",
            int="suspicion_n suspect_us strikes strikes_limit",
            bool="is_suspect",
            text="suspect_cause suspect_reason suspect_class",
        ),
        **led_by(
            "exclusion_n",
            int="exclusion_n excluded_us excluded_until_us",
            bool="is_excluded",
            text="excluded_by excluded_reason",
        ),
        **led_by("spared_n", int="spared_n spared_us", text="spared_reason"),
        **total("joins losses refusals suspicions ranks_failed stalls"),
    },
)
"""`spared`: it would have been excluded, and was not, because health only observes."""

NODE_CHECKS = ProjectedTable(
    "node_checks",
    key={"n": "int"},
    columns={
        **once(
            text="id node job occasion policy",
            int="at_us failures",
            bool="is_healthy is_acted_on",
            float="took_s",
            json="checks results",
        )
    },
)

WATCHES = ProjectedTable(
    "node_watches",
    key={"job": "text", "node": "text"},
    columns=led_by(
        "watch_n",
        int="watch_n watch_us",
        text="watch_state watch_reason",
        float="until_s",
        json="sections",
    ),
)
"""Whether stalls are looked for, as each agent of a job reported last."""

LIMITS = ProjectedTable(
    "job_limits",
    key={"job": "text"},
    columns=led_by(
        "limits_n", int="limits_n limits_us limits_revision", json="limits", text="limits_reason"
    ),
)

STALLS = ProjectedTable(
    "rank_stalls",
    key={"id": "text"},
    columns={
        **least(int="n at_us"),
        **once(
            text="job node phase section shown_by blocked_in process_state limit_source "
            "limit_origin",
            int="round rank step recovered_us",
            float="waited_s limit_s stalled_s",
            bool="is_fatal",
        ),
    },
)

LOCATED = ProjectedTable(
    "stalls_located",
    key={"id": "text"},
    columns={
        **least(int="n"),
        **once(
            text="job section reason",
            int="round at_us waiting_ranks",
            json="first_ranks first_nodes",
            float="lead_s",
            bool="is_certain",
        ),
    },
)
"""Which ranks stopped first, and how many merely waited; one row for each finding."""

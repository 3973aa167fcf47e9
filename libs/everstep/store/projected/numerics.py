"""The projected tables of results that cannot be right, and of determinism."""

from everstep.store.projected.changes import ProjectedTable, greatest, least, led_by, once

NUMERICS_CASES = ProjectedTable(
    "numerics_cases",
    key={"job": "text", "case": "text"},
    columns={
        **least(int="first_n"),
        **greatest(int="last_n"),
        **once(text="incident", int="round step"),
        **led_by(
            "suspected_fact",
            text="suspected_fact suspected_reason signal",
            int="suspected_us moved_at suspected_rank",
            json="suspected_ranks",
            float="value low high",
        ),
        **led_by(
            "judged_fact",
            text="judged_fact judged_reason judged_signal kind node device judged_group",
            int="judged_us elsewhere_by samples_from samples_to",
            json="judged_ranks judged_again",
            float="judged_first elsewhere",
        ),
    },
)
"""One row for each case: what was suspected, and how it was judged."""

NUMERICS_ACTS = ProjectedTable(
    "numerics_acts",
    key={"id": "text"},
    columns={
        **least(int="n"),
        **once(
            text="job case action outcome reason",
            int="round at_us to_step lost_steps samples_from samples_to",
        ),
    },
)
"""What followed from each case."""

COMPARED_RESULTS = ProjectedTable(
    "compared_results",
    key={"job": "text", "round": "int", "name": "text"},
    columns=led_by(
        "counted_n", int="counted_n counted_us steps again compared different", float="largest"
    ),
)
"""How often each result of a round was the same when its step was run again."""

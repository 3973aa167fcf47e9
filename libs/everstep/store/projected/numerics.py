"""The projected tables of results that cannot be right, and of determinism."""

from everstep.store.projected.changes import ProjectedTable, greatest, least, led_by, once

NUMERICS_CASES = ProjectedTable(
    "numerics_cases",
    key={"job": "text", "case": "text"},
    columns={
        "first_n": least("int"),
        "last_n": greatest("int"),
        **once(round="int", step="int", incident="text"),
        **led_by(
            "suspected_fact",
            "text",
            suspected_us="int",
            suspected_reason="text",
            signal="text",
            moved_at="int",
            suspected_rank="int",
            suspected_ranks="json",
            value="float",
            low="float",
            high="float",
        ),
        **led_by(
            "judged_fact",
            "text",
            judged_us="int",
            judged_reason="text",
            judged_signal="text",
            kind="text",
            judged_ranks="json",
            node="text",
            device="text",
            judged_group="text",
            judged_first="float",
            judged_again="json",
            elsewhere="float",
            elsewhere_by="int",
            samples_from="int",
            samples_to="int",
        ),
    },
)
"""One row for each case: what was suspected, and how it was judged."""

NUMERICS_ACTS = ProjectedTable(
    "numerics_acts",
    key={"id": "text"},
    columns={
        "n": least("int"),
        **once(
            job="text",
            case="text",
            round="int",
            at_us="int",
            action="text",
            outcome="text",
            reason="text",
            to_step="int",
            samples_from="int",
            samples_to="int",
        ),
    },
)
"""What followed from each case."""

COMPARED_RESULTS = ProjectedTable(
    "compared_results",
    key={"job": "text", "round": "int", "name": "text"},
    columns=led_by(
        "counted_n",
        "int",
        counted_us="int",
        steps="int",
        again="int",
        compared="int",
        different="int",
        largest="float",
    ),
)
"""How often each result of a round was the same when its step was run again."""

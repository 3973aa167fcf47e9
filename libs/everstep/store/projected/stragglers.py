"""What is projected about slow ranks, and about steps that changed for the whole job."""

from everstep.store.projected.changes import Column, ProjectedTable, Type, greatest, least, led_by

ACTIONS = ("exclude", "stop")
"""What the policy may ask for, each once for a finding."""


def _action(action: str) -> dict[str, Column]:
    """What is kept of one action: when, its outcome, and why."""
    led: dict[str, Type] = {
        f"{action}_us": "int",
        f"{action}_outcome": "text",
        f"{action}_reason": "text",
    }
    return led_by(f"{action}_fact", "text", **led)


STRAGGLERS = ProjectedTable(
    "stragglers",
    key={"id": "text"},
    columns={
        "n": least("int"),
        "job": greatest("text"),
        "round": greatest("int"),
        "rank": greatest("int"),
        "node": greatest("text"),
        "slot": greatest("int"),
        "role": greatest("text"),
        "found_us": greatest("int"),
        "cause": greatest("text"),
        "reason": greatest("text"),
        "section": greatest("text"),
        "scores": greatest("json"),
        "lateness_s": greatest("float"),
        "slowdown_ratio": greatest("float"),
        "windows": greatest("int"),
        "confidence": greatest("float"),
        "failure_class": greatest("text"),
        **led_by(
            "cleared_fact",
            "text",
            cleared_us="int",
            cleared_reason="text",
            lasted_s="float",
            lost_s="float",
        ),
        **led_by(
            "acted_fact",
            "text",
            acted_us="int",
            action="text",
            action_outcome="text",
            action_reason="text",
        ),
        **{name: column for action in ACTIONS for name, column in _action(action).items()},
    },
)
"""One row for each finding. `n` is the place of `straggler_found`: there is none while only its
end, or what was done about it, was heard of."""

STEP_SHIFTS = ProjectedTable(
    "step_shifts",
    key={"id": "text"},
    columns={
        "n": least("int"),
        "job": greatest("text"),
        "round": greatest("int"),
        "at_us": greatest("int"),
        "before_s": greatest("float"),
        "now_s": greatest("float"),
        "step": greatest("int"),
        "section": greatest("text"),
        "reason": greatest("text"),
    },
)
"""When the steps of a whole job became slower or faster, and no rank stood out."""
